from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmpos.coordinates import Coordinates
from mmpos.frequencies import Extension, angles
from mmpos.positions import Axes
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Layout, Rotation


class XPosEncoding(RotaryEncoding):
    """RoPE whose scores fade with distance: queries times ``ζ[p] ** u``, keys ``ζ[p] ** -u``.

    ``u = (x - center) / scale_base`` of the axis of the pair, and
    ``ζ[p] = (p / P + gamma) / (1 + gamma)`` for its ``P`` pairs: the fast ones fade most. The score
    of pair ``p`` is that of RoPE times ``ζ[p] ** ((query - key) / scale_base)``, so it does not
    depend on ``center``, and it *grows* for keys after the query: xPos is for causal attention.

    Source: xPos (arXiv:2212.10554, algorithm 1), where the center is the middle of the
    sequence at hand. Here it is the caller's and does not move, so that keys in a cache stay valid.

    Queries and keys themselves grow with the distance from the center. With the default gamma and
    scale base, keys of size 1 overflow float16 from 4532 positions after the center on, and queries
    from as many before it; float32 (and bfloat16) from 36,000: put the center in the middle of the
    longest sequence, and divide longer ones by a larger scale base.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid (its length counts; `Scaled` coordinates refer to it).
        scale_base: positions over which a pair fades by its ``ζ``.
        gamma: ``ζ`` of the first pair is ``gamma / (1 + gamma)``.
        center: where queries and keys keep their size; one for all axes, or one for each.
        base, split, rotary_dim, trailing, order, layout, coordinates, extension: as in
            `RotaryEncoding`.

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos`` and ``sin [..., 1, L, P]`` for
    queries, and its ``dual`` for keys; float32, no parameters. A token without a place is neither
    turned nor scaled.
    Raises: ValueError for a scale base or gamma that is not above 0, and as `RotaryEncoding`.

    >>> rotation = XPosEncoding(64)(mmpos.positions.sequence(5))
    >>> q, k = torch.randn(2, 1, 3, 5, 64)
    >>> tuple((mmpos.rotate(q, rotation) @ mmpos.rotate(k, rotation.dual).mT).shape)
    (1, 3, 5, 5)
    """

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 1,
        *,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        center: float | Sequence[float] = 0.0,
        base: float | Sequence[float] = 10000.0,
        split: Sequence[int] | None = None,
        rotary_dim: int | None = None,
        trailing: bool = False,
        order: Sequence[int] | None = None,
        layout: Layout = "interleaved",
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
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
        )
        if not (0 < scale_base < math.inf and 0 < gamma < math.inf):
            raise ValueError(
                "scale_base and gamma must be above 0, "
                f"got scale_base={scale_base} and gamma={gamma}"
            )
        self.scale_base = scale_base
        self.gamma = gamma
        self.center = tuple(center) if isinstance(center, list | tuple) else center
        if isinstance(self.center, tuple) and len(self.center) != len(self.pairs):
            raise ValueError(
                f"center has {len(self.center)} entries, the encoding has {len(self.pairs)} axes"
            )

    def _turn(self, cos: Tensor, sin: Tensor, read: Tensor) -> Rotation:
        def double(numbers: Sequence[float] | float) -> Tensor:
            return torch.tensor(numbers, dtype=read.dtype, device=read.device)

        fading = []
        for axis, pairs in enumerate(self.pairs):
            zeta = [(pair / pairs + self.gamma) / (1 + self.gamma) for pair in range(pairs)]
            fading.append(self.place(double([math.log(each) for each in zeta]), axis))
        u = (read - double(self.center)) / self.scale_base
        grown = angles(u, torch.stack(fading).unsqueeze(0)).exp()
        keys = super()._turn(cos / grown, sin / grown, read)
        return super()._turn(cos * grown, sin * grown, read)._replace(keys=keys)

    def extra_repr(self) -> str:
        own = f"scale_base={self.scale_base}, gamma={self.gamma}, center={self.center}"
        return f"{super().extra_repr()}, {own}"
