"""Families that timm cannot resize and that add tables of a grid to their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import tables
from mmpos.interop.timm.scheme import times
from mmpos.interop.timm.tables import Grid
from mmpos.interop.timm.target import (
    Target,
    convolved,
    divided,
    multiples,
    one_patch,
    record,
)


def rows(change: Change, model: Any, target: Target) -> None:
    """CaiT and ConViT: a table of rows behind a plain patch embedding."""
    before, embed = tables(model), model.patch_embed
    if target.patch is not None:
        change.kernel(embed.proj, target.patch)
        embed.patch_size = target.patch
    one_patch(target.size, embed.feat_ratio(as_scalar=False))
    embed.set_input_size(img_size=target.size, patch_size=target.patch)
    change.tables(before, tables(model))
    for info in model.feature_info:
        info["reduction"] = embed.feat_ratio()
    if hasattr(model, "num_patches"):
        model.num_patches = embed.num_patches
    for module in model.modules():
        if hasattr(module, "rel_indices"):
            module.rel_indices = _relative(embed.grid_size).to(module.qk.weight)
    record(model, target.size, **({"patch_size": target.patch} if target.patch else {}))


def _relative(grid: Grid) -> torch.Tensor:
    """``dx, dy, dx² + dy²`` from each query to each key, ``[1, N, N, 3]``.

    ConViT forms them itself at the first pass, for a square of as many tokens.
    """
    cells = torch.cartesian_prod(*(torch.arange(side) for side in grid)).reshape(-1, 2)
    apart = (cells - cells.unsqueeze(1)).float()
    return torch.cat((apart.flip(-1), apart.square().sum(-1, keepdim=True)), -1).unsqueeze(0)


def crossvit(change: Change, model: Any, target: Target) -> None:
    """CrossViT: two branches, each of an image scaled from the given one, in its own patches."""
    scales = [
        [scaled / side for scaled, side in zip(sizes, model.img_size, strict=True)]
        for sizes in model.img_size_scaled
    ]
    steps = [embed.patch_size for embed in model.patch_embed]
    for axis, side in enumerate(target.size):
        branches = [(scale[axis], step[axis]) for scale, step in zip(scales, steps, strict=True)]
        if not _whole(side, branches):
            wanted = sorted(range(1, 2 * side + 1), key=lambda other: abs(other - side))
            near = next(other for other in wanted if _whole(other, branches))
            raise ValueError(
                f"image_size {times(target.size)} is not of whole patches in each branch of the "
                f"model: the nearest to {side} that is, is {near}"
            )
    before, model.img_size = tables(model), target.size
    model.img_size_scaled = [
        tuple(int(side * each + 1e-6) for side, each in zip(target.size, scale, strict=True))
        for scale in scales
    ]
    for embed, size in zip(model.patch_embed, model.img_size_scaled, strict=True):
        grid = divided(size, embed.patch_size)
        embed.img_size, embed.num_patches = size, grid[0] * grid[1]
    change.tables(before, tables(model))
    record(model, target.size)


def _whole(side: int, branches: Sequence[tuple[float, int]]) -> bool:
    return all(
        int(side * scale + 1e-6) >= step and int(side * scale + 1e-6) % step == 0
        for scale, step in branches
    )


def pit(change: Change, model: Any, target: Target) -> None:
    """PiT: overlapping patches."""
    embed = model.patch_embed
    one_patch(target.size, embed.patch_size)
    embed.img_size, embed.grid_size = target.size, convolved(target.size, embed.conv)
    embed.height, embed.width = embed.grid_size
    _all(change, model, embed.grid_size)
    record(model, target.size)


def tnt(change: Change, model: Any, target: Target) -> None:
    """TNT: a table of patches, resized, and one of the pixels in a patch, which is not."""
    before, embed = tables(model), model.pixel_embed
    multiples(target.size, embed.patch_size, "a cut into patches")
    embed.img_size, embed.grid_size = target.size, divided(target.size, embed.patch_size)
    embed.num_patches = model.num_patches = embed.grid_size[0] * embed.grid_size[1]
    change.tables(before, tables(model))
    record(model, target.size)


def volo(change: Change, model: Any, target: Target) -> None:
    """VOLO: a table after the outlooker's stage, at half the patches' grid."""
    grid = target.size
    for layer in (model.patch_embed.conv, model.patch_embed.proj, *model.network[:2]):
        if layer is not None:
            for module in layer.modules():
                if isinstance(module, torch.nn.Conv2d):
                    grid = convolved(grid, module)
    _all(change, model, grid)
    record(model, target.size)


def visformer(change: Change, model: Any, target: Target) -> None:
    """Visformer: a table at the head of each stage."""
    before, grid = {table.name: table for table in tables(model)}, target.size
    model.img_size = target.size
    if model.stem is not None:
        grid = convolved(grid, model.stem[0])
    for index in (1, 2, 3):
        embed = getattr(model, f"patch_embed{index}", None)
        if embed is not None:
            one_patch(grid, embed.patch_size)
            embed.set_input_size(img_size=grid)
            grid = embed.grid_size
        if f"pos_embed{index}" in before:
            change.table(before[f"pos_embed{index}"], grid)
    record(model, target.size)


def nest(change: Change, model: Any, target: Target) -> None:
    """NesT: blocks of cells, a fixed number of them, each with its own rows."""
    side = round(model.num_blocks[0] ** 0.5)
    if target.size[0] != target.size[1]:
        raise ValueError(
            f"NesT puts square blocks into a square: image_size must be square, got {target.size}"
        )
    multiples(target.size, model.patch_size * side, f"a cut into {side} × {side} blocks")
    before = tables(model)
    model.patch_embed.set_input_size(img_size=target.size)
    model.block_size = model.patch_embed.grid_size[0] // side
    model.num_patches = model.patch_embed.num_patches
    model.seq_length = model.num_patches // model.num_blocks[0]
    for level in model.levels:
        level.block_size = model.block_size
    change.tables(before, tables(model))
    record(model, target.size)


def coat(change: Change, model: Any, target: Target) -> None:
    """CoaT: convolutions, which take any size; the model only checks the size it was made for."""
    if model.parallel_blocks is not None:
        step = model.patch_embed1.patch_size[0] * 8
        multiples(target.size, step, "the exchange between four scales")
    grid = target.size
    for index in (1, 2, 3, 4):
        embed = getattr(model, f"patch_embed{index}")
        if embed is not None:
            one_patch(grid, embed.patch_size)
            embed.set_input_size(img_size=grid)
            grid = embed.grid_size
    record(model, target.size)


def sam(change: Change, model: Any, target: Target) -> None:
    """SAM: one table of patches, and two of offsets in each layer, of windows or of the image."""
    embed = model.patch_embed
    if target.patch is not None:
        change.kernel(embed.proj, target.patch)
        embed.patch_size = target.patch
    one_patch(target.size, embed.patch_size)
    if not embed.strict_img_size:
        multiples(target.size, embed.patch_size, "a patch embedding that takes any size")
    embed.set_input_size(img_size=target.size, patch_size=target.patch)
    grid = embed.grid_size
    for table in tables(model):
        if table.module is model:
            change.table(table, grid)
    for block in model.blocks:
        if block.window_size == 0:
            for index, table in enumerate(tables(block)):
                change.table(table, (grid[index],))
    for info in model.feature_info:
        info["reduction"] = embed.feat_ratio()
    if model.rope_global is not None:
        model.rope_global.update_feat_shape(grid)
    record(model, target.size, **({"patch_size": target.patch} if target.patch else {}))


def hiera(change: Change, model: Any, target: Target) -> None:
    """Hiera: the part of its table that repeats in each window is kept, the rest is resized."""
    if len(model.patch_stride) != 2:
        raise ValueError("Hiera for video: its frames are an axis that image_size does not name")
    unit = [s * m for s, m in zip(model.patch_stride, model.mask_unit_size, strict=True)]
    multiples(target.size, unit, "a cut into windows")
    before = tables(model)
    model.tokens_spatial_shape = list(divided(target.size, model.patch_stride))
    model.mask_spatial_shape = list(divided(target.size, unit))
    schedule = model.unroll.schedule
    fresh = type(model.reroll)(
        target.size, model.patch_stride, schedule, model.stage_ends, model.q_pool
    )
    model.unroll.size = list(model.tokens_spatial_shape)
    model.reroll.size, model.reroll.schedule = fresh.size, fresh.schedule
    change.tables(before, tables(model))
    record(model, target.size)


def sam2(change: Change, model: Any, target: Target) -> None:
    """SAM 2's Hiera: tables read at each pass; the tokens must be whole windows of the first."""
    size = target.size
    grid = convolved(size, model.patch_embed.proj)
    window = model.pos_embed_window.shape[2:]
    if any(side % cell for side, cell in zip(grid, window, strict=True)):
        stride = model.patch_embed.proj.stride
        multiples(size, [s * w for s, w in zip(stride, window, strict=True)], "a tiled table")
    record(model, size)


def naflex(change: Change, model: Any, target: Target) -> None:
    """NaFlexViT: takes any grid; the one that its tables are of becomes that of the size."""
    embeds = model.embeds
    one_patch(target.size, embeds.patch_size)
    if not embeds.dynamic_img_pad:
        multiples(target.size, embeds.patch_size, "a cut into patches")
    grid = embeds.dynamic_feat_size(target.size)
    if embeds.pos_embed_ar_preserving:  # the model crops the square around a grid
        grid = (max(grid),) * 2
    _all(change, model, grid)
    if embeds.default_img_size is not None:
        embeds.default_img_size = target.size
    record(model, target.size)
    if embeds.pos_embed_grid_size is not None:
        embeds.pos_embed_grid_size = grid
        model._model_args["pos_embed_grid_size"] = grid


def _all(change: Change, model: Any, grid: Grid) -> None:
    for table in tables(model):
        change.table(table, grid)
