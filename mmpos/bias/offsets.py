"""Biases that depend on the offset of a pair alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmpos.bias.base import AttentionBias
from mmpos.bias.lattice import lattice


class Columns(NamedTuple):
    """The bias of each different offset, and where a pair finds its own."""

    bias: Tensor
    """``[H, N + 3]``: ``N`` offsets, then what `OffsetBias.alone` gives."""
    queries: Tensor
    keys: Tensor
    """Numbers ``[..., L]``, whose difference, query minus key, is the column of a pair."""
    absent: tuple[Tensor, Tensor]
    """Which queries and keys have no place, ``[..., L]``."""


class OffsetBias(AttentionBias):
    """A bias of the offset alone, which tokens on a grid share.

    ``n`` tokens have ``n²`` pairs, but on a grid fewer than ``2 ** axes · n`` different offsets.
    Where positions can be looked at, the bias is formed for each offset once, with its gradient,
    and spread by one subtraction and one `index_select` along contiguous columns, whose backward
    pass on the CPU is several times as fast as that of an embedding.
    """

    waits: ClassVar[bool] = False
    """Whether positions on another device than the CPU are worth the wait for a look at them."""

    def of_offsets(self, offsets: Sequence[Tensor]) -> Tensor:
        """The bias of offsets, query minus key, one tensor ``[N]`` for each axis → ``[H, N]``."""
        heads = torch.arange(self.heads, device=offsets[0].device).unsqueeze(-1)
        return self.score(offsets, [torch.zeros_like(axis) for axis in offsets], heads)

    def alone(self, columns: Tensor) -> Tensor:
        """The bias ``[H, 3]`` where only the key has a place, only the query, and neither has."""
        return columns.new_zeros(self.heads, 3)

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        """The dense bias, formed for each pair."""
        return super().dense(q, k)

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        found = self.columns(q, k)
        if found is None:
            return self.pairs(q, k)
        index = found.queries.unsqueeze(-1) - found.keys.unsqueeze(-2)
        no_query, no_key = found.absent[0].unsqueeze(-1), found.absent[1].unsqueeze(-2)
        if no_query.any() or no_key.any():
            after = found.bias.shape[-1]
            index.masked_fill_(no_query, after - 3).masked_fill_(no_key, after - 2)
            index.masked_fill_(no_query & no_key, after - 1)
        bias = found.bias.index_select(1, index.flatten())
        return bias.reshape(self.heads, *index.shape).movedim(0, -3)

    def columns(self, q: Tensor, k: Tensor) -> Columns | None:
        """The bias of each different offset, if these are fewer than the pairs.

        None too where one cannot look: while compiling, and on another device unless `waits`; and
        for positions that are learned.
        """
        if q.requires_grad or k.requires_grad or not (looking(q) or self._waits(q)):
            return None
        grid = lattice(q, k)
        if grid is None:
            return None
        ranges = grid.ranges()
        if math.prod(high - low + 1 for low, high in ranges) > q.shape[:-1].numel() * k.shape[-2]:
            return None
        ticks = [
            torch.arange(low, high + 1, device=q.device).to(q) * step
            for (low, high), step in zip(ranges, grid.steps, strict=True)
        ]
        bias = self.of_offsets([part.flatten() for part in torch.meshgrid(*ticks, indexing="ij")])
        bias = torch.cat((bias, self.alone(bias)), dim=-1).float()
        return Columns(bias, *grid.codes(ranges), grid.absent)

    def _waits(self, q: Tensor) -> bool:
        return self.waits and not (q.is_meta or torch.compiler.is_compiling())


def looking(positions: Tensor) -> bool:
    """Whether a look at ``positions`` is free: on the CPU, unless they are being traced."""
    return positions.device.type == "cpu" and not torch.compiler.is_compiling()
