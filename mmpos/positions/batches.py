"""Positions of tokens in real batches: padded, packed, chosen from others, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from mmpos.positions.base import grid


class Packed(NamedTuple):
    """Documents one after the other in a single row of tokens."""

    positions: Int[Tensor, "length 1"]
    """Counted within each document, from 0."""
    segments: Int[Tensor, " length"]
    """Which document a token is of, for `mmpos.attend`."""


def padded(mask: Bool[Tensor, "batch length"]) -> Int[Tensor, "batch length 1"]:
    """Positions of real tokens, counted in each row from 0, wherever its padding is.

    Padding, which attention does not see, has the position of the real token before it, or 0. The
    next token of a row, when it is decoded, is at ``mask.sum(-1)``.

    >>> padded(torch.tensor([[False, True, True], [True, False, True]])).squeeze(-1).tolist()
    [[0, 0, 1], [0, 0, 1]]

    Raises: TypeError for a mask that is not boolean; ValueError for one that is no ``[B, L]``.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"a mask is True for real tokens, got {mask.dtype}: pass mask.bool() for ones and zeros"
        )
    if mask.ndim != 2:
        raise ValueError(f"a mask has shape [batch, length], got {tuple(mask.shape)}")
    return (mask.long().cumsum(-1) - 1).clamp_min(0).unsqueeze(-1)


def packed(
    lengths: Sequence[int] | Int[Tensor, " documents"],
    *,
    cumulative: bool = False,
    tokens: int | None = None,
    device: torch.device | str | None = None,
) -> Packed:
    """Positions and segments of packed documents.

    Args:
        lengths: tokens of each document, one or more.
        cumulative: whether ``lengths`` are the places where documents begin, and the end: 0 first.
        tokens: how many there are, to be checked.

    >>> positions, segments = packed([3, 1, 2])
    >>> positions.squeeze(-1).tolist(), segments.tolist()
    ([0, 1, 2, 0, 0, 1], [0, 0, 0, 1, 2, 2])
    >>> packed([0, 3, 4, 6], cumulative=True).segments.tolist()
    [0, 0, 0, 1, 2, 2]

    Raises: ValueError for an empty document, ends that do not begin with 0 or do not grow, or
    another sum than ``tokens``, with both numbers.
    """
    given = torch.as_tensor(lengths, device=device)
    given = given if given.numel() else given.long()
    if given.ndim != 1 or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"lengths are whole numbers, one for each document, got {lengths!r}")
    if cumulative:
        if not len(given) or int(given[0]) != 0:
            raise ValueError(f"cumulative lengths begin with 0, got {given.tolist()[:1]}")
        given = given.diff()
    given = given.long()
    if not len(given) or int(given.min()) < 1:
        raise ValueError(f"each document has one token or more, got lengths {given.tolist()}")
    total = int(given.sum())
    if tokens is not None and total != tokens:
        raise ValueError(
            f"the lengths of packed documents sum to {total}, there are {tokens} tokens"
        )
    segments = torch.arange(len(given), device=given.device).repeat_interleave(given)
    begins = (given.cumsum(0) - given).repeat_interleave(given)
    positions = torch.arange(total, device=given.device) - begins
    return Packed(positions.unsqueeze(-1), segments)


def chosen(
    positions: Num[Tensor, "*#batch _ axes"], index: Int[Tensor, "*#batch kept"]
) -> Num[Tensor, "*batch kept axes"]:
    """The positions of those tokens of each row that are kept, as in MAE or after eviction.

    >>> chosen(torch.tensor([[0, 0], [0, 1], [1, 0]]), torch.tensor([[2, 0], [1, 2]])).tolist()
    [[[1, 0], [0, 0]], [[0, 1], [1, 0]]]

    Raises: ValueError for an index that is no token, with both numbers (on the CPU: looking is
    free there).
    """
    tokens = positions.shape[-2]
    if index.device.type == "cpu" and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= tokens:
            raise ValueError(f"{tokens} tokens have indices 0 to {tokens - 1}, got {low} to {high}")
    batch = torch.broadcast_shapes(positions.shape[:-2], index.shape[:-1])
    rows = index.expand(*batch, -1).unsqueeze(-1).expand(*batch, -1, positions.shape[-1])
    return positions.expand(*batch, *positions.shape[-2:]).gather(-2, rows)


def seconds(
    count: int,
    *,
    rate: float,
    span: int = 1,
    start: float = 0.0,
    device: torch.device | str | None = None,
) -> Float[Tensor, "{count} 1"]:
    """When tokens begin, in seconds: ``start + i · span / rate``, in float64 where there is one.

    Args:
        rate: frames in a second: of a video, or ``sample_rate / hop`` of a spectrogram.
        span: frames in a token, such as the patch of a spectrogram or the tubelet of a video.
        start: when the first begins.

    The start of a patch stands for it; its middle is ``start + span / rate / 2`` for the first.

    >>> seconds(3, rate=16000 / 160, span=16).squeeze(-1).tolist()
    [0.0, 0.16, 0.32]

    Raises: ValueError for a rate that is not above 0 and finite, a span below 1, a negative count.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be above 0 and finite, in frames a second, got {rate}")
    if span < 1 or count < 0 or not math.isfinite(start):
        raise ValueError(
            f"expected span of 1 or more, count of 0 or more and a finite start, "
            f"got {span}, {count} and {start}"
        )
    exact = torch.float32 if device is not None and torch.device(device).type == "mps" else None
    ticks = torch.arange(count, dtype=exact or torch.float64, device=device)
    return (start + ticks * span / rate).unsqueeze(-1)


class Ragged(NamedTuple):
    """Grids of different sizes in one batch, each with its own positions."""

    positions: Int[Tensor, "batch length axes"]
    extent: Int[Tensor, "batch *length axes"]
    """The size of each sample's grid, ``[B, A]``, or of each token's, ``[1, L, A]``, if packed."""
    mask: Bool[Tensor, "batch length"] | None
    """True for real tokens, if padded."""
    segments: Int[Tensor, "batch length"] | None
    """Which sample a token is of, if packed in one row."""


def ragged(
    grids: Sequence[Sequence[int]],
    *,
    pack: bool = False,
    device: torch.device | str | None = None,
) -> Ragged:
    """Positions of images or videos of different grids, padded to the longest or packed in a row.

    With these, every encoding gives each sample what it gives it alone, whether it reads positions
    as they are or scaled to a reference; so do a subset or a crop of the tokens (`chosen`).

    >>> ragged([(1, 2), (2, 2)]).mask.tolist()
    [[True, True, False, False], [True, True, True, True]]
    >>> ragged([(1, 2), (2, 2)], pack=True).segments.tolist()
    [[0, 0, 1, 1, 1, 1]]

    Raises: ValueError without grids, for a size below 1, or grids of different axes.
    """
    sizes = [tuple(grid) for grid in grids]
    if not sizes or len({len(size) for size in sizes}) != 1 or min(map(min, sizes)) < 1:
        raise ValueError(f"grids are sizes of 1 or more for the same axes, got {sizes}")
    cells = [grid(*size, device=device) for size in sizes]
    counts = [len(each) for each in cells]
    extent = torch.tensor(sizes, device=device)
    if pack:
        segments = packed(counts, device=device).segments
        return Ragged(torch.cat(cells)[None], extent[segments][None], None, segments[None])
    rows = torch.nn.utils.rnn.pad_sequence(cells, batch_first=True)
    real = torch.arange(rows.shape[1], device=device) < torch.tensor(counts, device=device)[:, None]
    return Ragged(rows, extent, real, None)
