"""A signal ends training at a step that a resumed run goes on from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tasks import summary


class Preemption(Callback):
    """Saves ``last.ckpt`` after the optimizer step under way, and ends the run, once a process is
    sent SIGTERM, or SIGINT (Ctrl-C), or, in a job of SLURM, its signal before the time is up.

    All processes end after the same step. They ask one another after each step on the CPU, and as
    often as the trainer logs elsewhere, since asking waits for the device. A second SIGINT ends the
    run at once. The file lies where the trainer's checkpoints do; without any, nothing is saved.

    A job of SLURM is put back into its queue (``scontrol requeue``) unless it was ended by SIGINT:
    if ``requeue``, or as Lightning's `SLURMEnvironment` says, whose own handlers save within a step
    and into the current folder wherever this does not listen: give it ``auto_requeue=False``.

    Raises: SIGTERMException, or KeyboardInterrupt for SIGINT, when all is saved.
    """

    def __init__(self, requeue: bool = False) -> None:
        self.requeue = requeue
        self.received: signal.Signals | None = None
        self.saved = ""
        self._before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Takes its turn after all that a step changes, such as averages of weights."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        others = [callback for callback in callbacks if callback is not self]
        saving = [isinstance(callback, Checkpoint) for callback in others]
        place = saving.index(True) if any(saving) else len(others)
        trainer.callbacks = [*others[:place], self, *others[place:]]  # type: ignore[attr-defined]

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens in place of Lightning's handlers, of which that for SLURM saves within a step."""
        if self._before:
            return
        self.received, self.saved = None, ""
        self._launcher = trainer.strategy.launcher
        slurm = _slurm(trainer)
        asked = slurm.requeue_signal if slurm is not None else None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, *([asked] if asked else [])):
                self._before[number] = signal.signal(number, self._note)

    on_train_start = on_sanity_check_start  # where there is no check

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None and number != signal.SIGINT:  # a terminal tells all processes
            for child in getattr(self._launcher, "procs", ()):
                child.send_signal(number)
        self.received = signal.Signals(number)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves and stops, if any process was told to and this batch ended a step."""
        if trainer.fit_loop._should_accumulate():
            return
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        every = 1 if pl_module.device.type == "cpu" else max(1, log_every)
        if trainer.global_step % every:
            return
        anyone = partial(trainer.strategy.reduce_boolean_decision, all=False)
        if not anyone(self.received is not None):
            return
        by_hand = anyone(self.received is signal.SIGINT)
        folder = _folder(trainer)
        if folder is not None:
            path = str(folder / "last.ckpt")
            trainer.save_checkpoint(path, weights_only=False)
            self.saved = path
        slurm = _slurm(trainer)
        if not by_hand and slurm is not None and (self.requeue or slurm.auto_requeue):
            if trainer.is_global_zero:
                _requeue()
            trainer.strategy.barrier()  # else srun might end this process for another's status
        raise KeyboardInterrupt if by_hand else SIGTERMException

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops before a test, if it was told to in the last validation; listens no more."""
        anyone = partial(trainer.strategy.reduce_boolean_decision, all=False)
        self._leave()
        if anyone(self.received is not None):
            raise KeyboardInterrupt if anyone(self.received is signal.SIGINT) else SIGTERMException

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Listens no more, however training ended."""
        self._leave()

    def _leave(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _slurm(trainer: Trainer) -> SLURMEnvironment | None:
    """The job of SLURM that this is."""
    environment = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) else None


def _folder(trainer: Trainer) -> Path | None:
    """Where the trainer saves checkpoints."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    folders = [callback.dirpath for callback in callbacks if callback.dirpath]
    return Path(folders[-1]) if folders else None


def _requeue() -> None:
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        if not re.fullmatch(r"[0-9_]+", job):
            raise OSError(f"SLURM_JOB_ID is {job!r}, expected a number")
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        summary.tell([f"the job is not put back into the queue: {told.strip()}"])
    else:
        summary.tell([f"job {job} is put back into the queue"])
