"""What a checkpoint recorded is the lowest layer of settings; resuming is not starting anew."""

import io
import os
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from tasks import cli

HERE = Path(__file__).parent
JOB = (HERE / "stub_job.yaml").read_text()


def test_a_checkpoint_stands_in_for_what_is_not_given(run, trained):
    built = run("test", "--ckpt_path", str(trained))
    assert built.model.transformer.rotary.base == 100 and built.model.transformer.dim == 16
    assert built.trainer.logger is None
    assert "what you gave wins" not in run.err
    # slope 1, lr 0.25, gradient: the mean of each batch's numbers
    weight = 1 - 0.25 * (0.5 / 8 + 2.5 / 8 + 4.5 / 8 + 6 / 8)
    torch.testing.assert_close(built.model.linear.weight.item(), weight)


def test_config_over_checkpoint_and_typed_over_both(run, trained, here):
    (here / "other.yaml").write_text(JOB.replace("base: 100", "base: 50").replace("0.25", "0.125"))
    job = ("-c", "other.yaml", "--model.lr", "0.0625", "--data.image_size", "[48,32]")
    built = run("test", *job, "--ckpt_path", str(trained))
    assert built.model.transformer.rotary.base == 50
    assert built.model.hparams.lr == 0.0625
    assert [line for line in run.err.splitlines() if line.startswith("model.")] == [
        "model.transformer.rotary.base: checkpoint 100.0, now 50.0 (what you gave wins)",
        "model.lr: checkpoint 0.25, now 0.0625 (what you gave wins)",
        "model.image_size: checkpoint (32, 32), now (48, 32) (what you gave wins)",
    ]


def test_another_class_is_one_difference(run, trained):
    built = run("test", "-c", "job.yaml", "-c", "turned.yaml", f"--ckpt_path={trained}")
    assert built.model.transformer.rotary is None
    assert [line for line in run.err.splitlines() if line.startswith("model.")] == [
        "model.transformer.rotary: checkpoint Rotary(base=100.0, layout=whole), now null "
        "(what you gave wins)",
        "model.transformer.bias: checkpoint null, now Bias(distance=euclidean) "
        "(what you gave wins)",
    ]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resuming_goes_on_and_weights_begin_anew(run, trained, here):
    quiet = ("--trainer.enable_progress_bar=false", "--trainer.log_every_n_steps=1")
    quiet += ("--trainer.enable_model_summary=false", "--trainer.logger=false")
    resumed = run("fit", "--ckpt_path", str(trained), "--trainer.max_epochs", "3", *quiet)
    assert resumed.trainer.global_step == 12 and resumed.model.hparams.lr == 0.25
    torch.save({"value": 5.0}, here / "w.pt")
    anew = run("fit", "-c", "job.yaml", "--model.weights", "w.pt", "--model.lr", "0")
    assert anew.trainer.global_step == 4
    assert anew.model.linear.weight.item() == 5
    both = ("fit", "-c", "job.yaml", "--model.weights", "w.pt", "--ckpt_path", str(trained))
    status, line = run.fails(*both)
    assert status == 2 and "begins a new run" in line
    # what that run recorded names the weights that it began with; going on does not need them
    (here / "w.pt").unlink()
    begun = anew.trainer.checkpoint_callback.best_model_path
    assert run("test", "--ckpt_path", begun).model.linear.weight.item() == 5
    assert "what you gave wins" not in run.err
    saved = ("-c", "runs/config.yaml", "--ckpt_path", str(trained), "--trainer.max_epochs", "2")
    assert run("fit", *saved).model.hparams.weights is None


def test_a_name_that_lightning_resolves(run, here):
    last = ("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_last=true")
    run("fit", "-c", "job.yaml", *last)
    more = run("fit", "-c", "job.yaml", *last, "--ckpt_path=last", "--trainer.max_epochs=2")
    assert more.trainer.global_step == 8
    status, line = run.fails("test", "-c", "job.yaml", "--ckpt_path", "best")
    assert status == 1 and 'ckpt_path="best"' in line


