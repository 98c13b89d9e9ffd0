from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmpos.bias.base import AttentionBias
from mmpos.coordinates import Coordinates
from mmpos.positions import Axes, axis_count


class FIREBias(AttentionBias):
    """A learned function of the distance relative to the query's own position.

    ``f(ψ(i - j) / ψ(max(L, i)))`` for a query at ``i`` and a key at ``j``, with ``ψ(x) = ln(c · x +
    1)`` and ``f`` one hidden layer of ReLU (FIRE, arXiv:2310.04418, sec. 3). The ratio is between 0
    and 1 for keys that are not after the query, however long the sequence. The function is causal;
    a key after the query, which a causal mask hides, has the distance ``j - i``. It is not a
    function of differences alone: equal distances have other numbers further on.

    A token without a place has bias 0 to and from every other.

    Args:
        heads: attention heads.
        axes: one axis, or a grid of one.
        hidden: width of the hidden layer.
        c: initial factor within the logarithm.
        threshold: initial ``L``, the position up to which all queries are treated alike.
        coordinates: how positions are read.

    Shape: ``[..., Lq, 1]`` and ``[..., Lk, 1]`` → ``[..., H, Lq, Lk]``, float32. Parameters: those
    of the layers, ``weight_in`` and ``bias_in [hidden]``, ``weight_out [H, hidden]`` and ``bias_out
    [H]``, and ``log_c`` and ``log_threshold [1]``, from which the factor is ``c · exp(log_c)`` and
    the threshold likewise, so that both stay positive.
    Raises: ValueError on several axes, for a hidden width below 1, and for a ``c`` or ``threshold``
    that is not above 0.

    >>> FIREBias(4)(mmpos.positions.sequence(5), mmpos.positions.sequence(5)).shape
    torch.Size([4, 5, 5])
    """

    relative: ClassVar[bool] = False

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        hidden: int = 32,
        c: float = 0.1,
        threshold: float = 512.0,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, coordinates=coordinates)
        if axis_count(axes) != 1:
            raise ValueError(f"FIRE is for one axis, got {axis_count(axes)}: use another bias")
        if hidden < 1:
            raise ValueError(f"hidden must be 1 or more, got {hidden}")
        if not (0 < c < math.inf and 0 < threshold < math.inf):
            raise ValueError(f"c and threshold must be above 0, got {c} and {threshold}")
        self.hidden = hidden
        self.c = c
        self.threshold = threshold
        self.weight_in = nn.Parameter(torch.empty(hidden))
        self.bias_in = nn.Parameter(torch.empty(hidden))
        self.weight_out = nn.Parameter(torch.empty(heads, hidden))
        self.bias_out = nn.Parameter(torch.empty(heads))
        self.log_c = nn.Parameter(torch.empty(1))
        self.log_threshold = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the layers anew as `torch.nn.Linear` does; the factor and threshold as given."""
        for weight, inputs in (
            (self.weight_in, 1),
            (self.bias_in, 1),
            (self.weight_out, self.hidden),
            (self.bias_out, self.hidden),
        ):
            nn.init.uniform_(weight, -(inputs**-0.5), inputs**-0.5)
        nn.init.zeros_(self.log_c)
        nn.init.zeros_(self.log_threshold)

    def ratio(self, query: Tensor, key: Tensor) -> Tensor:
        """``ψ(|i - j|) / ψ(max(L, i))`` in float32, 0 for a pair with a token without a place."""
        c = self.c * self.log_c.float().exp().squeeze()
        least = self.threshold * self.log_threshold.float().exp().squeeze()
        gap = query - key
        gap = torch.where(gap.isnan(), 0, gap).abs().float()
        at = torch.where(query.isnan(), 0, query).float()
        return (c * gap).log1p() / (c * torch.maximum(at, least)).log1p()

    def pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """``f`` as the straight pieces that it consists of.

        A hidden unit bends at one ratio, so there are ``hidden + 1`` pieces, each with a slope and
        an intercept for each head; a piece of zeros follows. Two reads for each pair take the place
        of the hidden layer, whose ``[Lq, Lk, hidden]`` numbers would be most of the work.

        Returns: the bends in order ``[hidden]``, slopes and intercepts ``[hidden + 2, H]``.
        """
        weight, bias = self.weight_in.float(), self.bias_in.float()
        with torch.no_grad():
            bends, order = torch.where(weight != 0, -bias / weight, torch.inf).sort()
            rank = order.argsort()
            piece = torch.arange(self.hidden + 1, device=weight.device).unsqueeze(-1)
            rising, falling = (weight > 0) & (piece > rank), (weight < 0) & (piece <= rank)
            active = (rising | falling | ((weight == 0) & (bias > 0))).float().unsqueeze(1)
        out = self.weight_out.float()
        slopes = (active * (out * weight)).sum(-1)
        intercepts = (active * (out * bias)).sum(-1) + self.bias_out.float()
        zeros = (0, 0, 0, 1)
        return bends, nn.functional.pad(slopes, zeros), nn.functional.pad(intercepts, zeros)

    def score(self, query: Sequence[Tensor], key: Sequence[Tensor], head: Tensor) -> Tensor:
        return self._pair(query[0], key[0], head, *self.pieces())

    def lookup(self, q: Tensor, k: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        pieces = self.pieces()
        queries, keys = q.squeeze(-1), k.squeeze(-1)
        return lambda query, key, head: self._pair(queries[query], keys[key], head, *pieces)

    def _pair(
        self,
        query: Tensor,
        key: Tensor,
        head: Tensor,
        bends: Tensor,
        slopes: Tensor,
        intercepts: Tensor,
    ) -> Tensor:
        ratio = self.ratio(query, key)
        passed = [(ratio > bend).long() for bend in bends.unbind()]
        piece = sum(passed[1:], passed[0])
        piece = torch.where((query - key).isnan(), self.hidden + 1, piece)
        return torch.addcmul(intercepts[piece, head], slopes[piece, head], ratio)

    def dense(self, q: Tensor, k: Tensor) -> Tensor:
        bends, slopes, intercepts = self.pieces()
        query, key = q, k.mT
        ratio = self.ratio(query, key)
        piece = torch.bucketize(ratio.detach(), bends)
        piece = torch.where((query - key).isnan(), self.hidden + 1, piece)
        slope, intercept = (
            rows.t().contiguous().index_select(1, piece.flatten()).reshape(self.heads, *piece.shape)
            for rows in (slopes, intercepts)
        )
        return torch.addcmul(intercept, slope, ratio).movedim(0, -3)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, axes={self.axes}, hidden={self.hidden}, c={self.c}, "
            f"threshold={self.threshold}"
        )
