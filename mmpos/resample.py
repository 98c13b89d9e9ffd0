"""From one grid to another: tables of positions, of relative positions, and patch kernels.

Every resize here is separable: a small matrix for each axis, applied one after the other. The
matrices follow the dialects of `torch.nn.functional.interpolate`, which is what published models
were resized with: ``align_corners`` pins the outermost cells, ``antialias`` widens the filter where
a grid shrinks, and decides the cubic constant (-0.5 with it, -0.75 without) unless one is given.
Sizes are whole numbers, so that no cell is lost to a rounded ratio, and a grid resized to itself is
returned as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Mode = Literal["nearest", "bilinear", "bicubic"]
Fit = Literal["resize", "crop", "center"]
_RADIUS = {"bilinear": 1, "bicubic": 2}


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """How a grid is resized; the default is what timm does with tables of positions.

    Args:
        mode: ``nearest`` (the cell below, as torch), ``bilinear`` or ``bicubic``.
        antialias: widen the filter by the ratio where an axis shrinks, and drop taps outside the
            grid; without it they repeat the border.
        align_corners: map the first and last cell onto each other, not the outer edges.
        cubic: the constant of the cubic kernel; by default -0.5 with antialias, -0.75 without.
        offset: added to a new size before the ratio is formed; 0.1 is DINOv2's first release.
        fit: for each axis, or all: ``resize``; or leave rows as they are, for a change of the field
            of view rather than of resolution: ``crop`` keeps the first cells, ``center`` the middle
            ones. An axis that grows is always resized.

    Raises: ValueError for unknown names, and antialias with ``nearest`` or an offset with
    ``align_corners``, which mean nothing.
    """

    mode: Mode = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    cubic: float | None = None
    offset: float = 0.0
    fit: Fit | Sequence[Fit] = "resize"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {self.mode!r}")
        fits = [self.fit] if isinstance(self.fit, str) else self.fit
        for fit in fits:
            if fit not in get_args(Fit):
                raise ValueError(f"fit must be one of {get_args(Fit)}, got {fit!r}")
        if self.align_corners and self.offset:
            raise ValueError("offset changes a ratio that align_corners does not use: drop one")

    def __str__(self) -> str:
        """The way in a few words, as reports name it."""
        words = [self.mode]
        words += ["antialias"] if self.antialias and self.mode != "nearest" else []
        words += ["align_corners"] if self.align_corners else []
        words += [f"cubic {self.cubic}"] if self.cubic is not None else []
        words += [f"offset {self.offset}"] if self.offset else []
        words += [] if self.fit == "resize" else [f"fit {self.fit}"]
        return ", ".join(words)

    def matrix(self, old: int, new: int, axis: int = 0) -> Float[Tensor, "{new} {old}"]:
        """The weights, in float64, of ``old`` cells in each of ``new`` cells of an axis.

        Raises: ValueError for sizes below 1.
        """
        if old < 1 or new < 1:
            raise ValueError(f"an axis has 1 cell or more, got {old} → {new}")
        fit = self.fit if isinstance(self.fit, str) else self.fit[axis]
        if old == new:
            return torch.eye(new, dtype=torch.float64)
        if fit != "resize" and new < old:
            first = (old - new) // 2 if fit == "center" else 0
            return torch.eye(old, dtype=torch.float64)[first : first + new]
        if self.align_corners:
            ratio = (old - 1) / (new - 1) if new > 1 else 0.0
        else:
            ratio = old / (new + self.offset)
        cells = torch.arange(new, dtype=torch.float64)
        if self.mode == "nearest":
            ratio = torch.tensor(old / (new + self.offset), dtype=torch.float32)  # as torch rounds
            source = (cells.float() * ratio).floor().clamp(max=old - 1).long()
            return torch.eye(old, dtype=torch.float64)[source]
        if self.antialias:
            return self._wide(cells, old, ratio)
        source = cells * ratio if self.align_corners else (cells + 0.5) * ratio - 0.5
        if self.mode == "bilinear":
            source = source.clamp(min=0)
        return self._clamped(source, old)

    def _clamped(self, source: Tensor, old: int) -> Tensor:
        below = source.floor()
        radius = _RADIUS[self.mode]
        weights = torch.zeros(len(source), old, dtype=torch.float64)
        for tap in range(1 - radius, radius + 1):
            cell = below + tap
            near = self._kernel(source - cell)
            column = cell.clamp(0, old - 1).long().unsqueeze(-1)
            weights.scatter_add_(-1, column, near.unsqueeze(-1))
        return weights

    def _wide(self, cells: Tensor, old: int, ratio: float) -> Tensor:
        stretch = max(ratio, 1.0)
        center = (cells + 0.5) * ratio
        reach = _RADIUS[self.mode] * stretch
        column = torch.arange(old, dtype=torch.float64)
        first = (center - reach + 0.5).trunc().clamp(min=0).unsqueeze(-1)
        last = (center + reach + 0.5).trunc().clamp(max=old).unsqueeze(-1)
        weights = self._kernel((column + 0.5 - center.unsqueeze(-1)) / stretch)
        weights = weights * ((column >= first) & (column < last))
        return weights / weights.sum(-1, keepdim=True)

    def _kernel(self, x: Tensor) -> Tensor:
        x = x.abs()
        if self.mode == "bilinear":
            return (1 - x).clamp(min=0)
        a = self.cubic if self.cubic is not None else (-0.5 if self.antialias else -0.75)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((x - 5) * x + 8) * x * a - 4 * a
        return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def grid_table(
    table: Float[Tensor, "*grid dim"],
    grid: Sequence[int],
    how: Resampling | None = None,
) -> Float[Tensor, "*new_grid dim"]:
    """A table ``[*old_grid, D]`` on another grid, in float32 and back to its dtype.

    On its own grid it is returned as it is.
    Raises: ValueError for another number of axes, or sizes below 1.

    >>> grid_table(torch.arange(4.0).reshape(2, 2, 1), (2, 4)).shape
    torch.Size([2, 4, 1])
    """
    old = tuple(table.shape[:-1])
    new = tuple(grid)
    if len(old) != len(new):
        raise ValueError(f"a table of the grid {old} cannot be resized to {new}: other axes")
    if old == new:
        return table
    how = how or Resampling()
    out = table.float()
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            weights = how.matrix(before, after, axis).to(out)
            rows = out.movedim(axis, 0)
            out = (weights @ rows.flatten(1)).unflatten(1, rows.shape[1:]).movedim(0, axis)
    return out.to(table.dtype).contiguous()


def grid_tables(
    table: Float[Tensor, "*grid dim"],
    grids: Sequence[Sequence[int]],
    how: Resampling | None = None,
) -> Float[Tensor, "length dim"]:
    """A table on each of several grids, their rows in row-major order one after the other.

    Each different grid is formed once, and one gather gives every sample its rows, so a batch of
    many images of few sizes costs little more than the sizes.
    """
    sizes = [tuple(grid) for grid in grids]
    if not sizes:
        return table.new_empty(0, table.shape[-1])
    blocks, starts, length = [], {}, 0
    for grid in dict.fromkeys(sizes):
        blocks.append(grid_table(table, grid, how).flatten(0, -2))
        starts[grid] = length
        length += len(blocks[-1])
    rows = [torch.arange(starts[grid], starts[grid] + math.prod(grid)) for grid in sizes]
    return torch.cat(blocks)[torch.cat(rows).to(table.device)]


def flat_table(
    rows: Float[Tensor, "*one length dim"],
    old_grid: Sequence[int],
    new_grid: Sequence[int],
    *,
    prefix_rows: int = 0,
    how: Resampling | None = None,
) -> Float[Tensor, "*one new_length dim"]:
    """A flat table, ``[prefix + H · W, D]`` as in published ViTs, on another grid.

    The prefix rows (class, register, distillation tokens) come first and are carried over. Nothing
    is guessed from the number of rows: a grid of 2 × 8 and one of 4 × 4 have as many.
    Raises: ValueError if the rows are not the prefix rows and those of ``old_grid``.
    """
    count, wanted = rows.shape[-2], prefix_rows + math.prod(old_grid)
    if prefix_rows < 0 or count != wanted:
        raise ValueError(
            f"a table of {count} rows is not {prefix_rows} prefix rows and a grid of "
            f"{_times(old_grid)} = {math.prod(old_grid)}: give its own grid and prefix rows"
        )
    prefix, cells = rows.split([prefix_rows, count - prefix_rows], dim=-2)
    batch = cells.shape[:-2]
    grids = cells.reshape(-1, *old_grid, cells.shape[-1])
    resized = torch.stack([grid_table(grid, new_grid, how).flatten(0, -2) for grid in grids])
    return torch.cat((prefix, resized.reshape(*batch, *resized.shape[1:])), dim=-2)


def bias_table(
    table: Float[Tensor, "length head"],
    old_window: Sequence[int],
    new_window: Sequence[int],
    *,
    extra_rows: int = 0,
    how: Resampling | None = None,
) -> Float[Tensor, "new_length head"]:
    """A table of relative positions, ``[Π (2 W - 1) + extra, H]``, for another window.

    Its rows are the offsets ``-(W - 1) … W - 1`` of each axis, row-major, then the extra rows of
    prefix tokens (BEiT has three), which are carried over (Swin, arXiv:2103.14030, sec. 3.2). With
    ``fit="center"`` a smaller window keeps the rows of its own offsets instead of being resized.
    Raises: ValueError if the rows are not those of ``old_window``.
    """
    old = [2 * size - 1 for size in old_window]
    new = [2 * size - 1 for size in new_window]
    if len(table) != math.prod(old) + extra_rows:
        raise ValueError(
            f"a bias table of {len(table)} rows is not the {math.prod(old)} offsets of a window of "
            f"{_times(old_window)} and {extra_rows} extra rows"
        )
    offsets, extra = table.split([len(table) - extra_rows, extra_rows])
    resized = grid_table(offsets.reshape(*old, table.shape[-1]), new, how)
    return torch.cat((resized.flatten(0, -2), extra))


def patch_kernel(
    kernel: Float[Tensor, "dim channel *patch"],
    patch_size: Sequence[int],
    how: Resampling | None = None,
) -> Float[Tensor, "dim channel *new_patch"]:
    """A patch embedding's kernel for another patch size, by pseudo-inverse.

    The tokens of a patch that is resized to the new size are those of the patch itself, exactly
    where it grows and in the least-squares sense where it shrinks (FlexiViT, arXiv:2212.08013,
    sec. 3.4). On each axis the kernel is multiplied by the pseudo-inverse of the resize matrix.
    Raises: ValueError for another number of axes.
    """
    old, new = tuple(kernel.shape[2:]), tuple(patch_size)
    if len(old) != len(new):
        raise ValueError(f"a kernel of {_times(old)} has other axes than {_times(new)}")
    how = how or Resampling()
    out = kernel.double()
    for axis, (before, after) in enumerate(zip(old, new, strict=True)):
        if before != after:
            weights = torch.linalg.pinv(how.matrix(before, after, axis)).to(out)
            out = (out.movedim(axis + 2, -1) @ weights).movedim(-1, axis + 2)
    return kernel if old == new else out.to(kernel.dtype).contiguous()


def _times(sizes: Sequence[int]) -> str:
    return " × ".join(str(size) for size in sizes)
