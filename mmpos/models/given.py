"""What a transformer is called with, checked before it is used."""

from __future__ import annotations

from torch import Tensor

from mmpos.attention import KVCache
from mmpos.coordinates import Extent
from mmpos.frequencies import Length
from mmpos.positions import Axes, axis_count


def check_tokens(x: Tensor, positions: Tensor, dim: int, axes: Axes) -> None:
    """Raise ValueError for tokens of another width, or positions that are not theirs."""
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"tokens have shape {tuple(x.shape)}, expected [batch, length, {dim}]")
    rows, tokens, wanted = x.shape[0], x.shape[1], (x.shape[1], axis_count(axes))
    if tuple(positions.shape) not in (wanted, (1, *wanted), (rows, *wanted)):
        raise ValueError(
            f"{rows} rows of {tokens} tokens have positions of shape {tuple(positions.shape)}, "
            f"expected {wanted} or {(rows, *wanted)}"
        )


def frozen_length(
    cache: KVCache,
    length: Length | None,
    extent: Extent | None,
    *,
    growing: bool,
    needed: bool,
) -> Length | None:
    """The length that context extensions take with a cache.

    Args:
        growing: whether tokens change no earlier ones, so that a sequence can grow.
        needed: whether an extension depends on the length.

    Raises: ValueError for sequences that cannot grow, or a size of the grid for each token.
    """
    if not growing:
        raise ValueError(
            "a cache is for causal transformers without class and register tokens: tokens that "
            "see what comes after them change with it"
        )
    if isinstance(extent, Tensor) and extent.ndim == 3:
        raise ValueError("an extent for each token cannot go with a cache: give one for each row")
    return cache.frozen(length, needed)
