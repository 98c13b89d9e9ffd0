"""A run that is killed 20 times at random, and goes on each time from its newest whole checkpoint.

``python killed.py FOLDER`` prints the numbers of kills and of kills within a save, and fails where
the weights at the end are not those of a run that was left alone.
"""

import os
import random
import runpy
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tasks import checkpoint_io, runs
from tasks.checkpoint_io import CheckpointIO
from tasks.configs import CommandError, Given

JOB = runpy.run_path(str(Path(__file__).with_name("small_jobs.py")))["job"]
KILLS, STEPS, TAKES = 20, 40, 0.5  # seconds that these steps take, or more


class Noted(Callback):
    """Tells that training is under way, and its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer, pl_module) -> None:
        (self.folder / "started").touch()

    def on_train_end(self, trainer, pl_module) -> None:
        torch.save(pl_module.network.state_dict(), self.folder / "end.pt")


def fit(folder: Path, start: str | None) -> None:
    L.seed_everything(0, verbose=False)
    task, data = JOB("image", 32, folder.parent / "texts", drop_path=0.3, ema=0.9)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[
            Noted(folder),
            ModelCheckpoint(folder, filename="last", every_n_train_steps=1),
            ModelCheckpoint(folder, filename="other", every_n_train_steps=3),
        ],
        plugins=[CheckpointIO()],
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data, ckpt_path=start)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_within_a_save(saves: int, share: float) -> None:
    """Half a file is written, or all of it and the name of before is there still."""
    save, left = torch.save, [saves]

    def saving(content, file) -> None:
        left[0] -= 1
        save(content, file)
        if left[0] <= 0:
            file.truncate(int(file.tell() * share))
            kill()

    checkpoint_io.torch.save = saving


def child(folder: Path, start: str | None, way: random.Random | None) -> int:
    """The signal that ended a process that goes on with the run, 0 if it came to its end."""
    pid = os.fork()
    if pid == 0:
        warnings.simplefilter("ignore")
        if way is not None and way.random() < 0.4:
            kill_within_a_save(way.randint(1, 6), way.choice([0.3, 0.9, 1.0]))
        elif way is not None:
            delay = way.uniform(0, TAKES)

            def later() -> None:
                while not (folder / "started").exists():
                    time.sleep(0.001)
                time.sleep(delay)
                kill()

            threading.Thread(target=later, daemon=True).start()
        fit(folder, start)
        os._exit(0)
    (folder / "started").unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(root: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(root.parent)  # where no other runs lie
    alone, run = root / "alone", root / "run"
    for folder in (alone, run):
        folder.mkdir(parents=True)
    assert child(alone, None, None) == 0
    way, kills, halves, told = random.Random(0), 0, 0, []
    while True:
        try:
            start = runs.last([Given("trainer.callbacks.dirpath", str(run), "")], told.append)
        except CommandError:
            start = None
        ended = child(run, start, way if kills < KILLS else None)
        if ended == 0 and kills == KILLS:
            break
        if ended == 0:  # before it was to be killed: from the beginning
            for path in run.glob("*.ckpt"):
                path.unlink()
            continue
        assert ended == -signal.SIGKILL, ended
        kills += 1
        halves += any(run.glob("*.part"))
        for path in run.glob("*.part"):
            assert path.name in ("last.ckpt.part", "other.ckpt.part")
    assert not any("passed over" in line for line in told), told
    one, other = (torch.load(folder / "end.pt") for folder in (alone, run))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    steps = {torch.load(path)["global_step"] for path in run.glob("*.ckpt")}
    print(kills, halves, max(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
