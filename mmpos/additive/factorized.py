from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.additive.table import TableEncoding
from mmpos.coordinates import Coordinates, Extent
from mmpos.resample import Resampling

Combine = Literal["sum", "concat", "product"]


class FactorizedEncoding(TableEncoding):
    """A learned table for each axis, of a row for each of its coordinates.

    The rows of a token's coordinates are summed, or stand side by side, or are multiplied (NaViT,
    arXiv:2307.06304, sec. 2.1 and 3.4, which finds the sum best). So a grid of ``H × W`` needs
    ``H + W`` rows, and every row is trained by all tokens that share its coordinate. Side by side
    they also stand in DETR's learned table (arXiv:2005.12872; its columns come first) and in the
    axial one of Reformer (arXiv:2001.04451). A coordinate that a token lacks contributes nothing:
    zeros, or a factor of 1 to a product. A token without a place gets zeros.

    Args:
        dim: features of a token.
        axes: the grid, a size for each axis.
        combine: ``sum``, ``concat`` or ``product``.
        split: features of each axis, for ``concat``; evenly by default, what is left over to the
            first axis. The others have ``dim`` on every axis.
        std: standard deviation of the initial rows; those of a product of ``A`` axes are drawn with
            ``std ** (1 / A)``, so that it is that of the product.
        resampling: how tables go to another grid, each along its own axis.
        dynamic: whether an input on another grid is given resized copies of the tables, formed at
            each call and differentiable, instead of being refused.
        coordinates: a reading for fractional positions and other grids (NaViT's fractional
            embeddings), None for whole positions only; see `LearnedEncoding`.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``. Parameters: ``table[a] [size, dim_a]``.
    Raises: TypeError without a grid; ValueError for an unknown way to combine, or a split that does
    not fit; in the call, and for ``extent``, as `LearnedEncoding`, axis by axis.

    >>> encoding = FactorizedEncoding(6, (2, 3), combine="concat")
    >>> [tuple(table.shape) for table in encoding.table]
    [(2, 3), (3, 3)]
    """

    def __init__(
        self,
        dim: int,
        axes: Sequence[int],
        *,
        combine: Combine = "sum",
        split: Sequence[int] | None = None,
        std: float = 0.02,
        resampling: Resampling | None = None,
        dynamic: bool = False,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(
            dim, axes, std=std, resampling=resampling, dynamic=dynamic, coordinates=coordinates
        )
        if combine not in get_args(Combine):
            raise ValueError(f"combine must be one of {get_args(Combine)}, got {combine!r}")
        self.combine: Combine = combine
        self.split = None if split is None else tuple(split)
        widths = self._widths(len(axes))
        own = std ** (1 / len(widths)) if combine == "product" else std
        self.table = _Tables(
            [torch.empty(size, width) for size, width in zip(axes, widths, strict=True)], own
        )
        self.reset_parameters()

    def _widths(self, axes: int) -> tuple[int, ...]:
        """Features of each axis."""
        if self.combine != "concat":
            if self.split is not None:
                raise ValueError(
                    f"split={self.split} divides features among axes, and a {self.combine} gives "
                    f"all {self.dim} to each: drop it, or use combine='concat'"
                )
            return (self.dim,) * axes
        if self.split is None:
            share, rest = divmod(self.dim, axes)
            if share < 1:
                raise ValueError(f"dim={self.dim} cannot be divided among {axes} axes: use more")
            return (share + rest, *[share] * (axes - 1))
        if len(self.split) != axes or min(self.split) < 1 or sum(self.split) != self.dim:
            raise ValueError(
                f"split={self.split} must give each of the {axes} axes 1 feature or more, "
                f"{self.dim} in all"
            )
        return self.split

    @property
    def tables(self) -> dict[str, nn.Parameter]:
        return {f"table.{axis}": table for axis, table in enumerate(self.table)}

    def reset_parameters(self) -> None:
        """Draw the rows anew from a normal distribution truncated at two standard deviations."""
        self.table.reset_parameters()

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        tables, grid, place, inside = self._read(positions, extent)
        self._check_places(positions, inside.all(-1), grid)
        missing = positions.isnan()
        blank = 1.0 if self.combine == "product" else 0.0
        parts = []
        for axis, table in enumerate(tables):
            here, has = inside[..., axis, None], ~missing[..., axis, None]
            rows = self._rows(table, torch.where(here, place[..., axis, None], 0))
            parts.append(torch.where(has, torch.where(here, rows, torch.nan), blank))
        if self.combine == "concat":
            return torch.cat(parts, dim=-1)
        if self.combine == "sum":
            return sum(parts[1:], parts[0])
        product = functools.reduce(operator.mul, parts)
        return torch.where(missing.all(-1, keepdim=True), 0.0, product)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, combine={self.combine}"


class _Tables(nn.ParameterList):
    """Tables that draw their rows themselves, as each owner of parameters does."""

    def __init__(self, tables: Sequence[Tensor] = (), std: float = 0.02) -> None:
        super().__init__(tables)
        self.std = std

    def reset_parameters(self) -> None:
        for table in self:
            nn.init.trunc_normal_(table, std=self.std, a=-2 * self.std, b=2 * self.std)