def test_last_where_there_is_none(run, monkeypatch):
    line = "--ckpt_path last: there is no last checkpoint to go on with below runs: give its file, "
    line += "or leave --ckpt_path out to begin anew"
    for command in ("fit", "validate", "test", "predict"):
        assert run.fails(command, "-c", "job.yaml", "--ckpt_path=last") == (1, line)
    assert run.fails("fit", "--ckpt_path", "last") == (1, line)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # a job that was ended before it saved
    run("fit", "-c", "job.yaml", "--ckpt_path=last")
    assert "no whole checkpoint below runs yet, the job begins anew" in run.err
    assert run("fit", "-c", "job.yaml", "--ckpt_path=last", *LONGER).trainer.global_step == 8


LONGER = ("--trainer.max_epochs=2", "--test_after_fit=false")


def test_last_is_the_newest_whole_checkpoint_of_the_job(run, here):
    job = ("fit", "-c", "job.yaml", "--trainer.logger.name=mine", "--test_after_fit=false")
    run(*job, "--trainer.logger.version=0", "--model.lr=0.1")
    run(*job, "--trainer.logger.version=1", "--model.lr=0.2")
    run("fit", "-c", "job.yaml", "--trainer.logger.name=other", "--test_after_fit=false")
    saved = sorted((here / "runs").rglob("*.ckpt"))
    first, second, other = (path.relative_to(here) for path in saved)
    for age, path in enumerate((other, second, first)):
        os.utime(path, (1e9 - age, 1e9 - age))
    whole = job[:3] + LONGER
    assert run(*whole, "--trainer.logger.name=mine", "--ckpt_path=last").model.hparams.lr == 0.25
    assert f"--ckpt_path last: {second}" in run.err and "checkpoint 0.2, now 0.25" in run.err
    folder = second.parents[1]  # goes on in the folder of the run, and loses no metrics
    assert sorted(path.name for path in (here / folder).glob("*.csv")) == [
        "metrics.1.csv",
        "metrics.csv",
    ]
    (longer,) = set((here / "runs").rglob("*.ckpt")) - {here / p for p in (first, second, other)}
    assert longer.parent == here / second.parent
    longer.unlink()
    alone = run("fit", "--ckpt_path", "last", *LONGER)
    assert f"--ckpt_path last: {other}" in run.err and alone.trainer.global_step == 8
    for path in (here / "runs" / "other").rglob("*.ckpt"):
        os.utime(path, (1, 1))
    second.touch()
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)  # the newest now
    run(*whole, "--trainer.logger.name=mine", "--ckpt_path=last")
    assert f"passed over {second}: not a checkpoint, or a damaged one" in run.err
    assert f"--ckpt_path last: {first}\n" in run.err and "checkpoint 0.1, now 0.25" in run.err
    damaged = "not a checkpoint, or a damaged one"
    assert run.fails("fit", "--ckpt_path", str(second)) == (1, f"--ckpt_path {second}: {damaged}")
    asked = ("--trainer.logger.name=mine", "--trainer.logger.version=1", "--ckpt_path=last")
    assert "no last checkpoint" in run.fails(*whole, *asked)[1]


def test_the_seed_of_a_run_goes_on_with_it(run, here):
    run("fit", "-c", "job.yaml", "--seed_everything=7", "--test_after_fit=false")
    again = run("fit", "--ckpt_path=last", *LONGER)
    assert again.config.fit.seed_everything == 7 and "seed" not in run.err
    run("fit", "--ckpt_path=last", "--trainer.max_epochs=3", "--seed_everything=8")
    assert "seed_everything: checkpoint 7, now 8 (what you gave wins)" in run.err


def test_a_run_that_has_ended(run, trained):
    status, line = run.fails("fit", "--ckpt_path", str(trained))
    assert status == 1 and line.startswith(f"nothing was trained: the run of {trained} had come")
    assert line.endswith("to go on raise --trainer.max_epochs (now 1)")


