"""Tokens on a grid, whose pairs have few different offsets."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Lattice(NamedTuple):
    """Queries and keys at whole multiples of a step on each axis."""

    queries: Tensor
    keys: Tensor
    """Integers ``[..., L, A]``; those of another for tokens without a place."""
    steps: list[float]
    absent: tuple[Tensor, Tensor]
    """Which queries and which keys have no place, ``[..., L]``."""

    def ranges(self) -> list[tuple[int, int]]:
        """The least and the greatest offset, query minus key, of each axis, in whatever row."""
        (q_low, q_high), (k_low, k_high) = (
            (part.amin(-2), part.amax(-2)) for part in (self.queries, self.keys)
        )
        axes = self.queries.shape[-1]
        low, high = (q_low - k_high).reshape(-1, axes), (q_high - k_low).reshape(-1, axes)
        return list(zip(low.amin(0).tolist(), high.amax(0).tolist(), strict=True))

    def codes(self, ranges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Numbers of queries and keys, the differences of which count offsets in row-major order.

        The count begins with the least offset of each range.
        """
        sizes = [high - low + 1 for low, high in ranges]
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        least = [low for low, _ in ranges]
        stride, first = (self.queries.new_tensor(numbers) for numbers in (strides, least))
        return ((self.queries - first) * stride).sum(-1), (self.keys * stride).sum(-1)


def lattice(q: Tensor, k: Tensor) -> Lattice | None:
    """Coordinates ``[..., L, A]`` as a lattice, of step 1 on axes where all are whole.

    None if they are on none, if a token has some coordinates only, or without tokens.
    """
    missing = [part.isnan() for part in (q, k)]
    no_query, no_key = absent = tuple(part.all(-1) for part in missing)
    partly = [(part.any(-1) != none).any() for part, none in zip(missing, absent, strict=True)]
    if not q.shape[-2] * k.shape[-2] or any(partly):
        return None
    x = torch.cat(_filled(q, k), dim=-2)
    cells, steps = x.round(), [1.0] * x.shape[-1]
    for axis in range(x.shape[-1]):
        own = x[..., axis]
        if (cells[..., axis] == own).all():
            continue
        places = own.unique()
        if len(places) > 1:
            steps[axis] = places.diff().min().item()
        offset = (own - places[0]) / steps[axis]
        cells[..., axis] = offset.round()
        if ((offset - cells[..., axis]).abs() > 1e-6).any():
            return None
    queries, keys = cells.long().split([q.shape[-2], k.shape[-2]], dim=-2)
    return Lattice(queries, keys, steps, (no_query, no_key))


def _filled(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """With the coordinates of others for tokens without a place, so that no offset is added."""
    least = [torch.where(part.isnan(), torch.inf, part).amin(-2, keepdim=True) for part in (q, k)]
    either = torch.minimum(*least)
    either = torch.where(either.isinf(), 0, either)
    least = [torch.where(low.isinf(), either, low) for low in least]
    return torch.where(q.isnan(), least[0], q), torch.where(k.isnan(), least[1], k)
