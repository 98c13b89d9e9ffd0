from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmpos.bias.table import TableBias, ended
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes, axis_count


class T5Bias(TableBias):
    """A learned number for each bucket of offsets, ``table[bucket(key - query)]``.

    Source: T5 (arXiv:1910.10683, sec. 2.1), with the buckets of its code. Of ``n`` buckets for one
    direction the first ``e = n // 2`` hold one distance each; a distance ``d`` beyond them is in
    ``e + floor((n - e) · ln(d / e) / ln(max_distance / e))``, at most the last. Bidirectional, half
    of the buckets are for keys after the query; otherwise these share the bucket of distance 0, as
    they are hidden by a causal mask. Several axes have buckets of their own, whose numbers are
    added (LayoutLMv2, arXiv:2012.14740, sec. 2.1). T5 itself does not divide scores by
    ``head_dim ** 0.5``: pass ``scale=1`` to `mmpos.attend` with its weights.

    A fractional offset counts as the whole one next to it towards 0. A token without a place has
    bias 0 to and from every other; an axis that one of the two tokens lacks adds nothing.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        buckets: how many, for both directions together: for all axes, or for each.
        max_distance: from which on all are in the last bucket: for all axes, or for each.
        bidirectional: whether keys after the query have buckets of their own (T5's encoder).
        std: standard deviation of the initial numbers.
        coordinates: how positions are read.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. Parameters:
    ``table [buckets, H]``, the buckets of all axes one after the other.
    Raises: ValueError for an odd number of buckets in two directions, fewer than 2 for a direction,
    a ``max_distance`` that is not beyond the buckets of one distance, or another number of either
    than axes.

    >>> bias = T5Bias(12)
    >>> tuple(bias.table.shape), bias.bucket_of(0, [-200, -16, 0, 1, 64])
    ((32, 12), [15, 10, 0, 17, 30])
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        buckets: int | Sequence[int] = 32,
        max_distance: int | Sequence[int] = 128,
        bidirectional: bool = True,
        std: float = 0.02,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        self.buckets = buckets if isinstance(buckets, int) else tuple(buckets)
        self.max_distance = max_distance if isinstance(max_distance, int) else tuple(max_distance)
        self.bidirectional = bidirectional
        self.std = std
        count = axis_count(axes)
        self.sizes = _per_axis("buckets", buckets, count)
        reaches = _per_axis("max_distance", max_distance, count)
        self.starts = [
            _starts(size, reach, bidirectional)
            for size, reach in zip(self.sizes, reaches, strict=True)
        ]
        self.table = nn.Parameter(torch.empty(sum(self.sizes), heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the numbers anew from a normal distribution truncated at two deviations."""
        nn.init.trunc_normal_(self.table, std=self.std, a=-2 * self.std, b=2 * self.std)

    def bucket_of(self, axis: int, offsets: Sequence[float]) -> list[int]:
        """The buckets of offsets, key minus query, on an axis."""
        reach = self.starts[axis][-1]
        buckets = self._buckets(axis, torch.device("cpu")).tolist()
        return [buckets[reach + int(max(-reach, min(reach, offset)))] for offset in offsets]

    def _buckets(self, axis: int, device: torch.device) -> Tensor:
        """The bucket of each offset ``-reach … reach``; all beyond are in the first or last."""
        starts, reach = self.starts[axis], self.starts[axis][-1]
        bounds = torch.tensor(starts[1:], device=device)
        offsets = torch.arange(-reach, reach + 1, device=device)
        distances = offsets.abs() if self.bidirectional else -offsets.clamp(max=0)
        buckets = torch.bucketize(distances, bounds, right=True)
        return buckets + (offsets > 0) * len(starts) if self.bidirectional else buckets

    def rows(self) -> Tensor:
        """A row for each offset on each axis, so that reading needs no bucket."""
        parts = self.table.split(list(self.sizes))
        indices = [self._buckets(axis, self.table.device) for axis in range(len(parts))]
        rows = [own.index_select(0, index) for own, index in zip(parts, indices, strict=True)]
        return ended(torch.cat(rows))

    def read(self, query: Sequence[Tensor], key: Sequence[Tensor], last: int) -> list[Tensor]:
        found, first = [], 0
        for q, k, starts in zip(query, key, self.starts, strict=True):
            offset, reach = k - q, starts[-1]
            seen = ~offset.isnan()
            near = torch.where(seen, offset, 0).clamp(-reach, reach)
            whole = near.round()  # what a scaled reading makes of a whole number is near one
            near = torch.where((near - whole).abs() < 1e-6, whole, near).long()
            found.append(torch.where(seen, near + (first + reach), last - 1))
            first += 2 * reach + 1
        return found

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, axes={self.axes}, buckets={self.buckets}, "
            f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        )


def _starts(buckets: int, max_distance: int, bidirectional: bool) -> list[int]:
    """The least distance in each bucket of a direction.

    The formula is evaluated as the published code does, in float32 on the CPU, whatever the device:
    distances at whole powers fall on a boundary, and their rounding decides.
    """
    if bidirectional and buckets % 2:
        raise ValueError(
            f"buckets are divided evenly between two directions, got {buckets}: "
            f"pass {buckets + 1}, or bidirectional=False"
        )
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if exact < 1:
        least = 4 if bidirectional else 2
        raise ValueError(f"buckets must be {least} or more, got {buckets}")
    if max_distance <= exact:
        raise ValueError(
            f"max_distance must be above {exact}, the number of buckets for one distance each, "
            f"got {max_distance}"
        )
    distances = torch.arange(exact, max_distance + 1, device="cpu")
    ratio = torch.log(distances.float() / exact) / math.log(max_distance / exact)
    beyond = exact + (ratio * (count - exact)).long()
    filled = torch.arange(exact + 1, count, device="cpu")
    first = exact + torch.searchsorted(beyond, filled)
    return [*range(exact + 1), *first.tolist()]


def _per_axis(name: str, given: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given,) * axes
    if len(given) != axes:
        raise ValueError(f"{name} must be one for all or for each of {axes} axes, got {given}")
    return tuple(given)
