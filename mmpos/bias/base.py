from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.positions import Axes, axis_count, check, join


class AttentionBias(nn.Module, ABC):
    """A number for each head and pair of tokens, added to the scaled attention scores.

    A subclass writes `score`, the bias of one pair; the dense bias and the FlexAttention
    ``score_mod`` both follow from it.
    """

    def __init__(
        self, heads: int, axes: Axes = 1, *, coordinates: Coordinates | None = None
    ) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be 1 or more, got {heads}")
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
        q, k = self._read(queries, keys, extent)
        heads = torch.arange(self.heads, device=q.device)[:, None, None]
        axes = range(q.shape[-1])
        bias = self.score(
            [q[..., None, :, None, axis] for axis in axes],
            [k[..., None, None, :, axis] for axis in axes],
            heads,
        )
        return bias.float().expand(*bias.shape[:-3], self.heads, q.shape[-2], k.shape[-2])

    def score_mod(
        self,
        queries: Num[Tensor, "query axes"],
        keys: Num[Tensor, "key axes"],
        extent: Extent | None = None,
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same bias as a ``score_mod`` of `torch.nn.attention.flex_attention`."""
        read = self._read(queries, keys, extent)
        q, k = (part.unbind(-1) for part in read)

        def add_bias(
            score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            bias = self.score([axis[query] for axis in q], [axis[key] for axis in k], head)
            return score + bias.to(score.dtype)

        return add_bias

    def _read(self, queries: Tensor, keys: Tensor, extent: Extent | None) -> Sequence[Tensor]:
        """Both in one reading, so that a disturbance in training is the same for both."""
        for positions in (queries, keys):
            check(positions, axis_count(self.axes))
        read = self.coordinates(
            join(queries, keys), axes=self.axes, extent=extent, training=self.training
        )
        return read.split([queries.shape[-2], keys.shape[-2]], dim=-2)
