"""The position tables of timm's models: where each lies, how it is stored, how it changes its grid.

A form is a function ``(data, old, new, how)`` that takes data stored in one way from one grid to
another. All of them are linear, so what they do to weights they can do to their moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from mmpos.resample import Resampling, bias_table, flat_table, grid_table

Grid = tuple[int, ...]
Form = Callable[[Tensor, Grid, Grid, Resampling | None], Tensor]

BICUBIC = Resampling()
LINEAR = Resampling(mode="bilinear", antialias=False)


@dataclass(frozen=True)
class Table:
    """A parameter with rows for the cells or the offsets of a grid.

    ``how`` is the way of timm and of the papers: ``None`` for tables of offsets is BEiT's, linear
    between offsets that spread geometrically from the centre (`progression`). ``note`` says what
    the form does besides.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    grid: Grid
    form: Form
    how: Resampling | None = BICUBIC
    note: str = ""

    @staticmethod
    def of(
        module: nn.Module,
        name: str,
        grid: Sequence[int],
        form: Form,
        how: Resampling | None = BICUBIC,
        note: str = "",
    ) -> Table:
        """The table that is the parameter ``name`` of ``module``."""
        return Table(module, name, getattr(module, name), tuple(grid), form, how, note)

    def __str__(self) -> str:
        """The way it is resized, in a few words."""
        how = "linear, offsets spread geometrically (BEiT)" if self.how is None else str(self.how)
        return f"{self.note}, {how}" if self.note else how

    def resized(
        self, data: Tensor, grid: Grid, how: Resampling | None = None, *, positive: bool = False
    ) -> Tensor:
        """Data stored as this table is, on another grid; itself on its own.

        ``positive`` keeps what is not negative so, as an optimizer needs of second moments: no
        weight of a bilinear filter is negative.
        """
        if grid == self.grid:
            return data
        form, how = self.form, how or self.how
        if positive:
            how = how and replace(how, mode="bilinear", cubic=None)
            if isinstance(form, partial) and form.func is windows:
                form = rows
        return form(data, self.grid, grid, how)


def rows(data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, prefix: int = 0) -> Tensor:
    """``[..., prefix + Π grid, D]``: rows of prefix tokens, then the cells."""
    return flat_table(data, old, new, prefix_rows=prefix, how=how)


