from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Visibility(NamedTuple):
    """Which keys each query sees: by order, by segment and by mask, all at once.

    It is formed for all queries and keys, or for some of them: attention that goes by blocks of
    queries then needs no ``[Lq, Lk]`` tensor. The arguments are those of `mmpos.attend`.
    """

    queries: int
    keys: int
    causal: bool = False
    window: int | None = None
    q_index: Tensor | None = None
    k_index: Tensor | None = None
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None
    mask: Tensor | None = None
    """True where visible, each of ``[B, H, Lq, Lk]`` or 1."""
    device: torch.device | str | None = None

    @property
    def aligned(self) -> bool:
        """Whether the last query is as late as the last key, and no index says otherwise."""
        return self.q_index is None and self.k_index is None

    @property
    def ordered(self) -> bool:
        """Whether it is the causal order of aligned tokens and nothing else."""
        rest = (self.window, self.q_segments, self.mask)
        return self.causal and self.aligned and all(part is None for part in rest)

    @property
    def reflexive(self) -> bool:
        """Whether every query surely sees the key of its own token."""
        if self.mask is not None or self.queries > self.keys:
            return False
        if self.queries < self.keys:
            return self.aligned and self.q_segments is None
        return self.q_segments is self.k_segments and self.q_index is self.k_index

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        by_order = self.window is not None or (
            self.causal and not (self.aligned and self.queries == 1)
        )
        return not by_order and self.q_segments is None and self.mask is None

    @property
    def rows(self) -> int:
        """How many rows of a batch see differently, or 1."""
        batches = [1 if self.mask is None else self.mask.shape[0]]
        for along in (self.q_index, self.k_index, self.q_segments, self.k_segments):
            batches += [] if along is None or along.ndim == 1 else [along.shape[0]]
        return max(batches)

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The keys, from one to before another, beyond which these queries see none by order."""
        if not self.aligned:
            return 0, self.keys
        late = self.keys - self.queries
        after = 1 if self.causal else (self.window or self.keys + self.queries)
        before = self.window or self.keys + self.queries
        last = min(self.keys, max(1, stop - 1 + late + after))
        return max(0, min(start + late - before + 1, last - 1)), last

    def visible(
        self, queries: slice = slice(None), keys: slice = slice(None)
    ) -> tuple[Tensor | None, Tensor | None]:
        """True where visible, ``[..., Lq, Lk]``, and which queries see nothing, ``[..., Lq, 1]``.

        A query that sees nothing is said to see all, for a softmax to stay finite.
        """
        seen = None
        if self.window is not None or (self.causal and not (self.aligned and self.queries == 1)):
            k_index = self.k_index
            if k_index is None:
                k_index = torch.arange(self.keys, device=self.device)
            q_index = self.q_index
            if q_index is None:
                q_index = k_index[..., -1:] + torch.arange(1 - self.queries, 1, device=self.device)
            behind = q_index[..., queries].unsqueeze(-1) - k_index[..., keys].unsqueeze(-2)
            behind = behind if behind.ndim == 2 else behind.unsqueeze(-3)
            seen = behind >= 0 if self.causal else behind > -(self.window or 0)
            if self.window is not None:
                seen = seen & (behind < self.window)
        if self.q_segments is not None and self.k_segments is not None:
            own, others = self.q_segments[..., queries], self.k_segments[..., keys]
            same = own.unsqueeze(-1) == others.unsqueeze(-2)
            same = same if same.ndim == 2 else same.unsqueeze(-3)
            seen = same if seen is None else seen & same
        if self.mask is not None:
            mask = cut(cut(self.mask, -2, queries), -1, keys)
            seen = mask if seen is None else seen & mask
        if seen is None or self.reflexive:
            return seen, None
        blind = ~seen.any(-1, keepdim=True)
        return seen | blind, blind


def four(part: Tensor) -> Tensor:
    """``part`` as ``[batch, head, query, key]``, with a size of 1 for what it does not have.

    More dimensions are left for a check of shapes to find.
    """
    return part[(None,) * (4 - part.ndim)]


def cut(part: Tensor, dim: int, where: slice) -> Tensor:
    """``part[where]`` along a dimension, which stays as it is if it has the size 1."""
    if part.shape[dim] == 1:
        return part
    index: list[slice] = [slice(None)] * part.ndim
    index[dim] = where
    return part[tuple(index)]


def as_pairs(mask: Tensor) -> Tensor:
    """A mask of keys ``[B, Lk]`` or of pairs, as one of pairs ``[B, H, Lq, Lk]``.

    Raises: TypeError for a mask that is not boolean; ValueError for another shape.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask must be boolean, True where visible, got {mask.dtype}; "
            "numbers that are added to scores go into bias"
        )
    if mask.ndim == 2:
        return mask[:, None, None, :]
    if mask.ndim != 4:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, expected keys [batch, key] "
            "or pairs [batch, head, query, key]"
        )
    return mask
