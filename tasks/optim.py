"""Optimizer groups and the learning-rate schedule that all tasks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mmpos.additive import AdditiveEncoding, TableEncoding
from mmpos.bias import AttentionBias, ContentBias, RelativePositionBias
from mmpos.models import Transformer
from mmpos.rotary import RotaryEncoding

_POSITIONS = (AdditiveEncoding, RotaryEncoding, AttentionBias, ContentBias)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """The parameters of ``module`` in two groups: with weight decay, and without.

    Positions (tables, directions, slopes of any encoding), class and register tokens, norms and
    biases are not decayed: decay would pull a table towards "no position".
    """
    free = set()
    for part in module.modules():
        if isinstance(part, _POSITIONS):
            free.update(part.parameters())
        if isinstance(part, Transformer) and part.prefix is not None:
            free.add(part.prefix)
    decayed, kept = [], []
    for parameter in module.parameters():
        matrix = parameter.ndim >= 2 and parameter not in free
        (decayed if matrix else kept).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def adamw(module: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """AdamW over `parameter_groups`."""
    return AdamW(parameter_groups(module, weight_decay), lr=lr)


def resize_moments(module: nn.Module, state: dict) -> None:
    """Take the moments of tables in a stored optimizer ``state`` to the grids of ``module``.

    First moments go the way of the tables themselves, second ones bilinearly. The optimizer is that
    of `adamw`, whose order of parameters is what the state refers to.
    """
    tables = {
        table: (part, name)
        for part in module.modules()
        if isinstance(part, TableEncoding | RelativePositionBias)
        for name, table in part.tables.items()
    }
    order = [p for group in parameter_groups(module, 0.0) for p in group["params"]]
    for index, parameter in enumerate(order):
        moments = state["state"].get(index, {})
        if parameter not in tables:
            continue
        encoding, table = tables[parameter]
        # no weight of a bilinear filter is negative, so second moments stay above 0
        second = replace(encoding.resampling, mode="bilinear", cubic=None)
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and encoding.fits(moment, table):
                how = second if name.endswith("_sq") else None
                moments[name] = encoding.resized(moment, table, how)


class WarmupCosine(CosineLRScheduler):
    """A linear warm-up over a fraction of all steps, then a cosine to zero, by optimizer step.

    The rate is a closed form of the step, and the step is all the state there is: a resumed run
    continues exactly, and one that is resumed with another rate or length obeys these.
    Raises: ValueError for a fraction outside [0, 1).
    """

    def __init__(self, optimizer: Optimizer, steps: int, warmup: float) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup is a fraction of all steps, at least 0 and below 1, got {warmup}"
            )
        rising = int(warmup * steps)
        lr = optimizer.param_groups[0]["lr"]
        self.updates = 0
        super().__init__(
            optimizer,
            t_initial=max(1, steps - rising),
            warmup_t=rising,
            warmup_prefix=True,
            warmup_lr_init=lr / max(1, rising),
            t_in_epochs=False,
        )

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Set the rate for the step after ``num_updates``."""
        self.updates = num_updates
        super().step_update(num_updates, metric)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_update(state_dict["updates"])
