"""Optimizer groups and the learning-rate schedule that all tasks share."""

from __future__ import annotations

from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mmpos.additive import AdditiveEncoding, LearnedEncoding
from mmpos.bias import AttentionBias
from mmpos.models import Transformer
from mmpos.resample import grid_table
from mmpos.rotary import RotaryEncoding

_POSITIONS = (AdditiveEncoding, RotaryEncoding, AttentionBias)


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

    They go the way of the tables themselves; second moments stay above 0. The optimizer is that of
    `adamw`, whose order of parameters is what the state refers to.
    """
    tables = {part.table: part for part in module.modules() if isinstance(part, LearnedEncoding)}
    order = [p for group in parameter_groups(module, 0.0) for p in group["params"]]
    for index, parameter in enumerate(order):
        moments = state["state"].get(index, {})
        encoding = tables.get(parameter)
        for name, moment in moments.items():
            if encoding is not None and isinstance(moment, Tensor) and encoding.fits(moment):
                resized = grid_table(moment, encoding.grid, encoding.resampling)
                moments[name] = resized.clamp(min=0) if name.endswith("_sq") else resized


def warmup_cosine(optimizer: Optimizer, lr: float, steps: int, warmup: float) -> CosineLRScheduler:
    """Linear warm-up over the first ``warmup`` (a fraction) of ``steps``, then a cosine to zero.

    The rate is a closed form of the optimizer step, so that a resumed run continues exactly.
    Raises: ValueError for a fraction outside [0, 1).
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is a fraction of all steps, at least 0 and below 1, got {warmup}")
    rising = int(warmup * steps)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(1, steps - rising),
        warmup_t=rising,
        warmup_prefix=True,
        warmup_lr_init=lr / max(1, rising),
        t_in_epochs=False,
    )
