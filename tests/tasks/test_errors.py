"""Each mistake is one line with the way out; what is no user's mistake keeps its traceback."""

import shutil
from pathlib import Path

import pytest
import torch

from tasks import cli, configs

HERE = Path(__file__).parent
JOB = (HERE / "stub_job.yaml").read_text()


@pytest.mark.parametrize(
    "args, line",
    [
        (["--model.lrr", "1"], "model.lrr: no such setting; did you mean lr?"),
        (
            ["--model.transformer.dmi=1"],
            "model.transformer.dmi: no such setting; did you mean dim?",
        ),
        (
            ["--trainer.max_epoch", "1"],
            "--trainer.max_epoch: no such option; did you mean --traine",
        ),
        (["--model.lr"], "--model.lr needs a value"),
        (["hello"], "unexpected argument 'hello'"),
        (
            ["--model.transformer.rotary.layout", "hal"],
            "rotary.layout: expected one of whole, half, got 'hal'; did you mean half?",
        ),
        (["--model.lr", "x"], "model.lr: expected float, got 'x'"),
        (["--model.transformer.dim", "x"], "model.transformer.dim: expected int, got 'x'"),
        (["--trainer.max_epochs=x"], "trainer.max_epochs: expected int or null, got 'x'"),
        (
            ["--model.transformer.rotary", "mmpos.RotaryEncodin"],
            "model.transformer.rotary: no such class: mmpos.RotaryEncodin; "
            "did you mean mmpos.RotaryEncoding?",
        ),
        (
            ["--model.transformer.rotary", "RotaryEncodin"],
            "model.transformer.rotary: no such class: RotaryEncodin; "
            "did you mean mmpos.RotaryEncoding?",
        ),
        (
            ["--model.transformer.rotary", "mmps.RotaryEncoding"],
            "model.transformer.rotary: no such module: mmps; did you mean mmpos.RotaryEncoding?",
        ),
        (["--model.transformer.rotary=stub_jobs.Bias"], "rotary: stub_jobs.Bias is not a Rotary"),
        (
            ["--model.transformer", "mmpos.models.Transformr"],
            "no such class: mmpos.models.Transformr; did you mean mmpos.models.Transformer?",
        ),
        (["--model.classes", "[a]"], "model.classes comes from the data, by its source: leave"),
        (["--model.lr", "null"], "model.lr: expected float, got null"),
        (["--model.transformer.dim", "null"], "model.transformer.dim: expected int, got null"),
        (["--model.transformer=null"], "model.transformer: expected Callable[[Sequence[int]], "),
        (["--data.patch_size=null"], "data.patch_size: expected int, got null"),
        (["--config={data: {init_args: {patch_size: }}}"], "patch_size (--config:1): expected int"),
        (["--config={trainer: {max_steps: null}}"], "trainer.max_steps (--config:1): expected int"),
        (["--config={test_after_fit: null}"], "test_after_fit (--config:1): expected bool, got nu"),
        (
            ["--config={trainer: {logger: {init_args: {flush_logs_every_n_steps: }}}}"],
            "flush_logs_every_n_steps (--config:1): expected int, got null",
        ),
        (["--trainer.max_steps", "null"], "trainer.max_steps: expected int, got 'null'"),
        (["--trainer", "null"], "trainer: expected settings, got null"),
        (["--config={trainer: 3}"], "trainer (--config:1): expected settings, got 3"),
        (["--config={trainer: null}"], "trainer (--config:1): expected settings, got null"),
        (["--config={trainer: [a]}"], "trainer (--config:1): expected settings, got [a]"),
        (["--config={model: 3}"], "model (--config:1): expected settings, got 3"),
        (["--config={model: {init_args: }}"], "model.init_args (--config:1): expected settings, g"),
        (["--model", "stub_jobs.Data"], "not correspond to a subclass of LightningModule"),
    ],
)
def test_mistakes_on_the_command_line(run, args, line):
    status, told = run.fails("fit", "-c", "job.yaml", *args)
    assert status == 2 and line in told and len(told) < 200


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("lr:", "lrr:", "model.lrr (job.yaml:5): no such setting; did you mean lr?"),
        ("dim:", "dmi:", "model.transformer.dmi (job.yaml:9): no such setting; did you mean dim?"),
        ("base:", "bas:", "model.transformer.rotary.bas (job.yaml:12): no such setting; did you m"),
        ("max_epochs", "max_epoch", "(job.yaml:17): no such setting; did you mean trainer.max_epo"),
        ("    lr", "  lr", "job.yaml:6: not YAML"),
        (
            "  init_args:\n    lr",
            "  init_arg:\n    lr",
            "model.init_arg (job.yaml:4): beside class",
        ),
        ("trainer:", "extra: {}\ntrainer:", "extra (job.yaml:16): no such setting"),
        (
            "stub_jobs.Model",
            "stub_jobs.Modell",
            "model (job.yaml:3): no such class: stub_jobs.Mode",
        ),
        (
            "stub_jobs.Rotary",
            "stub_job.Rotary",
            "no such module: stub_job; did you mean stub_jobs.",
        ),
        ("base: 100", "base: x", "model.transformer.rotary.base (job.yaml:12): expected float, go"),
        ("lr: 0.25", "lr: [1, 2]", "model.lr (job.yaml:5): expected float, got '[1, 2]'"),
        (JOB, "hello", "job.yaml: expected settings such as `trainer: …`, found none"),
        (JOB, "", "job.yaml: expected settings such as `trainer: …`, found none"),
        (
            "  class_path: stub_jobs.Model\n",
            "",
            "model has settings but no class: give a whole job",
        ),
        ("data:\n  class_path: stub_jobs.Data\n", "", "no data class is given: name a whole job"),
    ],
)
def test_mistakes_in_a_config(run, here, old, new, line):
    assert old in JOB
    shutil.copy(HERE / "stub_jobs.py", here)  # modules of the current folder are suggested
    (here / "job.yaml").write_text(JOB.replace(old, new))
    status, told = run.fails("fit", "-c", "job.yaml")
    assert status == 2 and line in told and len(told) < 200


