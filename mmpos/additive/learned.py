from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.additive.table import TableEncoding
from mmpos.coordinates import Coordinates, Extent
from mmpos.resample import Resampling

MOST = 2**28
"""Numbers of a table, a GiB: beyond it somebody means a table for each axis."""


class LearnedEncoding(TableEncoding):
    """A learned row for each cell of a grid, and for prefix tokens if wanted.

    A token at an integer position gets the row of that cell; the ``k``-th token without a place
    gets the ``k``-th prefix row, and nothing when there are fewer (ViT, arXiv:2010.11929, sec. 3.1,
    with one prefix row for the class token). The table keeps its grid in its own shape; weights of
    another grid are resized as they are loaded, by ``resampling``, and a line of the log says so.

    With ``coordinates`` the table is read between its rows as well: a token gets the multilinear
    mean of the rows around its place. ``Scaled(offset=0.5)`` reads any other grid as
    `torch.nn.functional.interpolate` does (``bilinear``, ``align_corners=False``), ragged batches
    and crops included; ``Index()`` reads fractional positions in the table's own cells. On its own
    grid a table has its rows, bit for bit, either way.

    Args:
        dim: features of a token.
        axes: the grid, a size for each axis; ``(length,)`` for a sequence.
        prefix_rows: rows for class and register tokens.
        std: standard deviation of the initial rows.
        resampling: how the table goes to another grid.
        dynamic: whether an input on another grid is given a resized copy of the table, formed at
            each call and differentiable, instead of being refused.
        coordinates: a reading for fractional positions and other grids; None for cells only. Row
            ``r`` stands where the reading puts cell ``r`` of the table's own grid, so `Centered`
            and any offset, reference or unit are understood. Disturbances of training may take a
            token beyond the outermost rows: it gets these.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``. Parameters: ``table [*grid, dim]`` and
    ``prefix [prefix_rows, dim]``.
    Raises: TypeError without a grid; ValueError for more than 2²⁸ numbers, or ``dynamic`` with
    ``coordinates``; in the call if ``extent`` is another grid and no such reading is there (the
    table must be resized, not read past its end or in a corner), or a position is no cell of it,
    or, with ``coordinates``, lies more than half a cell beyond its outermost rows (nearer, it gets
    the outermost row). Compiled, or away from the CPU, where looking would cost a wait, such a
    position gets a row of NaN.

    >>> table = LearnedEncoding(8, (2, 3), prefix_rows=1)
    >>> tuple(table.table.shape), tuple(table.prefix.shape)
    ((2, 3, 8), (1, 8))
    >>> line = LearnedEncoding(1, (3,), coordinates=mmpos.coordinates.Index())
    >>> line.table.data = torch.tensor([[0.0], [10.0], [30.0]])
    >>> line(torch.tensor([[1.0], [1.25], [2.5]])).flatten().tolist()
    [10.0, 15.0, 30.0]
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
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(
            dim, axes, std=std, resampling=resampling, dynamic=dynamic, coordinates=coordinates
        )
        if prefix_rows < 0:
            raise ValueError(f"prefix_rows must be 0 or more, got {prefix_rows}")
        if math.prod(axes) * dim > MOST:
            raise ValueError(
                f"a table of {' × '.join(map(str, axes))} with {dim} features has "
                f"{math.prod(axes) * dim:,} numbers, expected {MOST:,} at most: FactorizedEncoding "
                "has a table for each axis"
            )
        self.prefix_rows = prefix_rows
        self.table = nn.Parameter(torch.empty(*axes, dim))
        self.prefix = nn.Parameter(torch.empty(prefix_rows, dim)) if prefix_rows else None
        self.reset_parameters()

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        return {"table": self.table}

    def reset_parameters(self) -> None:
        """Draw the rows anew from a normal distribution truncated at two standard deviations."""
        for rows in self.parameters():
            nn.init.trunc_normal_(rows, std=self.std, a=-2 * self.std, b=2 * self.std)

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        (table,), grid, place, inside = self._read(positions, extent)
        missing = positions.isnan()
        placed = ~missing.all(-1)
        readable = inside.all(-1) & ~(missing.any(-1) & placed)
        self._check_partial(positions, missing, placed, grid)
        self._check_places(positions, readable, grid)
        place = torch.where(readable.unsqueeze(-1), place, 0)
        rows = torch.where(readable.unsqueeze(-1), self._rows(table, place), torch.nan)
        rows = torch.where(placed.unsqueeze(-1), rows, 0.0)
        if self.prefix is None:
            return rows
        order = (~placed).long().cumsum(-1) - 1
        has_row = ~placed & (order < len(self.prefix))
        own = self.prefix[order.clamp(0, len(self.prefix) - 1)]
        return torch.where(has_row.unsqueeze(-1), own, rows)

    def _check_partial(
        self, positions: Tensor, missing: Tensor, placed: Tensor, grid: tuple[int, ...]
    ) -> None:
        """Raise for a token that lacks one of several axes; on the CPU: looking is free."""
        if positions.device.type != "cpu" or torch.compiler.is_compiling():
            return
        partial = missing.any(-1) & placed
        if partial.any():
            raise ValueError(
                f"position {tuple(positions[partial][0].tolist())} lacks an axis, and a table of "
                f"the grid {' × '.join(map(str, grid))} has rows for places given on all axes: "
                "FactorizedEncoding reads those that a token has"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, prefix_rows={self.prefix_rows}"
