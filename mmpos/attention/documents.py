"""Attention of documents that are packed in one row, one by one: nothing of all pairs is formed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmpos.attention.visibility import Visibility, four
from mmpos.attention.visibility import cut as at

LEAST = 2**12
"""Pairs of the whole row for each document, below which one call for all of them is faster."""


def documents(visibility: Visibility) -> tuple[int, ...] | None:
    """The lengths of documents that lie one after the other in a row, and are all that is hidden.

    None where they do not, or where going by them does not pay: on devices that a look at the
    segments makes wait, in compiled code, and for many short ones.
    """
    own, others = visibility.q_segments, visibility.k_segments
    if own is None or others is None or own.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    whole = visibility.mask is None and visibility.aligned and visibility.rows == 1
    if not whole or own.shape[-1] == 0 or not (own is others or torch.equal(own, others)):
        return None
    found, lengths = own.reshape(-1).unique_consecutive(return_counts=True)
    if len(found.unique()) != len(found) or own.shape[-1] ** 2 < LEAST * len(found):
        return None
    return tuple(lengths.tolist())


def attend_by_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: tuple[int, ...],
    attend: Callable[..., Tensor],
) -> Tensor:
    """``attend`` of each document to itself."""
    parts, begin = [], 0
    for length in lengths:
        cut = slice(begin, begin + length)
        own = bias
        if own is not None:
            own = at(at(four(own), -2, cut), -1, cut)
        parts.append(attend(q[..., cut, :], k[..., cut, :], v[..., cut, :], own))
        begin += length
    return torch.cat(parts, -2)
