"""How far a query is from a key, on one axis or several."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Distance = Literal["euclidean", "l1", "linf"]
"""The straight line, city blocks (all axes added), or the longest axis."""


def known(distance: Distance) -> Distance:
    """``distance``; raises ValueError for any other name."""
    if distance not in get_args(Distance):
        raise ValueError(f"distance must be one of {get_args(Distance)}, got {distance!r}")
    return distance


def between(
    query: Sequence[Tensor],
    key: Sequence[Tensor],
    distance: Distance,
    axis_scale: Sequence[float] | None = None,
) -> Tensor:
    """The distance of coordinates, one tensor for each axis, in float32.

    An axis that one of the two tokens lacks does not count. Differences are rounded once, after
    they were formed, and ``axis_scale`` multiplies those of each axis.
    """
    gaps = []
    for axis, (q, k) in enumerate(zip(query, key, strict=True)):
        gap = q - k
        gap = torch.where(gap.isnan(), 0, gap).abs()
        gaps.append((gap if axis_scale is None else gap * axis_scale[axis]).float())
    if len(gaps) == 1:
        return gaps[0]
    if distance == "l1":
        return sum(gaps[1:], gaps[0])
    if distance == "linf":
        return functools.reduce(torch.maximum, gaps)
    square = gaps[0].square()
    for gap in gaps[1:]:
        square = square + gap.square()
    apart = square > 0  # the root has no gradient at 0
    return torch.where(apart, torch.where(apart, square, 1).sqrt(), 0)
