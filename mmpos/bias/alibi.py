from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mmpos.bias.base import AttentionBias
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes

Distance = Literal["euclidean", "l1", "linf"]


def alibi_slopes(heads: int) -> list[float]:
    """The published slopes: ``2 ** (-8 h / n)``, ``h = 1 … n``, for ``n`` heads, a power of two.

    For other head counts, the slopes of the next lower power of two ``n``, then every second one of
    ``2 n`` (ALiBi, arXiv:2108.12409, sec. 3, and its code).

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    return _slope(torch.arange(heads, dtype=torch.float64), heads).tolist()


def _slope(head: Tensor, heads: int) -> Tensor:
    full = 1 << (heads.bit_length() - 1)
    exponent = torch.where(head < full, 2 * (head + 1), 2 * (head - full) + 1)
    return torch.exp2(-4 / full * exponent)


def _gap(query: Tensor, key: Tensor) -> Tensor:
    """The distance on one axis, 0 where a token has no place; rounded after the difference."""
    gap = (query - key).abs().float()
    return torch.where(gap.isnan(), 0, gap)


class ALiBi(AttentionBias):
    """Attention falls with distance: ``-slope[head] · |query - key|``.

    One axis: ALiBi (arXiv:2108.12409, sec. 3), in its symmetric form, which equals the published
    causal one wherever a causal mask lets a query see. Two axes: the Euclidean distance between
    patches (CROMA, arXiv:2311.00566, sec. 3.2), in patches. A token without a place has bias 0 to
    and from every other; an axis that one of the two tokens lacks does not count.

    Args:
        heads: attention heads, any number.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        distance: ``euclidean``, ``l1`` (city blocks) or ``linf`` (the longest axis).
        coordinates: how positions are read.

    Shape: ``[..., Lq, A]`` and ``[..., Lk, A]`` → ``[..., H, Lq, Lk]``, float32. No parameters.
    Raises: ValueError for an unknown distance.

    >>> ALiBi(8)(mmpos.positions.sequence(3), mmpos.positions.sequence(3))[0].tolist()
    [[-0.0, -0.5, -1.0], [-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]]
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        distance: Distance = "euclidean",
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        if distance not in get_args(Distance):
            raise ValueError(f"distance must be one of {get_args(Distance)}, got {distance!r}")
        self.distance: Distance = distance

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        gaps = [_gap(q, k) for q, k in zip(query, key, strict=True)]
        if len(gaps) == 1:
            far = gaps[0]
        elif self.distance == "euclidean":
            square = sum((gap.square() for gap in gaps[1:]), gaps[0].square())
            apart = square > 0  # the root has no gradient at 0
            far = torch.where(apart, torch.where(apart, square, 1).sqrt(), 0)
        elif self.distance == "l1":
            far = sum(gaps[1:], gaps[0])
        else:
            far = functools.reduce(torch.maximum, gaps)
        return -_slope(head.to(far.dtype), self.heads) * far

    def extra_repr(self) -> str:
        return f"heads={self.heads}, axes={self.axes}, distance={self.distance}"
