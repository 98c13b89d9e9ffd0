"""What an encoding does to each feature, found by asking it for rotations."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from mmpos.coordinates import Index
from mmpos.frequencies import Length
from mmpos.rotary import RotaryEncoding, Rotation

STEPS = (2.0**-10, 1.0, 2.0**20)
"""Where angles are read: near, that they are below π; then further, each time by as much as the
error of float32 in the frequency so far leaves no doubt about whole turns."""


def probe(encoding: RotaryEncoding, length: Length | None) -> dict[str, Any]:
    """Partner, sign, axis, frequency and magnitude of each feature of a head.

    An angle is read off its cos and sin at three distances along each axis, so that a frequency is
    known to 1e-13.
    Raises: TypeError for what is no RotaryEncoding; ValueError for an encoding without a plan.
    """
    if not isinstance(encoding, RotaryEncoding):
        raise TypeError(f"a plan is of a RotaryEncoding, got {type(encoding).__name__}")
    if encoding.temperature is not None:
        raise ValueError("a temperature grows queries, not keys: make the encoding without it")
    bare = copy.copy(encoding).eval()
    bare.coordinates = Index()
    axes = len(encoding.pairs)
    found = [_along(bare, axis, axes, length) for axis in range(axes)]
    rotation, width = found[0][0], encoding.head_dim
    pairs, start = rotation.cos.shape[-1], rotation.start
    partner, sign = list(range(width)), [0] * width
    owners: list[int | None] = [None] * width
    frequency, magnitude = [0.0] * width, [1.0] * width
    at_rest = encoding.pair_axes if len(encoding.pair_axes) == pairs else [None] * pairs
    for pair in range(pairs):
        half = rotation.layout == "half"
        both = (pair, pair + pairs) if half else (2 * pair, 2 * pair + 1)
        for which, feature in enumerate(start + each for each in both):
            other = start + both[1 - which]
            partner[feature], sign[feature] = other, (-1, 1)[which]
            reads = [axis for axis in range(axes) if found[axis][1][which][pair] != (0, 1)]
            if len(reads) > 1:
                raise ValueError(
                    f"feature {feature} turns with {len(reads)} axes: {type(encoding).__name__} "
                    "has directions, and no axis for each feature"
                )
            owners[feature] = reads[0] if reads else at_rest[pair]
            for axis in reads:
                frequency[feature], magnitude[feature] = found[axis][1][which][pair]
    return {
        "partner": tuple(partner),
        "sign": tuple(sign),
        "axis": tuple(owners),
        "frequency": tuple(frequency),
        "magnitude": tuple(magnitude),
    }


def _along(
    encoding: RotaryEncoding, axis: int, axes: int, length: Length | None
) -> tuple[Rotation, list[list[tuple[float, float]]]]:
    """A rotation; frequency and magnitude of the first and second features of its pairs."""
    places = torch.full((len(STEPS), axes), math.nan, dtype=torch.float64)
    places[:, axis] = torch.tensor(STEPS, dtype=torch.float64)
    with torch.no_grad():
        rotation = encoding(places, length=length)
    if rotation.keys is not None or rotation.scale is not None:
        raise ValueError(
            f"{type(encoding).__name__} turns keys otherwise than queries, and a plan is of both"
        )
    own = (rotation.cos, rotation.sin)
    if math.prod(own[0].shape[:-2]) != 1:
        raise ValueError(
            f"{type(encoding).__name__} gives rotations of shape {tuple(own[0].shape)}: a plan is "
            "for one sequence, whose heads are all turned alike"
        )
    sides = [own, own if rotation.second is None else rotation.second]
    return rotation, [_speeds(cos, sin) for cos, sin in sides]


def _speeds(cos: Tensor, sin: Tensor) -> list[tuple[float, float]]:
    """Frequency and magnitude of each pair, from cos and sin ``[…, steps, P]`` at `STEPS`."""
    cos, sin = (part.double().reshape(len(STEPS), -1) for part in (cos, sin))
    speed = torch.zeros(cos.shape[-1], dtype=torch.float64)
    for step, angle in zip(STEPS, torch.atan2(sin, cos), strict=True):
        turns = ((speed * step - angle) / (2 * math.pi)).round()
        speed = (angle + 2 * math.pi * turns) / step
    size = torch.hypot(cos, sin).mean(0)
    size = torch.where((size - 1).abs() < 1e-6, 1.0, size)
    return list(zip(speed.tolist(), size.tolist(), strict=True))
