"""Positions in t, h and w of sequences of text, images, videos and sound, for M-RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Num
from torch import Tensor

from mmpos.positions.counting import Counting
from mmpos.positions.parts import Part, chain


class Multimodal(NamedTuple):
    """Where tokens are, and what follows when more are decoded."""

    positions: Num[Tensor, "*batch length 3"]
    """t, h, w: whole numbers, or float64 where fractions of time are kept. Padding is at 0."""
    delta: Int[Tensor, "*batch"]
    """The next token of a row is at ``tokens + delta`` on all axes, ``tokens`` counting the real
    ones before it: ``sequence(1, start=tokens + delta).expand(-1, -1, 3)``."""
    mask: Bool[Tensor, "*batch length"]
    """True for real tokens; attention must not see the others."""


def of_parts(
    parts: Sequence[Part],
    counting: Counting | None = None,
    *,
    device: torch.device | str | None = None,
) -> Multimodal:
    """Positions of one sequence, part by part; text is at the same number on each axis.

    >>> from mmpos.positions import Image, Text
    >>> parts = [Text(2), Image(4, 6), Text(1)]
    >>> out = of_parts(parts, Counting(merge=2))
    >>> out.positions.T.tolist()
    [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    >>> out.delta.item()  # the next is at 6, the tenth token
    -3

    Raises: ValueError for a grid without whole blocks, or ticks and a part without a rate.
    """
    positions, delta = _row(parts, counting or Counting())
    mask = torch.ones(len(positions), dtype=torch.bool)
    return _moved(positions, torch.tensor(delta), mask, device)


def of_rows(
    rows: Sequence[Sequence[Part]],
    counting: Counting | None = None,
    *,
    length: int | None = None,
    side: str = "right",
    device: torch.device | str | None = None,
) -> Multimodal:
    """Positions of a batch of sequences, padded on one side to ``length`` or the longest.

    Padding is at position 0 on all axes, and False in the mask: attention must not see it.

    >>> from mmpos.positions import Image, Text
    >>> out = of_rows([[Text(1)], [Image(1, 2)]], side="left")
    >>> out.positions.tolist()
    [[[0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 1]]]
    >>> out.mask.tolist(), out.delta.tolist()
    ([[False, True], [True, True]], [0, 0])

    Raises: ValueError for another side, or a row that is longer than ``length``, with both numbers.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', where padding goes, got {side!r}")
    placed = [_row(row, counting or Counting()) for row in rows]
    longest = max((len(positions) for positions, _ in placed), default=0)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"rows are padded to {length} tokens, the longest has {longest}")
    mask = torch.zeros(len(placed), length, dtype=torch.bool)
    for real, (positions, _) in zip(mask, placed, strict=True):
        first = length - len(positions) if side == "left" else 0
        real[first : first + len(positions)] = True
    return _scattered(placed, mask, device)


def laid_out(
    rows: Sequence[Sequence[Part]],
    mask: Bool[Tensor, "batch length"],
    counting: Counting,
    device: torch.device | str | None = None,
) -> Multimodal:
    """Each row's parts where the mask is True, in its order."""
    placed = [_row(row, counting) for row in rows]
    return _scattered(placed, mask, device)


def _row(parts: Sequence[Part], counting: Counting) -> tuple[Tensor, int]:
    positions, end = chain(parts, counting)
    if counting.decode == "max" and len(positions):
        end = math.floor(positions.max()) + 1
    return positions, end - len(positions)


def _scattered(
    placed: Sequence[tuple[Tensor, int]], mask: Tensor, device: torch.device | str | None
) -> Multimodal:
    found = torch.cat([torch.zeros(0, 3, dtype=torch.int64), *(rows for rows, _ in placed)])
    positions = torch.zeros(*mask.shape, 3, dtype=found.dtype)
    positions[mask] = found
    return _moved(positions, torch.tensor([delta for _, delta in placed]).long(), mask, device)


def _moved(
    positions: Tensor, delta: Tensor, mask: Tensor, device: torch.device | str | None
) -> Multimodal:
    if device is not None and torch.device(device).type == "mps" and positions.is_floating_point():
        positions = positions.float()
    return Multimodal(positions.to(device), delta.to(device), mask.to(device))
