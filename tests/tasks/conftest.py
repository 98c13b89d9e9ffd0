"""The command `mmpos` in a new current folder with a small job of a user's own classes."""

import shutil
import sys
from pathlib import Path

import pytest

from tasks import cli, command

HERE = Path(__file__).parent


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A new current folder with two configs; the stub classes can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(sys, "argv", ["mmpos"])
    shutil.copy(HERE / "stub_job.yaml", tmp_path / "job.yaml")
    (tmp_path / "turned.yaml").write_text(
        "model: {init_args: {transformer: {init_args: {rotary: null, bias: stub_jobs.Bias}}}}"
    )
    return tmp_path


class Runner:
    """Runs the command in this process: `built` is what it made, ``out`` and ``err`` its words."""

    built: command.Command

    def __init__(self, monkeypatch, capsys):
        self.capsys = capsys
        self.out = self.err = ""
        runner = self

        class Seen(command.Command):
            def instantiate_classes(self):
                super().instantiate_classes()
                runner.built = self

        monkeypatch.setattr(command, "Command", Seen)

    def __call__(self, *args) -> command.Command:
        assert cli.main(list(args)) == 0
        self.out, self.err = self.capsys.readouterr()
        return self.built

    def fails(self, *args) -> tuple[int, str]:
        """Status and message of a command that must end in one line."""
        status = cli.main(list(args))
        lines = self.capsys.readouterr().err.splitlines()
        told = [line for line in lines if "mmpos: error: " in line]
        assert len(told) == 1 and not any("Traceback" in line or "usage:" in line for line in lines)
        return status, told[0].removeprefix("mmpos: error: ")


@pytest.fixture
def run(here, monkeypatch, capsys):
    return Runner(monkeypatch, capsys)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A checkpoint of the job after its one epoch of 4 steps with base 100 and lr 0.25."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(HERE)
        patch.setattr(sys, "argv", ["mmpos"])
        shutil.copy(HERE / "stub_job.yaml", folder / "job.yaml")
        assert cli.main(["fit", "--config", "job.yaml", "--test_after_fit", "false"]) == 0
    (path,) = folder.glob("runs/checkpoints/*.ckpt")
    return path
