from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torchmetrics import Metric

from mmpos import __version__
from tasks.optim import WarmupCosine, adamw, parameter_groups, resize_moments
from tasks.weights import load_weights


class Task(L.LightningModule):
    """What all tasks share: AdamW with warm-up and cosine by step, starting weights, averaging.

    A subclass sets ``self.network``, the plain module that it trains.

    Args:
        lr: the highest learning rate, after the warm-up.
        weight_decay: of weight matrices; positions, norms and biases are not decayed.
        warmup: the fraction of all steps over which the rate rises.
        weights: file to start from (a checkpoint of a task, a state dict, safetensors); unlike
            resuming from a checkpoint, optimizer and step count start anew.
        leave_out: parts of the network that do not take the starting weights, by the beginning of
            their names, such as ``heads`` for other classes.
        ema: decay of an exponential moving average of the weights, which is what is validated
            and saved; none by default.
    """

    network: nn.Module

    def __init__(
        self,
        *,
        lr: float,
        weight_decay: float,
        warmup: float,
        weights: str | PathLike | None,
        leave_out: Sequence[str],
        ema: float | None,
    ) -> None:
        super().__init__()
        if ema is not None and not 0 < ema < 1:
            raise ValueError(f"ema is a decay between 0 and 1, such as 0.999, got {ema}")
        if not (0 <= lr < math.inf and 0 <= weight_decay < math.inf):
            raise ValueError(
                f"lr and weight_decay must be 0 or more and finite, got {lr} and {weight_decay}"
            )
        self.lr, self.weight_decay, self.warmup, self.ema = lr, weight_decay, warmup, ema
        self.batch_changes: list[Callable[[Any], Any]] = []
        self._start = weights
        self.leave_out = leave_out

    def setup(self, stage: str) -> None:
        """Load the starting weights, once, unless a checkpoint is about to replace them."""
        if self._start is not None and self.trainer.ckpt_path is None:
            rank_zero_info(load_weights(self.network, self._start, self.leave_out))
        self._start = None

    def on_fit_start(self) -> None:
        """Metrics start anew: those that an earlier validation reset are inference tensors."""
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()
        self._seed = torch.initial_seed()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed the noise of this step (dropped paths, disturbed coordinates).

        It follows from the run's seed, the step and the process, so that processes differ and a
        run resumed at the end of an epoch goes on as if it had not stopped.
        """
        torch.manual_seed(hash((self._seed, self.trainer.global_step, self.global_rank)))

    def changed(self, batch: Any) -> Any:
        """A training batch as callbacks want it; for a subclass to call in its training step."""
        for change in self.batch_changes:
            batch = change(batch)
        return batch

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                "the learning rate falls over a known number of steps: "
                "pass --trainer.max_epochs or --trainer.max_steps"
            )
        optimizer = adamw(self, self.lr, self.weight_decay)
        scheduler = WarmupCosine(optimizer, int(steps), self.warmup)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)

    def configure_callbacks(self) -> list[Callback]:
        if self.ema is None or self.trainer.state.fn != TrainerFn.FITTING:
            return []
        return [EMAWeightAveraging(use_buffers=False, decay=self.ema)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Let a resumed run decay weights as it is told to now, not as it was then, and take the
        optimizer's moments to the grid of this model, as its tables will be.
        """
        for state in checkpoint.get("optimizer_states", []):
            now = parameter_groups(self, self.weight_decay)
            for group, told in zip(state["param_groups"], now, strict=False):
                group["weight_decay"] = told["weight_decay"]
            resize_moments(self, state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the version of mmpos that wrote the checkpoint."""
        checkpoint["mmpos_version"] = __version__
