"""Runs among loggers, loader processes and signals of other times than training's."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tasks import cli

FAULTS = runpy.run_path(str(Path(__file__).with_name("test_faults.py")))
IMAGE, LAST, told = FAULTS["IMAGE"], FAULTS["LAST"], FAULTS["told"]
SLURM = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "NNODES": "1", "PROCID": "0", "LOCALID": "0"}
SLURM |= {"NODEID": "0", "JOB_NAME": "job", "JOB_ID": "1234", "NODELIST": "localhost"}
ONE = [*IMAGE, "--trainer.max_epochs=1"]


class When(Callback):
    """Does something at a hook, once."""

    hook, what = "", staticmethod(lambda: None)

    def __getattribute__(self, name: str) -> Any:
        if name == When.hook:
            When.hook = ""
            When.what()
        return super().__getattribute__(name)


@pytest.fixture
def at(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    module = type(os)("when")
    module.When = When
    monkeypatch.setattr(When, "__module__", "when")
    monkeypatch.setitem(__import__("sys").modules, "when", module)
    Path("when.yaml").write_text("trainer: {callbacks+: [when.When]}")

    def set_to(hook: str, what: Any) -> list[str]:
        monkeypatch.setattr(When, "hook", hook)
        monkeypatch.setattr(When, "what", staticmethod(what))
        return ["--config", "when.yaml"]

    return set_to


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name, value in SLURM.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def steps(path: Path = LAST) -> int:
    return torch.load(path, weights_only=True)["global_step"]


def test_loader_processes_leave_signals_to_the_trainer(at, capsys) -> None:
    """As all of a group of processes are sent them."""
    from multiprocessing import active_children

    def all_of_them() -> None:
        workers = [child.pid for child in active_children()]
        assert len(workers) >= 2
        for pid in (*workers, os.getpid()):
            os.kill(pid, signal.SIGTERM)

    job = [*IMAGE, "--data.num_workers=2", *at("on_before_zero_grad", all_of_them)]
    assert cli.main(job) == 143
    assert "stopped by SIGTERM" in told(capsys) and steps() == 1


HELD = """
import torch
from tasks.data.module import Loader, deaf

class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise ValueError("broken")

try:
    list(Loader(Broken(), num_workers=2, worker_init_fn=deaf))
except ValueError as error:
    kept = error
"""


def test_a_loader_that_somebody_holds_does_not_keep_a_process_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HELD], timeout=120, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("hook", "saved"), [("on_sanity_check_end", 1), ("on_validation_end", 1), ("on_test_start", 4)]
)
def test_a_signal_for_slurm_at_other_times(hook: str, saved: int, at, slurm, capsys) -> None:
    """It saves after the next step, or lets a test end; nothing lies in the current folder."""
    when = at(hook, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    job = [*ONE, "--trainer.num_sanity_val_steps=1", "--test_after_fit=true", *when]
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        assert cli.main(job) == (0 if hook == "on_test_start" else 143)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert steps() == saved and not list(Path().glob("hpc*"))
    assert Path("asked").exists() == (hook != "on_test_start")


def test_a_signal_in_the_last_validation(at, capsys) -> None:
    once: list[int] = []

    def second() -> None:
        once.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

    job = [*ONE, "--trainer.num_sanity_val_steps=0", *at("on_validation_end", second)]
    assert cli.main([*job, "--test_after_fit=true"]) == 143
    line = told(capsys)
    assert line.startswith("stopped by SIGTERM; to go on: mmpos test --ckpt_path ") and once
    assert steps() == 4


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_last_goes_by_the_logger_that_holds(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(ONE) == 0
    none = ["--trainer.logger=false"]
    assert cli.main([*ONE, *none, "--ckpt_path=last"]) == 1
    assert "go on with below checkpoints" in told(capsys)
    assert cli.main([*ONE, *none]) == 0
    on = ["--ckpt_path=last", "--trainer.max_epochs=2"]
    assert cli.main([*IMAGE, *none, *on]) == 0
    assert "--ckpt_path last: checkpoints/last.ckpt" in capsys.readouterr().err
    Path("two.yaml").write_text(
        "trainer: {logger: [{class_path: lightning.pytorch.loggers.CSVLogger, init_args: "
        "{save_dir: first, name: a}}, {class_path: lightning.pytorch.loggers.CSVLogger, "
        "init_args: {save_dir: second, name: b, version: 0}}]}"
    )
    two = ["--config", "two.yaml"]
    assert cli.main([*ONE, *two]) == 0
    rows = Path("second/b/version_0/metrics.csv").read_text()
    assert cli.main([*IMAGE, *two, *on]) == 0
    assert "--ckpt_path last: first/a/version_0/" in capsys.readouterr().err
    assert Path("second/b/version_0/metrics.1.csv").read_text() == rows


def test_what_the_command_was_told_goes_on_too(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*ONE, "--test_after_fit=false"]) == 0
    assert cli.main(["fit", "--ckpt_path=last", "--trainer.max_epochs=2"]) == 0
    assert "test/" not in capsys.readouterr().out
    metrics = LAST.parents[1] / "metrics.csv"
    rows = metrics.read_text()
    assert cli.main(["fit", "--ckpt_path=last"]) == 1
    assert "nothing was trained" in told(capsys) and metrics.read_text() == rows
    (LAST.parents[1] / "environment.json").write_text('[{"command": "mm')
    (LAST.parent / "x.ckpt").symlink_to("nowhere")
    assert cli.main(["fit", "--ckpt_path=last", "--trainer.max_epochs=3"]) == 0
    assert len(json.loads((LAST.parents[1] / "environment.json").read_text())) == 1
    assert (LAST.parents[1] / "environment.damaged").is_file()
    assert cli.main(["export", "--ckpt_path=last", "--output=out.safetensors"]) == 0


def test_callbacks_and_files_that_are_no_use(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    third = "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"
    assert cli.main([*ONE, third]) == 1
    assert "two ModelCheckpoints need another monitor" in told(capsys)
    weights = [third, "--trainer.callbacks.save_weights_only=true"]
    assert cli.main([*ONE, *weights, "--trainer.callbacks.every_n_train_steps=3"]) == 0
    (light,) = LAST.parent.glob("*step=3.ckpt")
    assert cli.main(["fit", "--ckpt_path", str(light), "--trainer.max_epochs=2"]) == 1
    assert "holds weights alone (save_weights_only)" in told(capsys)
    os.utime(light, (2e9, 2e9))
    assert cli.main(["fit", "--ckpt_path=last", "--trainer.max_epochs=2"]) == 0
    assert f"passed over {light}: holds weights alone" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_for_metrics(at, capsys) -> None:
    metrics = LAST.parents[1] / "metrics.csv"

    def fill() -> None:
        metrics.unlink()
        metrics.symlink_to("/dev/full")

    often = ["--trainer.logger.flush_logs_every_n_steps=1", "--trainer.log_every_n_steps=1"]
    job = [*IMAGE, *often, *at("on_train_epoch_end", fill)]
    assert cli.main(job) == 1
    line = told(capsys)
    assert line.startswith("No space left on device") and "to go on: mmpos fit" in line
