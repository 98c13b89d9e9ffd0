from __future__ import annotations

import torch
from jaxtyping import Float, Num
from torch import Tensor

from mmpos.additive.base import AdditiveEncoding
from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.frequencies import geometric, split_pairs
from mmpos.positions import Axes, axis_count


class SinusoidalEncoding(AdditiveEncoding):
    """Sines and cosines of the position on each axis, interleaved.

    On an axis with ``C`` of the features, feature ``2i`` is ``sin(x · base^(-2i/C))`` and feature
    ``2i + 1`` the cosine (Attention Is All You Need, arXiv:1706.03762, sec. 3.5). Several axes
    divide the features evenly, the first axis first; what is left over goes to the first.

    Args:
        dim: features of a token, even, at least 2 for each axis.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        base: longest wavelength, over 2π.
        coordinates: how positions are read.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]``, float32; it has no parameters.
    Raises: ValueError for an odd ``dim``, or one too small for the axes.

    >>> [round(x, 3) for x in SinusoidalEncoding(4)(torch.tensor([[1]]))[0].tolist()]
    [0.841, 0.54, 0.01, 1.0]
    """

    def __init__(
        self,
        dim: int,
        axes: Axes = 1,
        *,
        base: float = 10000.0,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__(dim, axes)
        if dim % 2:
            raise ValueError(f"dim must be even for pairs of sine and cosine, got {dim}")
        self.split = split_pairs(dim // 2, axis_count(axes))
        self.base = base
        self.coordinates = reading(coordinates)
        geometric(1, base)

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        read = self.coordinates(positions, axes=self.axes, extent=extent, training=self.training)
        known = ~read.isnan()
        features = []
        for axis, pairs in enumerate(self.split):
            spectrum = torch.tensor(
                geometric(pairs, self.base), dtype=read.dtype, device=read.device
            )
            x, has = read[..., axis, None], known[..., axis, None]
            angle = torch.where(has, x, 0.0) * spectrum
            waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)
            features.append(torch.where(has, waves, 0.0))
        return torch.cat(features, dim=-1).float()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, axes={self.axes}, base={self.base}"
