from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.additive.base import AdditiveEncoding
from mmpos.additive.rows import cells, gather, interpolate, places
from mmpos.coordinates import Coordinates, Extent, Index, OneBased, reading
from mmpos.resample import Resampling, grid_table
from mmpos.spec import Spec

_log = logging.getLogger(__name__)


class TableEncoding(AdditiveEncoding):
    """Learned rows for the cells of a grid, which can go to another grid.

    The tables keep their grid in their own shape. Weights of another grid are resized as they are
    loaded, by ``resampling``, and a line of the log says so. Inputs on another grid are refused,
    unless the encoding is ``dynamic`` or reads between its rows, by ``coordinates``.

    Args:
        dim: features of a token.
        axes: the grid, a size for each axis; ``(length,)`` for a sequence.
        std: standard deviation of the initial rows.
        resampling: how tables go to another grid.
        dynamic: whether an input on another grid is given resized copies of the tables, formed at
            each call and differentiable, instead of being refused.
        coordinates: a reading, with which tables are read between their rows: a token gets the
            multilinear mean of the rows around its place. Row ``r`` stands where the reading puts
            cell ``r`` of the tables' own grid, so that grid has its rows as they are. By default
            (None) tables are read at whole positions only.

    Raises: TypeError without a grid; ValueError for ``dynamic`` with ``coordinates``, which are two
    ways to the same end.
    """

    def __init__(
        self,
        dim: int,
        axes: Sequence[int],
        *,
        std: float = 0.02,
        resampling: Resampling | None = None,
        dynamic: bool = False,
        coordinates: Coordinates | None = None,
    ) -> None:
        if isinstance(axes, int):
            raise TypeError(
                f"a table needs its grid, a size for each axis such as (14, 14) or ({axes},), "
                f"got {axes}"
            )
        super().__init__(dim, tuple(axes))
        if std <= 0:
            raise ValueError(f"std must be above 0, got {std}")
        if dynamic and coordinates is not None:
            raise ValueError(
                "dynamic=True resizes the table to the grid at hand, coordinates read the table "
                "between its rows instead: use one of them"
            )
        self.std = std
        self.resampling = resampling or Resampling()
        self.dynamic = dynamic
        self.coordinates = None if coordinates is None else reading(coordinates)

    @property
    @abstractmethod
    def tables(self) -> dict[str, nn.Parameter]:
        """The tables ``[*grid, features]`` by their names, for all axes or one for each."""

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid that the tables were made for."""
        return tuple(size for table in self.tables.values() for size in table.shape[:-1])

    @property
    def any_grid(self) -> bool:
        """Whether an input on another grid than the tables' own is understood."""
        return self.dynamic or not isinstance(self.coordinates, Index | OneBased | None)

    def spec(self) -> Spec:
        spec = super().spec()
        if self.coordinates is not None:  # Index() is another thing than None here
            spec["init_args"]["coordinates"] = self.coordinates.spec()
        return spec

    def resize(self, grid: Sequence[int]) -> None:
        """Take the tables to another grid in place: the parameters stay the same objects.

        ``grid`` is a size for each axis, ``(1024,)`` for a sequence; ``resampling`` says what the
        new rows are. An optimizer that has stepped holds moments of the old shape and must be made
        anew.
        """
        for name, table in self._on(grid).items():
            self.tables[name].data = table.detach()
        self.axes = self.grid

    def fits(self, stored: Tensor, name: str = "table") -> bool:
        """Whether ``stored`` is a table like that called ``name``, on whatever grid.

        One of ``[1, N, D]`` for a grid of more rows is not: published flat tables look so, and have
        their prefix rows among the others (see `mmpos.resample.flat_table`).
        """
        own = self.tables[name]
        if stored.ndim != own.ndim or stored.shape[-1] != own.shape[-1]:
            return False
        return stored.ndim == 2 or stored.shape[0] > 1 or own.shape[0] == 1

    def resized(self, stored: Tensor, name: str = "table", how: Resampling | None = None) -> Tensor:
        """``stored``, a table that `fits`, on the grid of that called ``name``.

        It goes by ``how``, or as this encoding's `resampling` has it.
        """
        return self._taken(stored, name, self.grid, how or self.resampling)

    def _taken(self, stored: Tensor, name: str, grid: Sequence[int], how: Resampling) -> Tensor:
        names = list(self.tables)
        before = sum(self.tables[other].ndim - 1 for other in names[: names.index(name)])
        own = slice(before, before + stored.ndim - 1)  # the axes of this table
        if not isinstance(how.fit, str):
            how = replace(how, fit=tuple(how.fit[own]))
        return grid_table(stored, grid[own], how)

    def _on(self, grid: Sequence[int]) -> dict[str, Tensor]:
        """The tables, resized to ``grid``."""
        if isinstance(grid, int):
            raise TypeError(f"a grid is a size for each axis, ({grid},) for a sequence, got {grid}")
        if len(grid) != len(self.grid):
            raise ValueError(
                f"a grid of {_times(self.grid)} cannot become one of {_times(grid)}: other axes"
            )
        return {
            name: self._taken(table, name, grid, self.resampling)
            for name, table in self.tables.items()
        }

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: Any, **named: Any
    ) -> None:
        for name, table in self.tables.items():
            stored = state_dict.get(prefix + name)
            if stored is not None and self.fits(stored, name) and stored.shape != table.shape:
                state_dict[prefix + name] = self.resized(stored, name)
                _log.warning(
                    "%s: resized from the grid %s to %s (%s)",
                    prefix + name,
                    _times(stored.shape[:-1]),
                    _times(table.shape[:-1]),
                    self.resampling,
                )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def _read(
        self, positions: Tensor, extent: Extent | None
    ) -> tuple[list[Tensor], tuple[int, ...], Tensor, Tensor]:
        """The tables, their grid, and for each coordinate its place and whether there is one."""
        grid = self.grid
        tables: list[Tensor] = list(self.tables.values())
        if self.dynamic and extent is not None and not isinstance(extent, Tensor):
            grid = tuple(extent)
            tables = list(self._on(grid).values())
        elif extent is not None and not self.any_grid:
            _check_extent(extent, grid)
        if self.coordinates is None:
            return tables, grid, *cells(positions, grid)
        return tables, grid, *places(positions, grid, self.coordinates, extent, self.training)

    def _rows(self, table: Tensor, place: Tensor) -> Tensor:
        return gather(table, place) if self.coordinates is None else interpolate(table, place)

    def _check_places(
        self, positions: Tensor, readable: Tensor, grid: tuple[int, ...], also: str = ""
    ) -> None:
        """Raise for positions that the tables have nothing for; on the CPU: looking is free."""
        if positions.device.type != "cpu" or torch.compiler.is_compiling() or readable.all():
            return
        bad = tuple(positions.expand(*readable.shape, -1)[~readable][0].tolist())
        if self.coordinates is not None:
            raise ValueError(
                f"position {bad} lies beyond the table: {type(self.coordinates).__name__} "
                f"coordinates are read up to half a cell outside the centres of the outermost "
                f"cells of its grid {_times(grid)}{also}"
            )
        raise ValueError(
            f"position {bad} is no cell of the table: it has a row for each whole position of the "
            f"grid {_times(grid)}, from 0 on{also}; resize the table, or give it coordinates, by "
            "which it is read between its rows"
        )

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, grid={self.grid}"]
        if self.coordinates is not None:
            parts += [f"coordinates={type(self.coordinates).__name__}"]
        return ", ".join(parts)


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
                "resize the table, make the model for that grid, or pass dynamic=True or "
                "coordinates=Scaled(offset=0.5)"
            )


def _times(sizes: Sequence[float]) -> str:
    return " × ".join(f"{size:.9g}" for size in sizes)
