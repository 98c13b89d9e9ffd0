"""An exponential moving average of the weights."""

import warnings
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


class Averages(WeightAveraging):
    """Swaps weights and their averages in training alone.

    It stays with the trainer after a fit, which is then to measure what it is told to: Lightning's
    would load a checkpoint's averages and lay the weights of its last step over them, or swap them
    with the averages that the fit ended with.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """As Lightning's, without its warning of tasks that can be sharded: `shard` refuses it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're using the WeightAveraging callback")
            super().setup(trainer, pl_module, stage)

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, multi_avg_fn=partial(_averaged, decay))

    @property
    def state_key(self) -> str:
        """That of Lightning's, whose checkpoints are read."""
        return WeightAveraging.__qualname__

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the averages, and the weights that go on being trained."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate the averages."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go on with the weights."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)


@torch.no_grad()
def _averaged(decay: float, averages: Any, weights: Any, _: Any) -> None:
    """Move averages towards weights, in the wider of their dtypes; what is frozen stays as it is,
    which the function of EMAWeightAveraging would round.
    """
    for average, weight in zip(averages, weights, strict=True):
        wide = torch.promote_types(average.dtype, weight.dtype)
        average.data = average.data.to(wide)
        average.lerp_(weight.to(wide), 1 - decay)
