from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Coordinates, Extent, read_both, reading
from mmpos.positions import Axes, axis_count, check_size
from mmpos.spec import Specified


class BiasBlocks(NamedTuple):
    """A bias that is formed for some queries at a time, with gradients to what is learned in it."""

    form: Callable[[int, int], Tensor]
    """The dense bias ``[..., H, stop - start, Lk]`` of the queries from ``start`` to ``stop``."""
    parameters: tuple[Tensor, ...]
    """What is learned in it."""


class AttentionBias(Specified, nn.Module, ABC):
    """A number for each head and pair of tokens, added to the scaled attention scores.

    A subclass writes `score`, the bias of one pair; the dense bias and the FlexAttention
    ``score_mod`` both follow from it.
    """

    relative: ClassVar[bool] = True
    """Whether the bias depends on differences of positions alone."""

    def __init__(
        self, heads: int, axes: Axes = 1, *, coordinates: Coordinates | None = None
    ) -> None:
        super().__init__()
        check_size("heads", heads)
        axis_count(axes)
        self.heads = heads
        self.axes = axes
        self.coordinates = reading(coordinates)

    @abstractmethod
    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        """The bias for a query and a key, a coordinate per axis each, and the index of a head.

        The tensors broadcast; a coordinate that a token does not have is NaN and contributes 0.
        """

    def forward(
        self,
        queries: Num[Tensor, "*#batch query axes"],
        keys: Num[Tensor, "*#batch key axes"],
        extent: Extent | None = None,
    ) -> Float[Tensor, "*batch head query key"]:
        """The dense bias ``[..., H, Lq, Lk]`` for tokens at the positions ``queries``, ``keys``."""
        return self.dense(*self._read(queries, keys, extent))

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        """The dense bias of coordinates that were read, ``[..., Lq, A]`` and ``[..., Lk, A]``."""
        heads = torch.arange(self.heads, device=q.device)[:, None, None]
        axes = range(q.shape[-1])
        bias = self.score(
            [q[..., None, :, None, axis] for axis in axes],
            [k[..., None, None, :, axis] for axis in axes],
            heads,
        )
        return bias.float().expand(*bias.shape[:-3], self.heads, q.shape[-2], k.shape[-2])

    def blocks(
        self,
        queries: Num[Tensor, "*#batch query axes"],
        keys: Num[Tensor, "*#batch key axes"],
        extent: Extent | None = None,
    ) -> BiasBlocks:
        """The same bias for `mmpos.attend` to form by blocks of queries, never as a whole.

        Its gradient then needs no ``[B, H, Lq, Lk]`` tensor.
        """
        q, k = self._read(queries, keys, extent)
        return BiasBlocks(
            lambda start, stop: self.dense(q[..., start:stop, :], k), tuple(self.parameters())
        )

    def score_mod(
        self,
        queries: Num[Tensor, "query axes"],
        keys: Num[Tensor, "key axes"],
        extent: Extent | None = None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same bias as a ``score_mod`` of `torch.nn.attention.flex_attention`.

        Raises: ValueError for positions of each sample, ``[B, L, A]``: all samples share one.
        """
        for positions in (queries, keys):
            if positions.ndim != 2:
                raise ValueError(
                    "a score_mod is for positions [length, axes] that all samples share, got shape "
                    f"{tuple(positions.shape)}: use the dense bias, or one score_mod for each row"
                )
        bias = self.lookup(*self._read(queries, keys, extent))

        def add_bias(
            score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            return score + bias(query, key, head).to(score.dtype)

        return add_bias

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """`score` by the indices of a query, a key and a head, for coordinates that were read.

        A subclass forms here what is common to all pairs.
        """
        queries, keys = by_axis(q), by_axis(k)
        return lambda query, key, head: self.score(
            [axis[query] for axis in queries], [axis[key] for axis in keys], head
        )

    def _read(self, queries: Tensor, keys: Tensor, extent: Extent | None) -> Sequence[Tensor]:
        return read_both(
            self.coordinates,
            queries,
            keys,
            axes=self.axes,
            extent=extent,
            training=self.training,
        )


def by_axis(coordinates: Tensor) -> list[Tensor]:
    """Coordinates ``[..., L, A]`` as a tensor ``[..., L]`` for each axis.

    Each lies in memory of its own, without which compiled FlexAttention fails on the CPU.
    """
    return [axis.contiguous() for axis in coordinates.unbind(-1)]
