"""How fast pairs of features turn: spectra, their division among axes, and the angles they give."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def axial(split: Sequence[int], base: float = 10000.0) -> list[list[float]]:
    """Frequencies ``[A][P]`` in which each axis turns pairs of its own, each a whole spectrum.

    >>> axial((2, 1), base=100)
    [[1.0, 0.1, 0.0], [0.0, 0.0, 1.0]]
    """
    rows, before = [], 0
    for pairs in split:
        after = sum(split) - before - pairs
        rows.append([0.0] * before + geometric(pairs, base) + [0.0] * after)
        before += pairs
    return rows


def angles(
    coordinates: Float[Tensor, "*batch length axes"],
    frequencies: Float[Tensor, "*head axes pairs"],
) -> Float[Tensor, "*batch length pairs"]:
    """``Σ_a coordinates[..., a] · frequencies[a, p]`` in radians; NaN coordinates contribute 0.

    Formed by elementwise products: autocast would round a matrix product.
    """
    known = torch.where(coordinates.isnan(), 0.0, coordinates)
    return (known.unsqueeze(-1) * frequencies).sum(-2)
