from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.additive.base import AdditiveEncoding
from mmpos.coordinates import Extent
from mmpos.positions import check
from mmpos.resample import Resampling, grid_table

_log = logging.getLogger(__name__)


class LearnedEncoding(AdditiveEncoding):
    """A learned row for each cell of a grid, and for prefix tokens if wanted.

    A token at an integer position gets the row of that cell; the ``k``-th token without a place
    gets the ``k``-th prefix row, and nothing when there are fewer (ViT, arXiv:2010.11929, sec. 3.1,
    with one prefix row for the class token). The table keeps its grid in its own shape; weights of
    another grid are resized as they are loaded, by ``resampling``, and a line of the log says so.

    Args:
        dim: features of a token.
        axes: the grid, a size for each axis; ``(length,)`` for a sequence.
        prefix_rows: rows for class and register tokens.
        std: standard deviation of the initial rows.
        resampling: how the table goes to another grid.
        dynamic: whether an input on another grid is given a resized copy of the table, formed at
            each call and differentiable, instead of being refused.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``. Parameters: ``table [*grid, dim]`` and
    ``prefix [prefix_rows, dim]``.
    Raises: TypeError without a grid; ValueError if ``extent`` is another grid (the table must be
    resized, not read past its end or in a corner), or a position is no cell of it. Compiled, or
    away from the CPU, where looking would cost a wait, such a position gets a row of NaN.

    >>> table = LearnedEncoding(8, (2, 3), prefix_rows=1)
    >>> tuple(table.table.shape), tuple(table.prefix.shape)
    ((2, 3, 8), (1, 8))
    """

    def __init__(
        self,
        dim: int,
        axes: Sequence[int],
        *,
        prefix_rows: int = 0,
        std: float = 0.02,
        resampling: Resampling | None = None,
        dynamic: bool = False,
    ) -> None:
        if isinstance(axes, int):
            raise TypeError(
                f"a table needs its grid, a size for each axis such as (14, 14) or ({axes},), "
                f"got {axes}"
            )
        super().__init__(dim, tuple(axes))
        if prefix_rows < 0:
            raise ValueError(f"prefix_rows must be 0 or more, got {prefix_rows}")
        self.std = std
        self.resampling = resampling or Resampling()
        self.dynamic = dynamic
        self.table = nn.Parameter(torch.empty(*axes, dim))
        self.prefix = nn.Parameter(torch.empty(prefix_rows, dim)) if prefix_rows else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the rows anew from a normal distribution truncated at two standard deviations."""
        nn.init.trunc_normal_(self.table, std=self.std, a=-2 * self.std, b=2 * self.std)
        if self.prefix is not None:
            nn.init.trunc_normal_(self.prefix, std=self.std, a=-2 * self.std, b=2 * self.std)

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid that the table was made for."""
        return tuple(self.table.shape[:-1])

    def resize(self, grid: Sequence[int]) -> None:
        """Take the table to another grid in place: the parameter stays the same object.

        An optimizer that has stepped holds moments of the old shape and must be made anew.
        """
        self.table.data = grid_table(self.table.data, grid, self.resampling)
        self.axes = self.grid

    def fits(self, table: Tensor) -> bool:
        """Whether ``table`` is one of this width and number of axes, on whatever grid.

        One of ``[1, N, D]`` for a grid of more rows is not: published flat tables look so, and have
        their prefix rows among the others (see `mmpos.resample.flat_table`).
        """
        if table.ndim != self.table.ndim or table.shape[-1] != self.dim:
            return False
        return len(self.grid) == 1 or table.shape[0] > 1 or self.grid[0] == 1

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: Any, **named: Any
    ) -> None:
        stored = state_dict.get(f"{prefix}table")
        if stored is not None and self.fits(stored) and stored.shape != self.table.shape:
            state_dict[f"{prefix}table"] = grid_table(stored, self.grid, self.resampling)
            _log.warning(
                "%stable: resized from the grid %s to %s (%s)",
                prefix,
                _times(stored.shape[:-1]),
                _times(self.grid),
                self.resampling,
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        table, grid = self.table, self.grid
        check(positions, len(grid))
        if self.dynamic and extent is not None and not isinstance(extent, Tensor):
            grid = tuple(extent)
            table = grid_table(table, grid, self.resampling)
        elif extent is not None:
            _check_extent(extent, grid)
        missing = positions.isnan()
        placed = ~missing.all(-1)
        known = torch.where(missing, 0, positions)
        cell = known.long()
        inside = (cell >= 0) & (cell < torch.tensor(grid, device=cell.device)) & (cell == known)
        readable = inside.all(-1) & ~(missing.any(-1) & placed)
        _check_cells(positions, readable, grid)
        cell = torch.where(readable.unsqueeze(-1), cell, 0)
        index = cell[..., 0]
        for axis, size in enumerate(grid[1:], start=1):
            index = index * size + cell[..., axis]
        rows = torch.where(readable.unsqueeze(-1), table.flatten(0, -2)[index], torch.nan)
        rows = torch.where(placed.unsqueeze(-1), rows, 0.0)
        if self.prefix is None:
            return rows
        order = (~placed).long().cumsum(-1) - 1
        has_row = ~placed & (order < len(self.prefix))
        own = self.prefix[order.clamp(0, len(self.prefix) - 1)]
        return torch.where(has_row.unsqueeze(-1), own, rows)

    def extra_repr(self) -> str:
        rows = 0 if self.prefix is None else len(self.prefix)
        return f"dim={self.dim}, grid={self.grid}, prefix_rows={rows}"


def _check_extent(extent: Extent, grid: tuple[int, ...]) -> None:
    if isinstance(extent, Tensor):
        if extent.device.type != "cpu" or torch.compiler.is_compiling():
            return
        rows = [tuple(row) for row in extent.reshape(-1, extent.shape[-1]).tolist()]
    else:
        rows = [tuple(extent)]
    for row in rows:
        if row != grid:
            raise ValueError(
                f"the table was made for a grid of {_times(grid)}, the input has {_times(row)}: "
                "resize the table, make the model for that grid, or pass dynamic=True"
            )


def _check_cells(positions: Tensor, readable: Tensor, grid: tuple[int, ...]) -> None:
    """Raise for positions that are not cells of ``grid``; on the CPU only: looking is free."""
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or readable.all():
        return
    bad = tuple(positions[~readable][0].tolist())
    raise ValueError(
        f"position {bad} is no cell of the table: it has a row for each whole position of the grid "
        f"{_times(grid)}, from 0 on, given on all axes"
    )


def _times(sizes: Extent) -> str:
    return " × ".join(str(int(size)) for size in sizes)
