"""Models that take any size, or do but for the attention in their last stages or pooling."""

from __future__ import annotations

from typing import Any

import torch

from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import parts, tables
from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.tables import Grid
from mmpos.interop.timm.target import Target, halved, multiples, record, recorded


def flexible(change: Change, model: Any, target: Target) -> None:
    """Models of which nothing is made for a size."""
    trunk: Any = getattr(model, "encoder", model)
    embed: Any = getattr(trunk, "patch_embed", None)
    if hasattr(embed, "strict_img_size") and not embed.dynamic_img_pad:
        merge = trunk.merge_size if getattr(trunk, "merger", None) is not None else 1
        multiples(target.size, [side * merge for side in embed.patch_size], "a cut into patches")
    record(model, target.size)


def convnet(change: Change, model: Any, target: Target) -> None:
    """Convolutional nets with attention in their last stages or their pooling, or without."""
    stored = tables(model)
    config = getattr(model, "pretrained_cfg", None) or {}
    made = recorded(model) or tuple(config.get("input_size", ())[-2:])
    for table in stored:
        module: Any = table.module
        if not made:
            raise ValueError("the size that this model was made for is not known")
        axes = (0, 1) if len(table.grid) == 2 else (0,) if table.name[0] == "h" else (1,)
        steps = [round(made[axis] / side) for axis, side in zip(axes, table.grid, strict=True)]
        grid = [
            halved((target.size[axis],), step)[0] for axis, step in zip(axes, steps, strict=True)
        ]
        change.table(table, grid)
        if len(axes) == 1:
            setattr(module, ("height", "width")[axes[0]], grid[0])
        else:
            module.feat_size = tuple(grid)
        if hasattr(module, "seq_len"):
            module.seq_len = grid[0] * grid[1]
        if getattr(module, "rel_pos_indices", None) is not None:
            module.rel_pos_indices = _signed(tuple(grid)).to(module.rel_pos_indices.device)
    if parts(model):
        _try(model, target.size)
    record(model, target.size)


def _try(model: Any, size: Grid) -> None:
    """Raise ValueError if the model cannot take an empty image of a size."""
    training = [module for module in model.modules() if module.training]
    weight = next(model.parameters())
    try:
        model.eval()
        model(weight.new_zeros(1, model.in_chans, *size))
    except (AssertionError, RuntimeError) as error:
        reason = str(error) or "its features are no whole number of attention's blocks"
        raise ValueError(f"the model cannot take an image of {times(size)}: {reason}") from error
    finally:
        for module in training:
            module.training = True


def _signed(grid: Grid) -> torch.Tensor:
    """The row and column of each pair's offset in a table ``[2 H - 1, 2 W - 1]``: ``[2, N, N]``."""
    cells = torch.cartesian_prod(*(torch.arange(side) for side in grid)).reshape(-1, 2)
    apart = cells - cells.unsqueeze(1) + torch.tensor(grid) - 1
    return apart.movedim(-1, 0)
