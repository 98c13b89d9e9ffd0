from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.additive.base import AdditiveEncoding
from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.frequencies import geometric, split_pairs
from mmpos.positions import Axes, axis_count

Layout = Literal["interleaved", "half_per_axis", "half"]


class SinusoidalEncoding(AdditiveEncoding):
    """Sines and cosines of the position on each axis.

    An axis with ``P`` pairs has ``sin(x · base^(-p/P))`` and the cosine of the same, for ``p < P``
    (Attention Is All You Need, arXiv:1706.03762, sec. 3.5, where ``2 P`` is the width). Several
    axes have blocks of features, side by side; a coordinate that a token lacks leaves its block
    zero. The default is that paper's; the arguments give the other published forms:

    - tensor2tensor, fairseq, Whisper: ``layout="half", endpoint=True``; Marian: ``layout="half"``;
    - timm's 2-D default: ``layout="half"``; MoCo v3 (arXiv:2104.02057): ``layout="half_per_axis"``;
      MAE (arXiv:2111.06377): that, width first: ``order=(1, 0)``; V-JEPA's videos
      (arXiv:2404.08471): that, ``split=(dim // 4, dim // 8, dim // 8)``;
    - vit-pytorch: ``layout="half_per_axis", endpoint=True, order=(1, 0)``, in 3-D
      ``order=(2, 1, 0), split=3 * (dim // 6,)``;
    - positional-encodings on ``A`` axes: ``split=A * (ceil(dim / (2 * A)),)``.

    Args:
        dim: features of a token, even, at least 2 for each axis.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        base: longest wavelength, over 2π.
        layout: ``interleaved``, a sine and its cosine next to each other; ``half_per_axis``, the
            sines of an axis, then its cosines; ``half``, the sines of all axes, then all cosines.
        endpoint: whether the last frequency of an axis is ``1 / base`` itself: the exponent is then
            ``-p / (P - 1)``, other frequencies for the same pairs.
        order: in which order the axes' blocks stand, as a permutation; by default the first first.
        split: pairs of each axis, in the axes' own order; evenly by default, what is left over to
            the first. A split of fewer features than ``dim`` is followed by zeros; of one of more,
            the last features are cut off.
        coordinates: how positions are read.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``, float32; it has no parameters.
    Raises: ValueError for an odd ``dim`` or one too small for the axes, a base that is not above 0,
    an unknown layout, an order that is no permutation, or a split that leaves an axis nothing.

    >>> [round(x, 3) for x in SinusoidalEncoding(4)(torch.tensor([[1]]))[0].tolist()]
    [0.841, 0.54, 0.01, 1.0]
    """

    def __init__(
        self,
        dim: int,
        axes: Axes = 1,
        *,
        base: float = 10000.0,
        layout: Layout = "interleaved",
        endpoint: bool = False,
        order: Sequence[int] | None = None,
        split: Sequence[int] | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(dim, axes)
        if dim % 2:
            raise ValueError(f"dim must be even for pairs of sine and cosine, got {dim}")
        if layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
        self.base = base
        self.layout: Layout = layout
        self.endpoint = endpoint
        self.order = None if order is None else tuple(order)
        self.split = None if split is None else tuple(split)
        self.coordinates = reading(coordinates)
        geometric(1, base)
        if sorted(self.blocks) != list(range(axis_count(axes))):
            raise ValueError(
                f"order={self.order} must name each of the {axis_count(axes)} axes once, by its "
                f"number from 0 to {axis_count(axes) - 1}"
            )
        self._check_split()

    @property
    def pairs(self) -> tuple[int, ...]:
        """Pairs of each axis."""
        if self.split is not None:
            return self.split
        return split_pairs(self.dim // 2, axis_count(self.axes))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The axes in the order of their blocks."""
        return tuple(range(axis_count(self.axes))) if self.order is None else self.order

    def _check_split(self) -> None:
        pairs, axes = self.pairs, axis_count(self.axes)
        if len(pairs) != axes or min(pairs) < 1:
            raise ValueError(
                f"split={self.split} must give each of the {axes} axes 1 pair or more, "
                f"{self.dim // 2} in all to fill dim={self.dim}"
            )
        kept = self.dim - 2 * sum(pairs)  # negative: features that are cut off
        last = pairs[self.blocks[-1]]
        if kept <= -(sum(pairs) if self.layout == "half" else 2 * last):
            raise ValueError(
                f"split={self.split} takes {2 * sum(pairs)} features, and cutting them off at "
                f"dim={self.dim} leaves {'no cosines' if self.layout == 'half' else 'an axis none'}"
                f": use {self.dim // 2} pairs in all, or a few more"
            )

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        read = self.coordinates(positions, axes=self.axes, extent=extent, training=self.training)
        known = ~read.isnan()
        sines, cosines = [], []
        for axis in self.blocks:
            spectrum = torch.tensor(self._spectrum(axis), dtype=read.dtype, device=read.device)
            x, has = read[..., axis, None], known[..., axis, None]
            angle = torch.where(has, x, 0.0) * spectrum
            sines.append(torch.where(has, angle.sin(), 0.0))
            cosines.append(torch.where(has, angle.cos(), 0.0))
        waves = zip(sines, cosines, strict=True)
        if self.layout == "interleaved":
            features = [torch.stack(pair, dim=-1).flatten(-2) for pair in waves]
        elif self.layout == "half_per_axis":
            features = [part for pair in waves for part in pair]
        else:
            features = sines + cosines
        out = torch.cat(features, dim=-1).float()
        return nn.functional.pad(out, (0, self.dim - out.shape[-1]))  # cuts, if it is negative

    def _spectrum(self, axis: int) -> list[float]:
        pairs = self.pairs[axis]
        if not self.endpoint or pairs == 1:
            return geometric(pairs, self.base)
        return [*geometric(pairs - 1, self.base), 1 / self.base]

    def extra_repr(self) -> str:
        parts = [f"dim={self.dim}, axes={self.axes}, base={self.base}, layout={self.layout}"]
        parts += ["endpoint=True"] if self.endpoint else []
        parts += [f"order={self.order}"] if self.order is not None else []
        parts += [f"split={self.split}"] if self.split is not None else []
        return ", ".join(parts)