def test_a_name_of_another_library_is_not_suggested(run):
    line = "model: no such module: nope"
    assert run.fails("fit", "-c", "job.yaml", "--model=nope.X") == (2, line)


@pytest.mark.parametrize("later", ["--model.lr=1", "--config={model: {init_args: {lr: 1}}}"])
def test_the_layer_with_the_bad_value_is_blamed(run, here, later):
    (here / "job.yaml").write_text(JOB.replace("lr: 0.25", "lr: x"))
    told = "model.lr (job.yaml:5): expected float, got 'x'"
    assert run.fails("fit", "-c", "job.yaml", later) == (2, told)
    assert run.fails("fit", "-c", "job.yaml", "--model.lr=y", later) == (2, told)


@pytest.mark.parametrize(
    "content, reason",
    [
        ("import os\ndef x(:\n", "SyntaxError: invalid syntax (own_faulty.py:2)"),
        ("\nraise KeyError('boom')", "KeyError: 'boom' (own_faulty.py:2)"),
        (
            "import own_absent",
            "ModuleNotFoundError: No module named 'own_absent' (own_faulty.py:1)",
        ),
        ("import os\nos.absent", "module 'os' has no attribute 'absent' (own_faulty.py:2)"),
    ],
)
@pytest.mark.parametrize("slot", ["model", "model.transformer", "trainer.callbacks+", "data"])
def test_a_module_that_cannot_be_imported(run, here, content, reason, slot):
    (here / "own_faulty.py").write_text(content)
    status, told = run.fails("fit", "-c", "job.yaml", f"--{slot}=own_faulty.Own")
    assert status == 2 and told.startswith(f"{slot.rstrip('+')}: importing own_faulty.Own failed: ")
    assert told.endswith(reason)


def test_an_overlay_before_its_job(run):
    status, told = run.fails("fit", "-c", "turned.yaml", "-c", "job.yaml")
    assert status == 2 and "model has settings but no class: give a whole job first" in told


@pytest.mark.parametrize(
    "args, line",
    [
        (["--model.transformer.dim", "9"], "dim is 9; expected an even number"),
        (["--data.predict_folder", "missing"], "no folder at missing"),
        (["--trainer.devices", "0"], "`Trainer(devices='0')` value is not a valid input"),
        (["--model.weights", "missing.pt"], "No such file or directory: 'missing.pt'"),
    ],
)
def test_mistakes_found_while_building(run, args, line):
    status, told = run.fails("fit", "-c", "job.yaml", *args)
    assert status == 1 and line in told and len(told) < 200


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there(run):
    status, told = run.fails("fit", "-c", "job.yaml", "--trainer.accelerator", "gpu")
    assert status == 1 and told.endswith("without a GPU use --trainer.accelerator cpu")


IMAGES = ("--model", "tasks.ImageClassification", "--model.transformer=mmpos.models.Transformer")
IMAGES += ("--model.transformer.dim=8", "--model.transformer.depth=1", "--trainer.logger=false")
IMAGES += ("--model.transformer.heads=2",)
IMAGES += ("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu")


@pytest.mark.parametrize("sanity", ["0", "2"])
def test_what_the_first_batch_shows_is_one_line(run, sanity):
    job = (*IMAGES, "--data=stub_jobs.Beyond", f"--trainer.num_sanity_val_steps={sanity}")
    job += ("--trainer.max_epochs=1",)
    status, told = run.fails("fit", *job)
    assert status == 1 and "label 5" in told and "2 answers" in told
    status, told = run.fails("fit", *job, "--data.question=colour")
    assert status == 1 and "['class']" in told and "['colour']" in told


def test_what_no_option_of_the_data_sets(run):
    line = "model.channels comes from the data, by its source: leave it out"
    job = ("fit", *IMAGES, "--data=stub_jobs.Beyond", "--model.channels=3")
    assert run.fails(*job) == (2, line)


def test_errors_after_the_first_batch_keep_their_traceback(run):
    with pytest.raises(ValueError, match="raised in training_step"):
        cli.main(["fit", "-c", "job.yaml", "--model.fails", "training_step"])


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("workers", ["0", "1"])
def test_data_that_cannot_be_read_is_one_line_at_any_time(run, workers):
    job = ("-c", "job.yaml", "--data.fails", "reading", "--data.num_workers", workers)
    assert run.fails("fit", *job) == (1, "5.png cannot be read")
    assert run.fails("fit", *job, "--data.fails=type") == (1, "0.png has another type")


def test_traceback_on_request(run, monkeypatch, capsys):
    monkeypatch.setenv("MMPOS_TRACEBACK", "1")
    assert cli.main(["fit", "-c", "job.yaml", "--model.transformer.dim", "9"]) == 1
    err = capsys.readouterr().err
    assert "stub_jobs.py" in err and err.endswith("error: dim is 9; expected an even number\n")


def test_interrupted_while_it_starts(monkeypatch, capsys):
    monkeypatch.setattr(configs, "table", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["configs"]) == 130
    assert capsys.readouterr() == ("", "")
