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
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Preemption(Callback):
    """Saves ``last.ckpt`` after the optimizer step under way, and ends the run, once a process is
    sent SIGTERM, or SIGINT (Ctrl-C), or, in a job of SLURM, its signal before the time is up.

    All processes end after the same step. They ask one another after each step on the CPU, and as
    often as the trainer logs elsewhere, since asking waits for the device. A second SIGINT ends the
    run at once. The file lies where the trainer's checkpoints do; without any, nothing is saved.

    A job of SLURM is put back into its queue (``scontrol requeue``) unless it was ended by SIGINT,
    or Lightning's ``SLURMEnvironment(auto_requeue=False)`` is among the trainer's plugins.

    Raises: SIGTERMException, or KeyboardInterrupt for SIGINT, when all is saved.
    """

    def __init__(self) -> None:
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens in place of Lightning's handlers, of which that for SLURM saves within a step."""
        self.received, self.saved = None, ""
        self._launcher = trainer.strategy.launcher
        queue = _queue(trainer)
        asked = queue.requeue_signal if queue is not None else None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, *([asked] if asked else [])):
                self._before[number] = signal.signal(number, self._note)

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
        if not by_hand and _queue(trainer) is not None:
            if trainer.is_global_zero:
                _requeue()
            trainer.strategy.barrier()  # else srun might end this process for another's status
        raise KeyboardInterrupt if by_hand else SIGTERMException

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listens no more."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Listens no more, however training ended."""
        self.on_train_end(trainer, pl_module)


def _queue(trainer: Trainer) -> SLURMEnvironment | None:
    """The job of SLURM that this is, if it is to be put back into the queue."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment
    return None


def _folder(trainer: Trainer) -> Path | None:
    """Where the trainer saves checkpoints."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    folders = [callback.dirpath for callback in callbacks if callback.dirpath]
    return Path(folders[-1]) if folders else None


def _requeue() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"[0-9_]+", job):
        raise ValueError(f"SLURM_JOB_ID is {job!r}, expected a number")
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        rank_zero_warn(f"job {job} is not put back into the queue: {told.strip()}")
    else:
        rank_zero_info(f"job {job} is put back into the queue")
