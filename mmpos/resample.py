"""From one grid to another: tables of positions, of relative positions, and patch kernels.

Every resize here is separable: a small matrix for each axis, applied one after the other. The
matrices follow the dialects of `torch.nn.functional.interpolate`, which is what published models
were resized with: ``align_corners`` pins the outermost cells, ``antialias`` widens the filter where
a grid shrinks, and decides the cubic constant (-0.5 with it, -0.75 without) unless one is given.
Sizes are whole numbers, so that no cell is lost to a rounded ratio, and a grid resized to itself is
returned as it is. Matrices are formed in float64 on the CPU at each call, and applied in float32,
under autocast too, or in float64 to what is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.spec import Specified

Mode = Literal["nearest", "bilinear", "bicubic"]
Fit = Literal["resize", "crop", "center", "extend"]


@dataclass(frozen=True, kw_only=True)
class Resampling(Specified):
    """How a grid is resized; the default is what timm does with tables of positions.

    Args:
        mode: ``nearest`` (the cell below, as torch), ``bilinear`` or ``bicubic``.
        antialias: widen the filter by the ratio where an axis shrinks, and drop taps outside the
            grid; without it they repeat the border. ``nearest`` has no filter to widen.
        align_corners: map the first and last cell onto each other, not the outer edges. With
            antialias torch takes the ratio from the cells but counts it from the outer edge.
        cubic: the constant of the cubic kernel; by default -0.5 with antialias, -0.75 without.
        offset: added to a new size before the ratio is formed, also on an axis whose size stays
            when another changes; 0.1 is DINOv2's first release.
        fit: for each axis, or all: ``resize``; or leave rows as they are, for a change of the field
            of view rather than of resolution. An axis that shrinks keeps its first cells with
            ``crop`` and ``extend``, its middle ones with ``center`` (AST, arXiv:2104.01778, sec.
            2.2). One that grows is resized, but with ``extend`` goes on with copies from its first
            cell (Longformer, arXiv:2004.05150, sec. 5).

    Raises: ValueError for unknown names, for align_corners with ``nearest`` or an offset, and for
    a cubic constant without ``bicubic``, which mean nothing, and for a negative offset.
    """

    mode: Mode = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    cubic: float | None = None
    offset: float = 0.0
    fit: Fit | Sequence[Fit] = "resize"

    @property
    def neutral(self) -> bool:
        return self == Resampling()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {self.mode!r}")
        for fit in [self.fit] if isinstance(self.fit, str) else self.fit:
            if fit not in get_args(Fit):
                raise ValueError(f"fit must be one of {get_args(Fit)}, got {fit!r}")
        if self.offset < 0:
            raise ValueError(f"offset must be 0 or more, got {self.offset}")
        if self.align_corners and self.offset:
            raise ValueError("offset changes a ratio that align_corners does not use: drop one")
        if self.align_corners and self.mode == "nearest":
            raise ValueError("align_corners does nothing for the mode nearest: drop it")
        if self.cubic is not None and self.mode != "bicubic":
            raise ValueError(f"cubic {self.cubic} does nothing for the mode {self.mode}: drop it")

    def __str__(self) -> str:
        """The way in a few words, as reports name it."""
        words: list[str] = [self.mode]
        words += ["antialias"] if self.antialias and self.mode != "nearest" else []
        words += ["align_corners"] if self.align_corners else []
        words += [f"cubic {self.cubic}"] if self.cubic is not None else []
        words += [f"offset {self.offset}"] if self.offset else []
        fit = self.fit if isinstance(self.fit, str) else "/".join(self.fit)
        words += [f"fit {fit}"] if fit != "resize" else []
        return ", ".join(words)

    def matrix(self, old: int, new: int, axis: int = 0) -> Float[Tensor, "{new} {old}"]:
        """The weights, in float64, of ``old`` cells in each of ``new`` cells of an axis.

        Raises: ValueError for sizes below 1.
        """
        if old < 1 or new < 1:
            raise ValueError(f"an axis has 1 cell or more, got {old} → {new}")
        fit = self.fit if isinstance(self.fit, str) else self.fit[axis]
        cells, columns = _count(new).unsqueeze(-1), _count(old)
        if new <= old and fit != "resize":
            first = old // 2 - new // 2 if fit == "center" else 0
            return (cells + first == columns).double()
        if fit == "extend":
            return (cells % old == columns).double()
        if old == new and not self.offset:
            return (cells == columns).double()
        if self.align_corners:
            ratio = (old - 1) / (new - 1) if new > 1 else 0.0
        else:
            ratio = old / (new + self.offset)
        if self.mode == "nearest":  # in float32, as torch rounds
            return ((cells.float() * ratio).floor() == columns).double()
        if self.align_corners and not self.antialias:
            source = cells * ratio
        else:
            source = (cells + 0.5) * ratio - 0.5
        if self.antialias:
            weights = self._kernel((source - columns) / max(ratio, 1.0))
            return weights / weights.sum(-1, keepdim=True)
        taps = self._kernel(source + 2 - _count(old + 4))  # two more columns at either end
        weights = taps[:, 2:-2]
        weights[:, 0] += taps[:, :2].sum(-1)
        weights[:, -1] += taps[:, -2:].sum(-1)
        return weights

    def _kernel(self, x: Tensor) -> Tensor:
        x = x.abs()
        if self.mode == "bilinear":
            return (1 - x).clamp(min=0)
        a = self.cubic if self.cubic is not None else (-0.5 if self.antialias else -0.75)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def grid_table(
    table: Float[Tensor, "*grid dim"],
    grid: Sequence[int],
    how: Resampling | None = None,
) -> Float[Tensor, "*new_grid dim"]:
    """A table ``[*old_grid, D]`` on another grid, of the same dtype.

    On its own grid it is returned as it is.
    Raises: ValueError for another number of axes, also in ``how.fit``, or sizes below 1.

    >>> grid_table(torch.arange(4.0).reshape(2, 2, 1), (2, 4)).shape
    torch.Size([2, 4, 1])
    """
    old, new = tuple(table.shape[:-1]), tuple(grid)
    if old == new:
        return table
    return _apply(_matrices(how or Resampling(), old, new), table)


def grid_tables(
    table: Float[Tensor, "*grid dim"],
    grids: Sequence[Sequence[int]],
    how: Resampling | None = None,
) -> Float[Tensor, "length dim"]:
    """A table on each of several grids, their rows in row-major order one after the other.

    Each different grid is formed once, so a batch of many images of few sizes costs little more
    than the sizes.
    """
    sizes = [tuple(grid) for grid in grids]
    if not sizes:
        return table.new_empty(0, table.shape[-1])
    tables = {size: grid_table(table, size, how).flatten(0, -2) for size in set(sizes)}
    return torch.cat([tables[size] for size in sizes])


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
    cells = cells.movedim(-2, 0)  # a batch of tables is one table of more features
    grid = cells.reshape(*old_grid, math.prod(cells.shape[1:]))
    resized = grid_table(grid, new_grid, how).reshape(-1, *cells.shape[1:]).movedim(0, -2)
    return torch.cat((prefix, resized), dim=-2)


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
    if extra_rows < 0 or len(table) != math.prod(old) + extra_rows:
        raise ValueError(
            f"a bias table of {len(table)} rows is not the {math.prod(old)} offsets of a window of "
            f"{_times(old_window)} and {extra_rows} extra rows: give its own window and extra rows"
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
    Raises: ValueError for another number of axes, or sizes below 1.
    """
    old, new = tuple(kernel.shape[2:]), tuple(patch_size)
    if old == new:
        return kernel
    matrices = _matrices(how or Resampling(), old, new)
    return _apply({2 + axis: torch.linalg.pinv(m).mT for axis, m in matrices.items()}, kernel)