def channels_last(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[1, *grid, D]``."""
    return grid_table(data[0], new, how).unsqueeze(0)


def channels_first(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[1, D, *grid]``."""
    return grid_table(data[0].movedim(0, -1), new, how).movedim(-1, 0).unsqueeze(0).contiguous()


def axis(data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, index: int) -> Tensor:
    """``[2 S - 1, D]``: the offsets of one axis, the ``index``-th of the image."""
    if how is not None and not isinstance(how.fit, str):
        how = replace(how, fit=how.fit[index])
    return grid_table(data, (2 * new[0] - 1,), how)


def along(data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, index: int) -> Tensor:
    """``[1, S, D]``: the places of one axis, the ``index``-th of the grid."""
    if how is not None and not isinstance(how.fit, str):
        how = replace(how, fit=how.fit[index])
    return grid_table(data[0], new[index : index + 1], how).unsqueeze(0)


def offsets(
    data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, extra: int = 0
) -> Tensor:
    """``[Π (2 W - 1) + extra, heads]``: the offsets in a window, then rows of prefix tokens."""
    if how is not None:
        return bias_table(data, old, new, extra_rows=extra, how=how)
    cells, rest = data.split([len(data) - extra, extra])
    cells = wide(cells).reshape(*[2 * size - 1 for size in old], data.shape[-1])
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        weights = progression(before, after).to(cells)
        cells = (weights @ cells.movedim(place, -2)).movedim(-2, place)
    return torch.cat((cells.flatten(0, -2).to(data.dtype), rest))


def offsets_by_head(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[heads, 2 H - 1, 2 W - 1]``."""
    resized = offsets(data.flatten(1).T, old, new, how)
    return resized.T.reshape(len(data), *[2 * size - 1 for size in new]).contiguous()


def cells(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[*grid, D]``."""
    return grid_table(data, new, how)


def place_cells(
    data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, index: int
) -> Tensor:
    """``[S, D]``: the places of one axis, the ``index``-th of the grid."""
    return along(data.unsqueeze(0), old, new, how, index=index)[0]


def offset_grid(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[2 H - 1, 2 W - 1, D]``."""
    return grid_table(data, [2 * size - 1 for size in new], how)


def distances(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[heads, H · W]``: distances on each axis, resized as the signed offsets they stand for.

    So distance 0 stays distance 0, as the centre of the offsets does.
    """
    signed = data.reshape(len(data), *old)
    for place, size in enumerate(old, start=1):
        signed = signed.index_select(place, torch.arange(1 - size, size).abs().to(data.device))
    signed = grid_table(signed.movedim(0, -1), [2 * size - 1 for size in new], how)
    for place, size in enumerate(new):
        signed = signed.narrow(place, size - 1, size)
    return signed.movedim(-1, 0).flatten(1).contiguous()


def distance_grid(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[heads, H · W]``: distances on each axis, resized as a picture of them, as TinyViT does."""
    cells = data.reshape(len(data), *old).movedim(0, -1)
    return grid_table(cells, new, how).movedim(-1, 0).flatten(1).contiguous()


def blocks(data: Tensor, old: Grid, new: Grid, how: Resampling | None) -> Tensor:
    """``[1, blocks, H · W, D]``: each block has its own cells, and none is mixed with another's."""
    return flat_table(data, old, new, how=how)


def windows(data: Tensor, old: Grid, new: Grid, how: Resampling | None, *, window: Grid) -> Tensor:
    """``[1, Π grid, D]`` for windowed attention: the part all windows share is tiled, not resized.

    A table learned with attention in windows is one that repeats in each plus one of the whole
    image, and blurs if it is resized as one ("Window Attention is Bugged", arXiv:2311.05613). The
    part that repeats is the mean over windows of what differs from the line through their means.
    """
    cells = wide(data).reshape(*_split(old, window), -1)
    smooth = cells.mean((1, 3))
    for place, (side, cell) in enumerate(zip(old, window, strict=True)):
        smooth = (_lines(side, cell).to(cells) @ smooth.movedim(place, -2)).movedim(-2, place)
    shared = (cells - smooth.reshape(cells.shape)).mean((0, 2), keepdim=True)
    rest = rows((cells - shared).reshape(data.shape), old, new, how)
    whole = rest.reshape(*_split(new, window), -1) + shared
    return whole.reshape(1, math.prod(new), -1).to(data.dtype)


def _lines(side: int, window: int) -> Tensor:
    """The weights of windows' means in each cell of an axis, on straight lines between centres."""
    count = side // window
    if count == 1:
        return torch.ones(side, 1, dtype=torch.float64)
    place = (torch.arange(side, dtype=torch.float64) + 0.5) / window - 0.5
    left = place.floor().clamp(0, count - 2).long().unsqueeze(1)
    share = place.unsqueeze(1) - left
    weights = torch.zeros(side, count, dtype=torch.float64)
    return weights.scatter_(1, left, 1 - share).scatter_(1, left + 1, share)


def progression(old: int, new: int) -> Tensor:
    """The weights, in float64, of the offsets of a window of ``old`` in those of one of ``new``.

    A window that grows has its old offsets spread from the centre, the steps between them growing
    by a constant factor until the last is the new last, with linear interpolation between (BEiT,
    arXiv:2106.08254, the authors' fine-tuning code). One that shrinks, or stays, keeps the rows of
    its own offsets.
    """
    reach, target = old - 1, new - 1
    places = torch.arange(-target, target + 1, dtype=torch.float64)
    ratio, high = 1.0, float(max(target, 1))
    for _ in range(100):
        middle = (ratio + high) / 2
        far = sum(middle**step for step in range(reach))
        ratio, high = (middle, high) if far < target else (ratio, middle)
    steps = ratio ** torch.arange(reach, dtype=torch.float64)
    nodes = torch.cat((-steps.cumsum(0).flip(0), torch.zeros(1), steps.cumsum(0)))
    if len(nodes) == 1:
        return torch.ones(len(places), 1, dtype=torch.float64)
    right = torch.searchsorted(nodes, places).clamp(1, len(nodes) - 1)
    share = ((places - nodes[right - 1]) / (nodes[right] - nodes[right - 1])).clamp(0, 1)
    weights = torch.zeros(len(places), len(nodes), dtype=torch.float64)
    weights.scatter_(1, right.unsqueeze(1) - 1, 1 - share.unsqueeze(1))
    return weights.scatter_(1, right.unsqueeze(1), share.unsqueeze(1))


def _split(grid: Grid, window: Grid) -> list[int]:
    """A grid's axes as windows and cells in them, in turn."""
    return [size for side, cell in zip(grid, window, strict=True) for size in (side // cell, cell)]


def wide(data: Tensor) -> Tensor:
    """In float32 at least."""
    return data.to(torch.promote_types(data.dtype, torch.float32))
