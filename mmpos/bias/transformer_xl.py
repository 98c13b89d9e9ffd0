from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from mmpos.bias.content import ContentBias, ContentTerms
from mmpos.bias.offsets import looking
from mmpos.coordinates import Coordinates
from mmpos.frequencies import geometric, split_pairs
from mmpos.positions import Axes, axis_count

WaveLayout = Literal["half", "interleaved"]
"""Sines of all pairs first, then cosines; or a sine and its cosine next to each other."""


class TransformerXLBias(ContentBias):
    """Scores of a query's content with the offset, and of learned vectors with key and offset.

    ``scale · (q·k + q·W R(i - j) + u·k + v·W R(i - j))``, of which this adds all but the first
    (Transformer-XL, arXiv:1901.02860, sec. 3.3). ``R`` is the sinusoidal encoding of the offset,
    query minus key, as in `SinusoidalEncoding`; several axes divide its pairs. ``u`` and ``v`` are
    vectors of each head, ``W`` a matrix of its own. It serves one-sided and two-sided attention:
    with ``layout="interleaved"`` it is the Conformer's (arXiv:2005.08100, sec. 2.1). On an axis
    that either token lacks there is no wave; between tokens that share no axis there is nothing.

    Positions may be any: by ``sin(i - j) = sin i cos j - cos i sin j`` the score is a product of a
    query with the waves of the key's own position. For consecutive positions it is formed for each
    offset once and shifted, where that is less work.

    Args:
        heads: attention heads.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        head_dim: features of a head.
        dim: features of ``R``, even; ``heads · head_dim`` by default, the width of the model.
        base: longest wavelength of ``R``, over 2π.
        layout: which features of ``R`` are sines: the first ``half``, or ``interleaved``.
        std: standard deviation of the initial numbers.
        coordinates: how positions are read.

    Parameters: ``weight [heads · head_dim, dim]``, ``content`` (``u``) and ``offset`` (``v``),
    ``[heads, head_dim]``.
    Raises: ValueError for an odd ``dim`` or one too small for the axes, or an unknown layout.

    >>> bias, positions = TransformerXLBias(3, head_dim=16), mmpos.positions.sequence(9)
    >>> q, k, v = torch.randn(3, 1, 3, 9, 16).unbind(0)
    >>> mmpos.attend(q, k, v, bias=bias(positions, positions), causal=True).shape
    torch.Size([1, 3, 9, 16])
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        head_dim: int | None = None,
        dim: int | None = None,
        base: float = 10000.0,
        layout: WaveLayout = "half",
        std: float = 0.02,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(heads, axes, head_dim=head_dim, coordinates=coordinates)
        width = heads * self.head_dim if dim is None else dim
        if width % 2 or width < 2:
            raise ValueError(f"dim must be even for pairs of sine and cosine, got {width}")
        if layout not in get_args(WaveLayout):
            raise ValueError(f"layout must be one of {get_args(WaveLayout)}, got {layout!r}")
        self.dim = dim
        self.base = base
        self.layout: WaveLayout = layout
        self.std = std
        self.pairs = split_pairs(width // 2, axis_count(axes))
        geometric(1, base)
        self.weight = nn.Parameter(torch.empty(heads * self.head_dim, width))
        self.content = nn.Parameter(torch.empty(heads, self.head_dim))
        self.offset = nn.Parameter(torch.empty(heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all numbers anew from a normal distribution, as the published code does."""
        for part in self.parameters():
            nn.init.normal_(part, std=self.std)

    def terms(self, q: Tensor, k: Tensor) -> ContentTerms:
        return _TransformerXLTerms(self, q, k)

    def waves(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Sines and cosines ``[..., L, P]`` of all axes; 0 for a coordinate that is not there."""
        sines, cosines = [], []
        for axis, pairs in enumerate(self.pairs):
            x = coordinates[..., axis, None]
            has = ~x.isnan()
            angle = torch.where(has, x, 0.0) * x.new_tensor(geometric(pairs, self.base))
            sines.append(torch.where(has, angle.sin(), 0.0))
            cosines.append(torch.where(has, angle.cos(), 0.0))
        return torch.cat(sines, -1), torch.cat(cosines, -1)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What belongs to sines and to cosines, of ``[..., dim]`` features in the layout of R."""
        if self.layout == "half":
            first, second = features.chunk(2, dim=-1)
        else:
            first, second = features.unflatten(-1, (-1, 2)).unbind(-1)
        return first, second

    def extra_repr(self) -> str:
        rest = f"dim={self.weight.shape[1]}, base={self.base}, layout={self.layout}"
        return f"{super().extra_repr()}, {rest}"


class _TransformerXLTerms(ContentTerms):
    def __init__(self, bias: TransformerXLBias, q: Tensor, k: Tensor) -> None:
        self.bias = bias
        shares = (~q.isnan().unsqueeze(-2) & ~k.isnan().unsqueeze(-3)).any(-1)
        self.shares = shares if shares.ndim == 2 else shares.unsqueeze(-3)
        self.shifted: Tensor | None = None
        offsets = _offsets(q, k)
        if offsets is not None and self._shift_is_less_work(q.shape[-2], k.shape[-2]):
            self.shifted = self._vectors(offsets)
        else:
            self.waves = [
                wave if wave.ndim == 2 else wave.unsqueeze(-3)
                for part in (q, k)
                for wave in bias.waves(part)
            ]

    def _shift_is_less_work(self, queries: int, keys: int) -> bool:
        features, dim = self.bias.head_dim, self.bias.weight.shape[1]
        offsets = queries + keys
        shifted = offsets * features * (queries + dim)
        return queries > 1 and shifted < queries * dim * (features + keys)

    def _vectors(self, offsets: Tensor) -> Tensor:
        """``W R`` of each offset, ``[H, head_dim, offsets]``."""
        sines, cosines = self.bias.waves(offsets.unsqueeze(-1))
        with torch.autocast(offsets.device.type, enabled=False):
            weight = self.bias.weight
            first, second = self.bias.split(
                weight.to(torch.promote_types(weight.dtype, torch.float32))
            )
            vectors = first @ sines.to(first.dtype).mT + second @ cosines.to(first.dtype).mT
        return vectors.unflatten(0, (self.bias.heads, -1))

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        heads, features = self.bias.heads, self.bias.head_dim
        if (q.shape[1], q.shape[-1]) != (heads, features):
            raise ValueError(
                f"{q.shape[1]} heads of {q.shape[-1]} features, the bias has {heads} of {features}:"
                f" make it with heads={q.shape[1]} and head_dim={q.shape[-1]}"
            )
        content, offset = (
            part.to(q.dtype).unsqueeze(-2) for part in (self.bias.content, self.bias.offset)
        )
        placed = self._shift(q + offset) if self.shifted is not None else self._turn(q + offset)
        keys = (k * content).sum(-1).unsqueeze(-2)
        return scale * (placed + torch.where(self.shares, keys, 0.0))

    def _turn(self, q: Tensor) -> Tensor:
        """``q · W R(i - j)`` by the query's and the key's own waves."""
        q_sin, q_cos, k_sin, k_cos = (wave.to(q.dtype) for wave in self.waves)
        weight = self.bias.weight.to(q.dtype).unflatten(0, (self.bias.heads, -1))
        sines, cosines = self.bias.split(q @ weight)
        turned = (sines * q_sin + cosines * q_cos, cosines * q_sin - sines * q_cos)
        return torch.cat(turned, -1) @ torch.cat((k_cos, k_sin), -1).mT

    def _shift(self, q: Tensor) -> Tensor:
        """The same from the products with all offsets, the largest first."""
        assert self.shifted is not None
        queries, offsets = q.shape[-2], self.shifted.shape[-1]
        products = (q @ self.shifted.to(q.dtype)).flatten(-2)
        start, row = queries - 1, offsets - 1
        rows = products[..., start : start + queries * row].unflatten(-1, (queries, row))
        return rows[..., : offsets + 1 - queries]


def _offsets(q: Tensor, k: Tensor) -> Tensor | None:
    """All offsets, the largest first, if positions are consecutive on one axis and may be seen."""
    if not looking(q) or q.ndim > 2 or k.ndim > 2 or q.shape[-1] != 1 or not len(q) or not len(k):
        return None
    steps = torch.cat((q.diff(dim=0), k.diff(dim=0)))
    if not (steps == 1).all():
        return None
    return q[-1, 0] - k[0, 0] - torch.arange(len(q) + len(k) - 1, device=q.device)
