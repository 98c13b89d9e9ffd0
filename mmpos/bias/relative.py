from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.bias.table import TableBias, ended, whole
from mmpos.resample import Resampling, grid_table

_log = logging.getLogger(__name__)


class RelativePositionBias(TableBias):
    """A learned number for each offset within a grid: ``table[query - key + keys - 1]``.

    Source: Swin (arXiv:2103.14030, sec. 3.2) for windows, Video Swin (arXiv:2106.13230, sec. 3.2)
    for three axes. With ``prefix_rows`` there are three more numbers, as in BEiT's code
    (arXiv:2106.08254): for a query without a place and a key with one, for the reverse, and for two
    tokens without. Otherwise a token without a place has bias 0 to and from every other. On an axis
    that one of the two tokens lacks the offset is 0.

    The table keeps its grid in its own shape; weights of another grid are resized as they are
    loaded, by ``resampling``, and a line of the log says so.

    Args:
        heads: attention heads.
        axes: the grid or window, a size for each axis; ``(length,)`` for a sequence.
        key_grid: the grid of keys, if it is another than that of queries.
        prefix_rows: whether pairs with class and register tokens have numbers of their own.
        std: standard deviation of the initial numbers.
        resampling: how the table goes to another grid; with ``Resampling(fit="center")`` a smaller
            grid keeps the numbers of its own offsets.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters:
    ``table [queries + keys - 1, …, H]``, a size for each axis, and ``prefix [3, H]``.
    Raises: TypeError without a grid; ValueError for a ``key_grid`` of other axes, a ``fit`` that
    these tables have no use for; in the call for a pair whose offset is not in the table. Compiled,
    or away from the CPU, where looking would cost a wait, such a pair gets NaN.

    >>> bias = RelativePositionBias(3, (4, 6), prefix_rows=True)
    >>> tuple(bias.table.shape), tuple(bias.prefix.shape)
    ((7, 11, 3), (3, 3))
    """

    def __init__(
        self,
        heads: int,
        axes: Sequence[int],
        *,
        key_grid: Sequence[int] | None = None,
        prefix_rows: bool = False,
        std: float = 0.02,
        resampling: Resampling | None = None,
    ) -> None:
        if isinstance(axes, int):
            raise TypeError(
                f"a table of offsets needs its grid, a size for each axis such as (7, 7) or "
                f"({axes},), got {axes}"
            )
        super().__init__(heads, tuple(axes))
        self.key_grid = self._checked(key_grid)
        self.prefix_rows = prefix_rows
        self.std = std
        self.resampling = resampling or Resampling()
        fits = self.resampling.fit
        for fit in (fits,) if isinstance(fits, str) else fits:
            if fit not in ("resize", "center") or (fit == "center" and self.key_grid):
                raise ValueError(
                    "fit must be resize for a table of offsets, or center where queries and keys "
                    f"have one grid, so that offset 0 is in the middle, got {fit!r}"
                )
        rows = math.prod(self._sizes())
        if rows * heads > 2**28:
            raise ValueError(
                f"a table of offsets in {' × '.join(map(str, axes))} has {rows * heads:,} numbers, "
                f"expected {2**28:,} at most: T5Bias has a table for each axis"
            )
        self.table = nn.Parameter(torch.empty(*self._sizes(), heads))
        self.prefix = nn.Parameter(torch.empty(3, heads)) if prefix_rows else None
        self.reset_parameters()

    def _checked(self, key_grid: Sequence[int] | None) -> tuple[int, ...] | None:
        if key_grid is not None and (len(key_grid) != len(self.grid) or min(key_grid) < 1):
            raise ValueError(
                f"key_grid must have {len(self.grid)} sizes of 1 or more, as the grid of queries "
                f"{self.grid}, got {tuple(key_grid)}"
            )
        return None if key_grid is None else tuple(key_grid)

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid that queries are on."""
        assert not isinstance(self.axes, int)
        return tuple(self.axes)

    def _sizes(self) -> list[int]:
        """How many offsets each axis has."""
        keys = self.key_grid or self.grid
        return [own + other - 1 for own, other in zip(self.grid, keys, strict=True)]

    def reset_parameters(self) -> None:
        """Draw the numbers anew from a normal distribution truncated at two deviations."""
        for rows in self.parameters():
            nn.init.trunc_normal_(rows, std=self.std, a=-2 * self.std, b=2 * self.std)

    def resize(self, grid: Sequence[int], key_grid: Sequence[int] | None = None) -> None:
        """Take the table to another grid in place: the parameter stays the same object.

        An optimizer that has stepped holds moments of the old shape and must be made anew.
        Raises: ValueError for another number of axes, or if only one of queries and keys is given
        while they have two grids.
        """
        if self.key_grid is not None and key_grid is None:
            raise ValueError("queries and keys have two grids: pass key_grid too")
        if len(grid) != len(self.grid):
            raise ValueError(f"the table is for a grid of {len(self.grid)} axes, got {tuple(grid)}")
        self.axes = tuple(grid)
        self.key_grid = self._checked(key_grid)
        self.table.data = grid_table(self.table.data, self._sizes(), self.resampling)

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        """The table by its name."""
        return {"table": self.table}

    def fits(self, stored: Tensor, name: str = "table") -> bool:
        """Whether ``stored`` is a table for as many axes and heads, on whatever grid."""
        return stored.ndim == self.tables[name].ndim and stored.shape[-1] == self.heads

    def resized(self, stored: Tensor, name: str = "table", how: Resampling | None = None) -> Tensor:
        """``stored``, a table that `fits`, for this grid, by ``how`` or this `resampling`."""
        return grid_table(stored, self.tables[name].shape[:-1], how or self.resampling)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: Any, **named: Any
    ) -> None:
        stored = state_dict.get(f"{prefix}table")
        if stored is not None and self.fits(stored) and stored.shape != self.table.shape:
            sizes = self._sizes()
            state_dict[f"{prefix}table"] = self.resized(stored)
            _log.warning(
                "%stable: resized from %s offsets to %s, for the grid %s (%s)",
                prefix,
                _times(stored.shape[:-1]),
                _times(sizes),
                _times(self.grid),
                self.resampling,
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def rows(self) -> Tensor:
        rows = self.table.flatten(0, -2)
        return ended(rows if self.prefix is None else torch.cat((rows, self.prefix)))

    def read(self, query: Sequence[Tensor], key: Sequence[Tensor], last: int) -> list[Tensor]:
        index, seen, fits = None, None, None
        keys = self.key_grid or self.grid
        for q, k, own, size in zip(query, key, keys, self._sizes(), strict=True):
            offset, known, exact = whole(q - k)
            cell = offset + (own - 1)
            exact = exact & (cell >= 0) & (cell < size)
            index = cell if index is None else index * size + cell
            seen = known if seen is None else seen | known
            fits = exact if fits is None else fits & exact
        assert index is not None and seen is not None and fits is not None
        found = torch.where(fits, torch.where(seen, index, last - 1), last)
        if self.prefix is None:
            return [found]
        placed, other = (_placed(coordinates) for coordinates in (query, key))
        first = last - 4
        alone = torch.where(placed, first + 1, torch.where(other, first, first + 2))
        return [torch.where(placed & other, found, alone)]

    def alone(self, columns: Tensor) -> Tensor:
        return super().alone(columns) if self.prefix is None else self.prefix.float().t()

    def refuse(self, offset: Sequence[float]) -> None:
        grids = _times(self.grid)
        if self.key_grid is not None:
            grids += f" for queries and {_times(self.key_grid)} for keys"
        raise ValueError(
            f"a query and a key are {tuple(offset)} apart, and the table has rows for the "
            f"differences of whole positions on the grid {grids} only: resize the table, or make "
            "the model for a larger grid"
        )

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}, grid={self.grid}"]
        parts += [f"key_grid={self.key_grid}"] if self.key_grid else []
        return ", ".join([*parts, f"prefix_rows={self.prefix_rows}"])


def _placed(coordinates: Sequence[Tensor]) -> Tensor:
    """Whether a token has a place: a coordinate on any axis."""
    placed = ~coordinates[0].isnan()
    for axis in coordinates[1:]:
        placed = placed | ~axis.isnan()
    return placed


def _times(sizes: Sequence[int]) -> str:
    return " × ".join(str(size) for size in sizes)
