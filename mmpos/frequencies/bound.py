"""The base that a context is known to need."""

from __future__ import annotations

from collections.abc import Sequence


def base_bound(length: float) -> float:
    """The least base of RoPE for a context of ``length`` tokens, ``0.0424 · length ** 1.628``.

    Below it, some tokens apart, a key that is like the query attracts less attention on average
    than any other does: such models had low perplexity at this length and retrieved nothing.

    Source: Base of RoPE Bounds Context Length (arXiv:2405.14591, fig. 1), a fit, for heads of 128
    features, to the bases at which ``Σ_p cos(m · f[p])`` stays above 0 for all ``m`` up to the
    length. These are no interval: some larger bases fall below 0 too, so it is a rule, no limit.

    >>> round(base_bound(4096))
    32232

    Raises: ValueError for a length that is not above 0.
    """
    if not length > 0:
        raise ValueError(f"length must be above 0, got {length}")
    return 0.0424 * length**1.628


def base_of(frequencies: Sequence[float]) -> float:
    """The base of the geometric spectrum whose slowest pair turns as slowly as in this one.

    That is how an extended spectrum compares with a plain one.

    >>> round(base_of([1.0, 0.1, 0.01, 0.001]))
    10000

    Raises: ValueError for fewer than 2 pairs, which tell nothing of a base.
    """
    pairs = len(frequencies)
    if pairs < 2:
        raise ValueError(f"a base shows in 2 pairs or more, got {pairs}")
    slowest = min(abs(frequency) for frequency in frequencies)
    return slowest ** (-pairs / (pairs - 1)) if slowest else float("inf")
