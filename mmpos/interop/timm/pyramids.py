"""Families of several stages that timm cannot resize: tables of distances, windows and axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpos.interop.timm.change import Change
from mmpos.interop.timm.parts import tables
from mmpos.interop.timm.tables import Grid
from mmpos.interop.timm.target import (
    Target,
    convolved,
    divided,
    halved,
    multiples,
    quiet,
    record,
)


def levit(change: Change, model: Any, target: Target) -> None:
    """LeViT: a table of distances for each layer's grid, and layers that halve it."""
    if not hasattr(model.stem, "stride"):
        raise ValueError("LeViT with a stem of its own: the grid that it gives is not known")
    grid = halved(target.size, model.stem.stride)
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            attention = stage.downsample.attn_downsample
            _distances(change, attention, grid, attention.stride)
            for module in attention.q.modules():
                if hasattr(module, "resolution"):
                    module.resolution = grid
            grid = halved(grid, attention.stride)
        for block in stage.blocks:
            _distances(change, block.attn, grid)
    record(model, target.size)


def efficientformer(change: Change, model: Any, target: Target) -> None:
    """EfficientFormer: attention in the last stage only."""
    grid = halved(target.size, 2 ** (len(model.stages) + 1))
    for module in model.stages[-1].modules():
        if hasattr(module, "attention_biases"):
            _distances(change, module, grid)
    record(model, target.size)


def efficientformer_v2(change: Change, model: Any, target: Target) -> None:
    """EfficientFormer V2: some attention at half the grid of its stage, some that halves it."""
    grid = halved(target.size, model.stem.stride)
    for stage in model.stages:
        if not isinstance(stage.downsample, nn.Identity):
            attention = getattr(stage.downsample, "attn", None)
            if attention is not None:
                attention.resolution2 = halved(grid)
                attention.N2 = attention.resolution2[0] * attention.resolution2[1]
                _distances(change, attention, grid, 2)
            grid = halved(grid)
        for block in stage.blocks:
            if block.token_mixer is None:
                continue
            if block.token_mixer.upsample is not None:
                multiples(target.size, 32, "attention at half a stage's features")
                _distances(change, block.token_mixer, halved(grid))
            else:
                _distances(change, block.token_mixer, grid)
    record(model, target.size)


def tiny_vit(change: Change, model: Any, target: Target) -> None:
    """TinyViT: any image, in windows of a fixed size, which change only if they are given."""
    count = len(model.stages)
    if target.window is not None:
        sizes = target.window
        sizes = [sizes] * count if isinstance(sizes, int) else list(sizes)
        if len(sizes) != count or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"window_size is one number or {count}, one a stage of which the first has no "
                f"window, got {target.window!r}"
            )
        for stage, size in zip(model.stages, sizes, strict=True):
            for block in stage.blocks:
                if hasattr(block, "window_size"):
                    block.window_size = size
                    _distances(change, block.attn, (size, size))
        record(model, target.size, window_sizes=tuple(sizes))
    else:
        record(model, target.size)


def gcvit(change: Change, model: Any, target: Target) -> None:
    """GCViT: windows that a stage's query pools the features to, so that they follow the size."""
    before, chosen, step = tables(model), [], 4
    for index, stage in enumerate(model.stages):
        step *= 2 if index else 1
        pools = [name for name, _ in stage.global_block.blocks.named_children() if "pool" in name]
        windows = 2 ** len(pools)
        multiples(target.size, step * windows, f"stage {index}, of {windows} windows an axis,")
        stage.feat_size = divided(target.size, (step, step))
        window = divided(stage.feat_size, (windows, windows))
        for block in stage.blocks:
            block.window_size = block.attn.window_size = window
            block.num_windows = windows**2
            with quiet():
                block.attn.rel_pos.set_window_size(window)
        chosen.append(window)
    change.tables(before, tables(model))
    record(model, target.size, window_size=tuple(chosen))


def mvit(change: Change, model: Any, target: Target) -> None:
    """MViTv2: two tables of offsets a layer, as long as its queries or keys are on each axis."""
    grid = convolved(target.size, model.patch_embed.proj)
    absolute = [table for table in tables(model) if table.module is model]
    if model.pos_embed is not None and not absolute:
        raise ValueError("the grid of this model's pos_embed is not known: it has no other table")
    for table in absolute:
        change.table(table, grid)
    for stage in model.stages:
        for block in stage.blocks:
            attention = block.attn
            queries, keys = (
                grid if pool is None else convolved(grid, pool)
                for pool in (attention.pool_q, attention.pool_k)
            )
            for index, table in enumerate(tables(attention)):
                change.table(table, (max(queries[index], keys[index]),))
            grid = queries
        stage.feat_size = grid
    record(model, target.size)


def _distances(change: Change, attention: Any, grid: Grid, stride: int = 1) -> None:
    """Take a table of distances, and the index of its pairs, to a grid of keys."""
    (table,) = tables(attention)
    change.table(table, grid)
    attention.attention_bias_cache = {}
    attention.resolution = grid  # EfficientFormer's has none, and would be taken for a square
    if hasattr(attention, "N"):
        attention.N = grid[0] * grid[1]
    if grid != table.grid:
        index = distance_index(grid, stride)
        attention.attention_bias_idxs = index.to(attention.attention_bias_idxs.device)


def distance_index(grid: Grid, stride: int = 1) -> Tensor:
    """The row of each pair's distances in a table ``[H · W]``: ``[queries, H · W]``.

    Queries are those cells that ``stride`` divides.
    """
    keys = torch.cartesian_prod(*(torch.arange(side) for side in grid)).reshape(-1, 2)
    queries = torch.cartesian_prod(*(torch.arange(0, side, stride) for side in grid)).reshape(-1, 2)
    apart = (queries.unsqueeze(1) - keys).abs()
    return apart[..., 0] * grid[1] + apart[..., 1]
