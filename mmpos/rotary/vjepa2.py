from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from mmpos.coordinates import Coordinates
from mmpos.frequencies import Extension
from mmpos.positions import Axes, axis_count
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Rotation


class VJEPA2Encoding(RotaryEncoding):
    """What V-JEPA 2's weights were trained with, which is no rotation; for those weights only.

    Its code (arXiv:2506.09985) pairs features ``(2p, 2p + 1)``, but gives feature ``c`` the angle
    ``c mod P`` of the ``P`` of its axis, so that the two features of a pair turn by different
    angles: norms change, and scores depend on more than differences of positions. Each of the
    ``A`` axes has ``2 ⌊⌊head_dim / A⌋ / 2⌋`` features, the rest of the head passes.

    New models take the rotation that was meant: `RotaryEncoding` with the ``split`` that this
    encoding has as ``pairs``, ``(10, 10, 10)`` for 64 features and 3 axes.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid: time, height and width.
        base: longest wavelength, over 2π.
        coordinates: how positions are read; the action-conditioned predictor's are `Scaled`.
        extension: context extension: one for all axes, or one or None for each.

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos``, ``sin`` and ``second
    [..., 1, L, P]``, float32; it has no parameters. A token without a place passes unchanged.
    Raises: ValueError for fewer than 2 features for each axis.

    >>> VJEPA2Encoding(64).pairs
    (10, 10, 10)
    """

    relative: ClassVar[bool] = False

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 3,
        *,
        base: float | Sequence[float] = 10000.0,
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
    ) -> None:
        count = axis_count(axes)
        share = head_dim // count // 2
        if share < 1:
            raise ValueError(
                f"{head_dim} features cannot be divided among {count} axes: "
                f"use at least {2 * count}"
            )
        super().__init__(
            head_dim,
            axes,
            base=base,
            split=(share,) * count,
            coordinates=coordinates,
            extension=extension,
        )

    def _turn(self, cos: Tensor, sin: Tensor, read: Tensor) -> Rotation:
        first, second = [], []
        for axis, pairs in enumerate(self.pairs):
            start = sum(self.pairs[:axis])
            first += [start + 2 * pair % pairs for pair in range(pairs)]
            second += [start + (2 * pair + 1) % pairs for pair in range(pairs)]
        other = (cos[..., second].float(), sin[..., second].float())
        return super()._turn(cos[..., first], sin[..., first], read)._replace(second=other)