def test_checkpoint_files_that_are_none(run, here, trained):
    assert run.fails("test", "--ckpt_path", "no.ckpt") == (1, "--ckpt_path no.ckpt: no such file")
    (here / "folder").mkdir()
    line = "--ckpt_path folder: a folder, expected a checkpoint file"
    assert run.fails("test", "--ckpt_path", "folder") == (1, line)
    for content in (b"hello", b"", b"PK\x03\x04 not really", *of_other_kinds(trained)):
        (here / "bad.ckpt").write_bytes(content)
        status, line = run.fails("test", "--ckpt_path", "bad.ckpt")
        assert (status, line) == (1, "--ckpt_path bad.ckpt: not a checkpoint, or a damaged one")
    for content in ({"weight": torch.ones(2)}, {1: 2}, [3]):
        torch.save(content, here / "w.pt")
        status, line = run.fails("fit", "--ckpt_path", "w.pt")
        assert status == 1 and line.endswith("to begin with its weights use --model.weights w.pt")
    torch.save(torch.nn.Linear(1, 1), here / "w.pt")
    status, line = run.fails("fit", "--ckpt_path", "w.pt")
    assert status == 1 and "w.pt: holds Python objects, expected a checkpoint of tensors" in line
    other = torch.load(trained)
    other["hyper_parameters"] = [1, 2]
    torch.save(other, here / "w.pt")
    status, line = run.fails("fit", "--ckpt_path", "w.pt")
    assert status == 2 and "no data and no model class is given (w.pt records none)" in line


def of_other_kinds(trained):
    """Contents of a truncated checkpoint, a list of users, a picture."""
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    whole = trained.read_bytes()
    return [whole[: len(whole) // 2], b"root:x:0:0:root:/root:/bin/bash\n" * 9, picture.getvalue()]


def test_settings_in_which_weights_and_model_differ(run, trained, here):
    begun = torch.load(trained)
    torch.save(begun | {"value": 5.0}, here / "begun.ckpt")
    job = ("fit", "-c", "job.yaml", "--model.weights", "begun.ckpt", "--trainer.max_epochs=0")
    run(*job)
    assert "what you gave wins" not in run.err
    run(*job, "--model.transformer.rotary.base=50", "--model.transformer.dim=8", "--model.lr=1")
    assert [line for line in run.err.splitlines() if line.startswith("model.")] == [
        "model.transformer.dim: checkpoint 16, now 8 (what you gave wins)",
        "model.transformer.rotary.base: checkpoint 100.0, now 50.0 (what you gave wins)",
    ]


def test_a_checkpoint_of_another_version(run, trained, here):
    old = torch.load(trained)
    old["hyper_parameters"]["gone"] = 3
    torch.save(old, here / "old.ckpt")
    status, line = run.fails("test", "--ckpt_path", "old.ckpt")
    assert status == 2 and line.startswith("model.gone (recorded in old.ckpt): no such setting")
    built = run("test", "-c", "job.yaml", "--ckpt_path", "old.ckpt")
    assert built.model.hparams.lr == 0.25
    assert "model.gone (recorded in old.ckpt)" in run.err and "only what you gave" in run.err


def test_a_checkpoint_that_does_not_fit(run, trained, here):
    other = torch.load(trained)
    other["state_dict"] = {"linear.weight": torch.ones(2, 1)}
    torch.save(other, here / "other.ckpt")
    status, line = run.fails("test", "--ckpt_path", "other.ckpt")
    assert status == 1
    assert line.startswith("the checkpoint does not fit the model: size mismatch for linear.weight")


def test_saved_config_gives_the_same_run(run, here):
    first = run("fit", "-c", "job.yaml", "--model.transformer.rotary.base", "9")
    saved = (here / "runs" / "config.yaml").read_text()
    again = run("fit", "-c", "runs/config.yaml")
    assert again.model.transformer.rotary.base == 9
    assert (here / "runs" / "config.yaml").read_text() == saved
    torch.testing.assert_close(first.model.state_dict(), again.model.state_dict(), rtol=0, atol=0)
    run("test", "-c", "runs/config.yaml")
    assert (here / "runs" / "config.yaml").read_text() == saved


def test_print_config(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["fit", "--config", "job.yaml", "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["lr"] == 0.25
    assert printed["test_after_fit"] is True


def test_a_checkpoint_with_python_objects_is_loaded_on_request(run, trained, here):
    other = torch.load(trained)
    other["hyper_parameters"]["made"] = torch.nn.Linear(1, 1)
    torch.save(other, here / "other.ckpt")
    job = ("test", "-c", "job.yaml", "--ckpt_path", "other.ckpt")
    status, line = run.fails(*job)
    assert status == 1 and "give the whole job and --weights_only false" in line
    built = run(*job, "--weights_only", "false")
    torch.testing.assert_close(built.model.linear.weight.item(), 0.578125)
