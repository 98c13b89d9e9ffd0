"""How fast training goes, and how long it will take."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from tasks.data.module import DataModule


class Progress(Callback):
    """Logs ``samples_per_second`` of all processes and ``minutes_left``, as often as the trainer
    logs.

    The speed is that of training since the last time, without validation; the time left, that of
    all steps to come at the mean pace since the start, validation included. Where the output is no
    terminal, which a progress bar needs, each validation ends with a line of them.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clocks."""
        self._begun = self._since = time.monotonic()
        self._first = self._step = trainer.global_step
        self._aside = 0.0
        self._told: dict[str, float] = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes when it begins."""
        self._paused = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs, if it is time."""
        steps = trainer.global_step - self._step
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not steps or trainer.global_step % max(1, log_every):
            return
        now = time.monotonic()
        data = getattr(trainer, "datamodule", None)
        self._told = {}
        if isinstance(data, DataModule):
            samples = steps * trainer.accumulate_grad_batches * data.batch_size * trainer.world_size
            taken = max(now - self._since - self._aside, 1e-9)
            self._told["samples_per_second"] = samples / taken
        left = trainer.estimated_stepping_batches - trainer.global_step
        if math.isfinite(left):
            pace = (now - self._begun) / (trainer.global_step - self._first)
            self._told["minutes_left"] = left * pace / 60
        for name, value in self._told.items():
            pl_module.log(name, value, prog_bar=True, batch_size=1, rank_zero_only=True)
        self._since, self._step, self._aside = now, trainer.global_step, 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves validation out of the speed; prints a line where nothing else does."""
        if trainer.sanity_checking or not hasattr(self, "_since"):
            return
        self._aside += time.monotonic() - self._paused
        if sys.stdout.isatty() or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        }
        figures = [f"{n.replace('_', ' ')} {v:,.4g}" for n, v in (metrics | self._told).items()]
        print(
            f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}: {', '.join(figures)}",
            file=sys.stderr,
        )
