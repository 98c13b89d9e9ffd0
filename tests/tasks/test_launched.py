"""Two processes as users start them: one dies, the run is stopped, and both times it goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks import cli

TURNS = """
import os, signal, time
from pathlib import Path
from lightning.pytorch import Callback

class Turn(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step, rank = trainer.global_step, trainer.global_rank
        if step == 5 and rank == 1 and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 10 and rank == 0 and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        if step == 11 and rank == 1 and not Path("raised").exists():
            Path("raised").touch()
            raise RuntimeError("went wrong in a process")
"""
JOB = ["fit", "--config", "image", "--config", "turns.yaml", "--trainer.accelerator=cpu"]
JOB += ["--data.image_size=16", "--data.patch_size=8", "--data.train_samples=128"]
JOB += ["--model.transformer.depth=1", "--trainer.max_epochs=4", "--trainer.precision=64-true"]
JOB += ["--trainer.limit_val_batches=1", "--trainer.enable_model_summary=false"]
JOB += ["--test_after_fit=false", "--trainer.enable_progress_bar=false"]
TWO = ["--config", "trainer/ddp", "--trainer.devices=2", "--data.batch_size=16"]
LAST = Path("runs/image/version_0/checkpoints/last.ckpt")


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_process_that_dies_ends_the_run_which_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turns.py").write_text(TURNS)
    (tmp_path / "turns.yaml").write_text("trainer: {callbacks+: [turns.Turn]}")
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    alone = [sys.executable, "-W", "ignore", "-m"]
    torchrun = [*alone, "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]

    def start(launcher: list[str], *more: str) -> tuple[int, str]:
        """Ends within a minute after what happens, or fails: starting takes half of one."""
        done = subprocess.run(
            [*launcher, "mmpos", *JOB, *TWO, *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        return done.returncode, done.stdout + done.stderr

    status, told = start(alone)
    assert status not in (0, 143) and Path("died").exists() and not Path("stopped").exists()
    assert "Connection closed by peer" in told or "reset by peer" in told or status < 0, told
    assert torch.load(LAST, weights_only=True)["global_step"] == 4
    status, told = start(alone, "--ckpt_path=last")
    assert status == 143 and told.count("stopped by SIGTERM; to go on: mmpos fit") == 1, told
    assert torch.load(LAST, weights_only=True)["global_step"] == 10
    status, told = start(torchrun, "--ckpt_path=last")
    assert status not in (0, 143) and "RuntimeError: went wrong in a process" in told
    status, told = start(torchrun, "--ckpt_path=last")
    assert status == 0, told
    two = torch.load(LAST, weights_only=True)
    Path("runs").rename("two")
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main([*JOB, "--data.batch_size=32"]) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    one = torch.load(LAST, weights_only=True)
    assert one["global_step"] == two["global_step"] == 16
    for name, value in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], value, rtol=1e-5, atol=1e-5)
