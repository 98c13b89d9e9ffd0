"""What a run leaves and says, however it ends."""

import signal

import pytest
import torch
import yaml

from tasks import configs


def epoch(path):
    return torch.load(path, weights_only=True)["epoch"]


@pytest.mark.parametrize("name", ["image", "finetune_resolution"])
def test_last_is_the_newest_epoch_and_best_the_best(run, here, name):
    shipped = yaml.safe_load(configs.shipped()[name].read_text())
    callbacks = {"trainer": {"callbacks": shipped["trainer"]["callbacks"], "max_epochs": 3}}
    (here / "callbacks.yaml").write_text(yaml.safe_dump(callbacks))
    run("fit", "-c", "job.yaml", "-c", "callbacks.yaml")  # its loss grows with each epoch
    saved = here / "runs" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert (epoch(saved / "best.ckpt"), epoch(saved / "last.ckpt")) == (0, 2)
    assert "next" in run.out and "--ckpt_path runs/checkpoints/best.ckpt" in run.out
    on = ("--ckpt_path", "runs/checkpoints/last.ckpt", "--trainer.max_epochs", "4")
    assert run("fit", *on).trainer.global_step == 16
    assert "--ckpt_path runs/checkpoints/best.ckpt" in run.out
    assert epoch(saved / "last.ckpt") == 3
    callbacks["trainer"]["callbacks"].reverse()
    (here / "callbacks.yaml").write_text(yaml.safe_dump(callbacks))
    run("fit", "-c", "job.yaml", "-c", "callbacks.yaml", "--trainer.logger.version=other")
    assert "--ckpt_path runs/other/checkpoints/best.ckpt" in run.out


@pytest.mark.parametrize(
    "how, status, saved", [("SIGTERM", 143, "last.ckpt"), ("Ctrl-C", 130, "epoch=0-step=4.ckpt")]
)
def test_a_run_that_is_stopped_tells_how_to_go_on(run, how, status, saved):
    ctrl_c = signal.getsignal(signal.SIGINT)
    job = ("fit", "-c", "job.yaml", f"--model.fails={how}", "--trainer.max_epochs=3")
    try:
        told = run.fails(*job)
        line = f"stopped by {how}; to go on: mmpos fit --ckpt_path runs/checkpoints/{saved}"
        assert told == (status, line)
        told = run.fails(*job, "--trainer.enable_checkpointing=false")
        assert told == (status, f"stopped by {how}")
    finally:
        signal.signal(signal.SIGINT, ctrl_c)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_untrained_model_is_told(run, trained, here, command):
    line = "the model is untrained: give --ckpt_path FILE, or --model.weights FILE"
    run(command, "-c", "job.yaml")
    assert run.err.splitlines().count(line) == 1
    run(command, "-c", "job.yaml", "--ckpt_path", str(trained))
    assert line not in run.err
    torch.save({"value": 5.0}, here / "w.pt")
    run(command, "-c", "job.yaml", "--model.weights", "w.pt")
    assert line not in run.err


def test_predictions_that_cannot_be_written_fail_before_the_model_is_loaded(run, here, trained):
    (here / "photos").mkdir()
    (here / "file").touch()
    job = ("predict", "-c", "job.yaml", "--ckpt_path", str(trained), "--predictions")
    assert run.fails(*job, "photos") == (1, "predictions go to a file, photos is a folder")
    line = "predictions cannot be written to file/new.csv"
    assert run.fails(*job, "file/new.csv") == (1, line)
    failing = run.fails(
        *job, "new/deep/file.csv", "--data.fails=reading", "--trainer.max_epochs=null"
    )
    assert failing == (1, "5.png cannot be read") and not (here / "new").exists()
