from __future__ import annotations

from typing import get_args

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Coordinates, Extent, reading
from mmpos.frequencies import angles, axial, geometric, split_pairs
from mmpos.positions import Axes, axis_count
from mmpos.rotary.rotation import Layout, Rotation


class RotaryEncoding(nn.Module):
    """RoPE: turns pair ``p`` of a head by ``Σ_a x[a] · frequency[a, p]`` radians.

    Source: RoFormer (arXiv:2104.09864, sec. 3.2). Several axes divide the pairs evenly (axial RoPE,
    arXiv:2403.13298, sec. 3.2), the first axis first; what is left over goes to the first axis.
    An axis with ``P`` pairs has the frequencies ``base ** (-p / P)``.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        base: longest wavelength, over 2π; 10000 for text, 100 is usual for patches.
        rotary_dim: how many features, the first of a head, are turned; the exponent counts only
            these, as in GPT-NeoX. All of them by default.
        layout: which features form a pair: ``interleaved``, or ``half`` as in Llama's weights.
        coordinates: how positions are read.

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos`` and ``sin [..., 1, L, P]``, float32;
    it has no parameters. A token without a place is not turned.
    Raises: ValueError for an odd number of features to turn, more than there are, or fewer than 2
    for each axis.

    >>> rotation = RotaryEncoding(64, axes=2, base=100)(mmpos.positions.grid(4, 6))
    >>> tuple(rotation.cos.shape)
    (1, 24, 32)
    """

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 1,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        layout: Layout = "interleaved",
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__()
        width = head_dim if rotary_dim is None else rotary_dim
        if width % 2 or not 2 <= width <= head_dim:
            raise ValueError(
                f"RoPE turns an even number of features between 2 and head_dim={head_dim}, "
                f"got {width}: pass rotary_dim={max(2, min(width, head_dim) // 2 * 2)}"
            )
        if layout not in get_args(Layout):
            raise ValueError(f"layout must be one of {get_args(Layout)}, got {layout!r}")
        geometric(1, base)
        self.head_dim = head_dim
        self.axes = axes
        self.base = base
        self.layout: Layout = layout
        self.split = split_pairs(width // 2, axis_count(axes))
        self.coordinates = reading(coordinates)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "axes pairs"]:
        """Radians per unit of each axis, for each pair."""
        return torch.tensor(axial(self.split, self.base), dtype=dtype, device=device)

    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Rotation:
        """The rotation of tokens at ``positions``, on a grid of ``extent`` cells."""
        read = self.coordinates(positions, axes=self.axes, extent=extent, training=self.training)
        angle = angles(read, self.frequencies(read.dtype, read.device)).unsqueeze(-3)
        return Rotation(angle.cos().float(), angle.sin().float(), self.layout)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, axes={self.axes}, base={self.base}, "
            f"rotary_dim={2 * sum(self.split)}, layout={self.layout}"
        )
