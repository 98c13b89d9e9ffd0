"""Which rows of a table a token reads: that of its cell, or a mean of those around its place."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from mmpos.coordinates import Coordinates, Extent
from mmpos.positions import check

_HAIR = 1e-6  # cells: further apart than rounding puts them, nearer than anybody means


def cells(
    positions: Num[Tensor, "*batch length axes"], grid: Sequence[int]
) -> tuple[Int[Tensor, "*batch length axes"], Bool[Tensor, "*batch length axes"]]:
    """The cell of each coordinate, and whether it is one: whole, and on the grid.

    A coordinate that a token lacks is read as 0.
    """
    check(positions, len(grid))
    known = torch.where(positions.isnan(), 0, positions)
    cell = known.long()
    sizes = torch.tensor(grid, device=cell.device)
    return cell, (cell >= 0) & (cell < sizes) & (cell == known)


def places(
    positions: Num[Tensor, "*batch length axes"],
    grid: Sequence[int],
    reading: Coordinates,
    extent: Extent | None,
    training: bool,
) -> tuple[Float[Tensor, "*batch length axes"], Bool[Tensor, "*batch length axes"]]:
    """Where coordinates lie among the rows of a table, and whether within half a cell of one.

    Row ``r`` stands at the coordinate that ``reading`` gives to cell ``r`` of the table's own grid,
    so all readings that are straight lines are understood. Whether a token is on the table is asked
    before the disturbances of training. A coordinate that a token lacks is read as row 0.
    """

    def read(at: Tensor, size: Extent | None, training: bool = False) -> Tensor:
        return reading(at, axes=tuple(grid), extent=size, training=training)

    first, second = read(
        torch.tensor([[0] * len(grid), [1] * len(grid)], device=positions.device), tuple(grid)
    )
    place = (read(positions, extent) - first) / (second - first)
    sizes = torch.tensor(grid, dtype=place.dtype, device=place.device)
    missing = positions.isnan()
    inside = missing | ((place >= -0.5 - _HAIR) & (place <= sizes - 0.5 + _HAIR))
    if training:
        place = (read(positions, extent, training=True) - first) / (second - first)
    return torch.where(missing, 0.0, place), inside


def gather(
    table: Float[Tensor, "*grid dim"], cell: Int[Tensor, "*batch length axes"]
) -> Float[Tensor, "*batch length dim"]:
    """The row of each cell, in float32 or better."""
    index = cell[..., 0]
    for axis, size in enumerate(table.shape[1:-1], start=1):
        index = index * size + cell[..., axis]
    return table.flatten(0, -2)[index].to(torch.promote_types(table.dtype, torch.float32))


def interpolate(
    table: Float[Tensor, "*grid dim"], place: Float[Tensor, "*batch length axes"]
) -> Float[Tensor, "*batch length dim"]:
    """The multilinear mean of the rows around each place; beyond the outermost rows, these.

    At a row it is that row, bit for bit.
    """
    last = torch.tensor(table.shape[:-1], dtype=place.dtype, device=place.device) - 1
    place = place.clamp(torch.zeros_like(last), last)
    near = (place.round() - place).detach()
    place = torch.where(near.abs() < _HAIR, place + near, place)
    low = place.detach().floor()
    above = place - low
    ends = low.long(), torch.minimum(low + 1, last).long()
    parts = []
    for corner in itertools.product((0, 1), repeat=table.ndim - 1):
        shares = [
            above[..., axis] if end else 1 - above[..., axis] for axis, end in enumerate(corner)
        ]
        share = functools.reduce(operator.mul, shares).unsqueeze(-1)
        cell = torch.stack([ends[end][..., axis] for axis, end in enumerate(corner)], dim=-1)
        rows = gather(table, cell)
        parts.append(share.to(rows.dtype) * rows)
    return sum(parts[1:], parts[0])
