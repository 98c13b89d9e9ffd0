from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmpos.bias.table import TableBias, ended, whole
from mmpos.positions import Axes, axis_count


class ClippedRelativeBias(TableBias):
    """A learned number for each offset up to a distance: ``table[clip(key - query, -K, K)]``.

    Source: the clipping of relative positions of Shaw et al. (arXiv:1803.02155, sec. 3.2), with a
    number for each head in place of a vector. Several axes have a number for each combination of
    their offsets. A token without a place has bias 0 to and from every other; on an axis that one
    of the two tokens lacks the offset is 0.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts).
        distance: the distance ``K`` from which on all offsets are one: for all axes, or for each.
        std: standard deviation of the initial numbers.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters:
    ``table [2 K + 1, …, H]``, an axis of sizes for each axis of positions.
    Raises: ValueError for a distance below 1 or another number of them than axes; in the call for
    offsets that are not whole. Compiled, or away from the CPU, where looking would cost a wait,
    these give NaN.

    >>> bias = ClippedRelativeBias(4, axes=2, distance=(8, 16))
    >>> tuple(bias.table.shape)
    (17, 33, 4)
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        distance: int | Sequence[int] = 16,
        std: float = 0.02,
    ) -> None:
        super().__init__(heads, axes)
        self.distance = distance if isinstance(distance, int) else tuple(distance)
        self.std = std
        count = axis_count(axes)
        self.reach = (distance,) * count if isinstance(distance, int) else tuple(distance)
        if len(self.reach) != count or min(self.reach) < 1:
            raise ValueError(
                f"distance must be 1 or more, one for all or for each of {count} axes, "
                f"got {distance}"
            )
        self.table = nn.Parameter(torch.empty(*(2 * reach + 1 for reach in self.reach), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the numbers anew from a normal distribution truncated at two deviations."""
        nn.init.trunc_normal_(self.table, std=self.std, a=-2 * self.std, b=2 * self.std)

    def rows(self) -> Tensor:
        return ended(self.table.flatten(0, -2))

    def read(self, query: Sequence[Tensor], key: Sequence[Tensor], last: int) -> list[Tensor]:
        index, seen, fits = None, None, None
        for q, k, reach in zip(query, key, self.reach, strict=True):
            offset, own, exact = whole(k - q)
            cell = offset.clamp(-reach, reach) + reach
            index = cell if index is None else index * (2 * reach + 1) + cell
            seen = own if seen is None else seen | own
            fits = exact if fits is None else fits & exact
        assert index is not None and seen is not None and fits is not None
        return [torch.where(fits, torch.where(seen, index, last - 1), last)]

    def refuse(self, offset: Sequence[float]) -> None:
        raise ValueError(
            f"a query and a key are {tuple(offset)} apart, and the table has rows for the "
            "differences of whole positions only"
        )

    def extra_repr(self) -> str:
        rows = math.prod(self.table.shape[:-1])
        return f"heads={self.heads}, axes={self.axes}, distance={self.distance}, rows={rows}"
