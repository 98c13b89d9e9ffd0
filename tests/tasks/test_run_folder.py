"""What a run's folder holds, what a run tells, and the switches of the command."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mmpos import __version__
from tasks import cli

SMALL = ["--data.image_size=16", "--data.patch_size=8", "--data.train_samples=200"]
SMALL += ["--data.batch_size=50", "--model.transformer.depth=1", "--trainer.max_epochs=2"]
SMALL += ["--trainer.enable_model_summary=false", "--trainer.log_every_n_steps=2"]
SMALL += ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
SMALL += ["--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"]
IMAGE = ["fit", "--config", "image", *SMALL]
RUN = Path("runs/image/version_0")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mmpos", *IMAGE])
    return tmp_path


def columns(path: Path) -> dict[str, list[float]]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_config_environment_seed_commit_and_metrics(here, capsys) -> None:
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    (here / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, cwd=here)
    assert cli.main([*IMAGE, "--seed_everything=5"]) == 0
    err = capsys.readouterr().err
    assert "positions: network.transformer.rotary RotaryEncoding, no parameters\n" in err
    assert "epoch 2, step 8: val/loss " in err and "samples per second" in err
    assert "minutes left 0\n" in err
    config = yaml.safe_load((RUN / "config.yaml").read_text())
    assert config["data"]["init_args"]["batch_size"] == 50 and config["seed_everything"] == 5
    (start,) = json.loads((RUN / "environment.json").read_text())
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert start["git"] == {"commit": head.strip(), "changed": False}
    assert (start["seed"], start["step"], start["processes"]) == (5, 0, 1)
    assert (
        start["mmpos"] == __version__
        and start["packages"]["torch"] == torch.__version__.split("+")[0]
    )
    assert start["command"].startswith("mmpos fit --config image ")
    found = columns(RUN / "metrics.csv")
    assert len(found["train/loss"]) == 4 and len(found["val/loss"]) == 2
    assert len(found["test/loss"]) == 1 and min(found["samples_per_second"]) > 0
    assert found["minutes_left"][0] > found["minutes_left"][-1] == 0
    (here / "file").write_text("two")
    assert cli.main([*IMAGE, "--ckpt_path=last", "--trainer.max_epochs=3"]) == 0
    first, second = json.loads((RUN / "environment.json").read_text())
    assert first == start and second["step"] == 8 and second["git"]["changed"]
    assert second["seed"] == 0  # as the config says


def test_the_encodings_are_named_with_their_parameters(here, capsys) -> None:
    for name in ("learned", "t5", "none"):
        assert cli.main([*IMAGE, "--config", f"encoding/{name}", "--trainer.fast_dev_run=1"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "positions: " in line]
    assert lines[0].startswith("positions: network.transformer.additive LearnedEncoding, ")
    assert lines[0].endswith("table 2 × 2 × 64: 256 parameters"), lines[0]
    assert "T5Bias, " in lines[1] and "parameters" in lines[1]
    assert lines[2:] == ["positions: no encoding of mmpos"]


def test_tensorboard_beside_the_metrics(here, monkeypatch, capsys) -> None:
    pytest.importorskip("tensorboard")
    assert cli.main([*IMAGE, "--tensorboard=true"]) == 0
    assert list(RUN.glob("events.out.tfevents.*")) and (RUN / "metrics.csv").is_file()
    assert [path.name for path in RUN.parent.iterdir()] == ["version_0"]
    assert f"  {RUN}/checkpoints/best.ckpt\n" in capsys.readouterr().out

    def missing(*args):
        raise ModuleNotFoundError("tensorboard")

    monkeypatch.setattr("tasks.lightning_cli.TensorBoardLogger", missing)
    assert cli.main([*IMAGE, "--tensorboard=true"]) == 1
    assert "pip install 'mmpos[tensorboard]'" in capsys.readouterr().err


COMPILED = """
import sys
import torch
from tasks import cli

own, compiled = torch.nn.Module.compile, []


def compile(module, **options):
    compiled.append(type(module).__name__)
    own(module, backend="eager")


torch.nn.Module.compile = compile
assert cli.main(sys.argv[1:]) == 0 and compiled == ["Classifier"], compiled
"""


def test_the_compile_switch(here) -> None:
    """The network is compiled in place, so that checkpoints have its own names."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", COMPILED, *IMAGE, "--compile=true"]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one = torch.load(RUN / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert cli.main(IMAGE) == 0
    other = torch.load("runs/image/version_1/checkpoints/last.ckpt", weights_only=True)
    assert one.keys() == other["state_dict"].keys()
    for name, value in other["state_dict"].items():
        torch.testing.assert_close(one[name], value, atol=1e-4, rtol=0)


def test_early_stopping(here) -> None:
    stop = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"]
    stop += ["--trainer.callbacks.patience=1", "--model.lr=0", "--trainer.max_epochs=9"]
    assert cli.main([*IMAGE, *stop]) == 0
    assert len(columns(RUN / "metrics.csv")["val/loss"]) == 2
