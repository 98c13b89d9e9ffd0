from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmpos.coordinates import Coordinates
from mmpos.frequencies import Extension, Length
from mmpos.positions import Axes
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Layout
from mmpos.rotary.temperature import LogTemperature

Init = Literal["random", "axial"]


class MixedRotaryEncoding(RotaryEncoding):
    """RoPE along learned directions: pair ``p`` turns by ``m[p] · Σ_a x[a] · directions[h, a, p]``.

    Source: RoPE-ViT's mixed RoPE (arXiv:2403.13298, sec. 3.2), for any number of axes. The pairs
    are divided into as many groups as there are axes, each with the spectrum ``m`` of an axis of
    `RotaryEncoding`. A group begins with one direction, a row of a random rotation of the axes, one
    rotation for each head; with two axes these are RoPE-ViT's ``(cos φ, sin φ)`` and
    ``(cos(φ + π/2), sin(φ + π/2))``. What is learned is the direction of every pair, relative to
    its ``m``, so that slow pairs learn in steps of their own size: the published ``freqs`` are
    ``m · directions`` (see `take_frequencies`).

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        heads: heads that have directions of their own; those of queries and keys alike, so with
            fewer key heads it is 1, which all heads share.
        init: ``random`` rotations, or ``axial``: each group along its axis, where the encoding is
            `RotaryEncoding` bit for bit.
        base, split, rotary_dim, trailing, order, layout, coordinates, extension, temperature: as
            in `RotaryEncoding`. Layers have directions of their own by one encoding for each.

    Directions are read as they are. Rounded to half precision they are other directions, in
    bfloat16 off by up to 0.002 radians for each unit of position: train them in float32.

    Shape: ``directions [H, A, P]``; positions ``[..., L, A]`` → `Rotation` with ``cos`` and
    ``sin [..., H, L, P]``, float32. A token without a place is not turned; a coordinate that it
    lacks counts as 0.
    Raises: ValueError for an unknown init or no heads, and as `RotaryEncoding`.

    >>> encoding = MixedRotaryEncoding(64, axes=2, heads=3)
    >>> tuple(encoding.directions.shape)
    (3, 2, 32)
    >>> tuple(encoding(mmpos.positions.grid(4, 6)).cos.shape)
    (3, 24, 32)
    """

    directions: nn.Parameter

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 2,
        *,
        heads: int = 1,
        init: Init = "random",
        base: float | Sequence[float] = 10.0,
        split: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        trailing: bool = False,
        order: Sequence[int] | None = None,
        layout: Layout = "interleaved",
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
        temperature: LogTemperature | None = None,
    ) -> None:
        super().__init__(
            head_dim,
            axes,
            base=base,
            split=split,
            rotary_dim=rotary_dim,
            trailing=trailing,
            order=order,
            layout=layout,
            coordinates=coordinates,
            extension=extension,
            temperature=temperature,
        )
        if heads < 1:
            raise ValueError(f"heads must be 1 or more, got {heads}")
        if init not in get_args(Init):
            raise ValueError(f"init must be one of {get_args(Init)}, got {init!r}")
        self.heads = heads
        self.init: Init = init
        self.directions = nn.Parameter(torch.empty(heads, len(self.pairs), sum(self.pairs)))
        self.reset_parameters()

    @classmethod
    def from_axial(cls, rotary: RotaryEncoding, heads: int = 1) -> MixedRotaryEncoding:
        """An encoding that turns as ``rotary`` does, bit for bit, and can learn to turn otherwise.

        It has the spectrum of ``rotary``, its extension, and all its other options.

        Raises: TypeError for an encoding other than `RotaryEncoding` itself.

        >>> axial = mmpos.RotaryEncoding(64, axes=2, base=100)
        >>> MixedRotaryEncoding.from_axial(axial, heads=3).base
        100
        """
        if type(rotary) is not RotaryEncoding:
            raise TypeError(f"expected a RotaryEncoding, got {type(rotary).__name__}")
        return cls(
            rotary.head_dim,
            rotary.axes,
            heads=heads,
            init="axial",
            base=rotary.base,
            split=rotary.split,
            rotary_dim=rotary.rotary_dim,
            trailing=rotary.trailing,
            order=rotary.order,
            layout=rotary.layout,
            coordinates=rotary.coordinates,
            extension=rotary.extension,
            temperature=rotary.temperature,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the directions anew, or set them along the axes."""
        if self.init == "random":
            groups = _rotations(self.heads, len(self.pairs))
        else:
            groups = torch.eye(len(self.pairs), device="cpu").expand(self.heads, -1, -1)
        self.directions.copy_(groups[:, self.pair_axes].mT)

    @torch.no_grad()
    def take_frequencies(self, frequencies: Float[Tensor, "heads axes pairs"]) -> None:
        """Take over learned frequencies, radians per unit of each axis.

        RoPE-ViT keeps ``freqs [A, layers, heads · P]``, timm ``[A, layers, heads, P]``: a layer's
        are ``freqs[:, layer].unflatten(-1, (heads, P)).transpose(0, 1)``, with the columns first.
        Pairs at rest stay at rest.

        Raises: ValueError for another shape than that of ``directions``.
        """
        if frequencies.shape != self.directions.shape:
            raise ValueError(
                f"expected frequencies [heads, axes, pairs] of shape "
                f"{tuple(self.directions.shape)}, got {tuple(frequencies.shape)}"
            )
        magnitude = super().frequencies(torch.float64, torch.device("cpu")).sum(-2, keepdim=True)
        given = frequencies.to("cpu", torch.float64)
        known = torch.where(magnitude > 0, magnitude, 1)
        self.directions.copy_(torch.where(magnitude > 0, given / known, 0))

    def frequencies(
        self, dtype: torch.dtype, device: torch.device, length: Length | None = None
    ) -> Float[Tensor, "*batch head axes pairs"]:
        own = super().frequencies(dtype, device, length)
        magnitude = own.sum(-2, keepdim=True)  # of one number and zeros: exact
        return self.directions.to(dtype) * magnitude

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, init={self.init}"


def _rotations(count: int, axes: int) -> Tensor:
    """Rotations ``[count, A, A]``, uniform over all, from the generator of the CPU."""
    q, r = torch.linalg.qr(torch.randn(count, axes, axes, dtype=torch.float64, device="cpu"))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    mirrored = torch.linalg.det(q) < 0
    q[mirrored, 0] *= -1
    return q