def _matrices(how: Resampling, old: Sequence[int], new: Sequence[int]) -> dict[int, Tensor]:
    """A matrix for each axis that changes."""
    if len(old) != len(new):
        raise ValueError(f"a grid of {_times(old)} cannot become one of {_times(new)}: other axes")
    if not isinstance(how.fit, str) and len(how.fit) != len(new):
        raise ValueError(
            f"fit {tuple(how.fit)} is for {len(how.fit)} axes, a grid of {_times(new)} has "
            f"{len(new)}: give one for each axis, or one for all"
        )
    return {
        axis: how.matrix(before, after, axis)
        for axis, (before, after) in enumerate(zip(old, new, strict=True))
        if before != after or how.offset
    }


def _apply(matrices: dict[int, Tensor], table: Tensor) -> Tensor:
    """Each matrix along its axis of the table, which keeps its dtype."""
    out = table.to(torch.promote_types(table.dtype, torch.float32))
    device = out.device.type
    available = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if available else nullcontext():
        for axis, weights in matrices.items():
            before, after = out.shape[:axis], out.shape[axis + 1 :]
            cells = out.reshape(math.prod(before), out.shape[axis], math.prod(after))
            wide = weights.to(out).expand(len(cells), -1, -1)
            out = torch.bmm(wide, cells).reshape(*before, len(weights), *after)
    return out.to(table.dtype)


def _count(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float64, device="cpu")


def _times(sizes: Sequence[int]) -> str:
    return " × ".join(str(size) for size in sizes)
