"""How fast pairs of features turn: spectra, their division among axes, and the angles they give."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def geometric(pairs: int, base: float = 10000.0) -> list[float]:
    """The spectrum ``base ** (-p / pairs)`` for ``p < pairs``, radians per unit of position.

    Source: Attention Is All You Need (arXiv:1706.03762, sec. 3.5), where ``pairs`` is half the
    number of encoded features.

    >>> geometric(2, base=100)
    [1.0, 0.1]

    Raises: ValueError for a base that is not above 0.
    """
    if not 0 < base < math.inf:
        raise ValueError(f"base must be above 0 and finite, got {base}")
    return [base ** (-pair / pairs) for pair in range(pairs)]


def split_pairs(pairs: int, axes: int) -> tuple[int, ...]:
    """Divide pairs evenly among axes; what is left over goes to the first axis.

    >>> split_pairs(32, 3)
    (12, 10, 10)

    Raises: ValueError if an axis would get no pair.
    """
    share, rest = divmod(pairs, axes)
    if share < 1:
        raise ValueError(
            f"{pairs} pairs ({2 * pairs} features) cannot be divided among {axes} axes: "
            f"use at least {2 * axes} features"
        )
    return (share + rest, *[share] * (axes - 1))


def angles(
    coordinates: Float[Tensor, "*#batch length axes"],
    frequencies: Float[Tensor, "*#batch head axes pairs"],
) -> Float[Tensor, "*batch head length pairs"]:
    """``Σ_a coordinates[..., a] · frequencies[a, p]`` in radians; NaN coordinates contribute 0.

    Formed by elementwise products: autocast would round a matrix product.
    """
    known = torch.where(coordinates.isnan(), 0.0, coordinates).unsqueeze(-3)
    parts = [
        known[..., axis, None] * frequencies[..., None, axis, :] for axis in range(known.shape[-1])
    ]
    return sum(parts[1:], parts[0])
