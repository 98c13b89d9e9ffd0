from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mmpos.coordinates import Coordinates
from mmpos.frequencies import Extension, geometric, split_pairs
from mmpos.positions import Axes, axis_count
from mmpos.rotary.mrope import check_sections
from mmpos.rotary.rope import RotaryEncoding
from mmpos.rotary.rotation import Rotation


class XDRoPE(RotaryEncoding):
    """HunyuanVL's rotary scheme, which is no rotation where axes differ; for its weights only.

    Features are paired ``(p, p + P)`` and share one spectrum ``base ** (-p / P)``, but sections of
    *all* ``2 P`` features are given to the axes, two times ``sections[a]`` features each, one after
    the other. So the two features of a pair read different axes: norms change, and scores depend on
    more than differences of positions. Text, whose coordinates are all the same number, is turned
    as in 1-D RoPE.

    Source: HunyuanOCR (arXiv:2511.19575) and its code. New models take `MRoPE`, which gives whole
    pairs to axes.

    Args:
        head_dim: features of a head.
        axes: number of axes, or a grid; HunyuanVL's are the order in the text, width, height, and
            the index of the image.
        sections: half the features of each axis; evenly by default, what is left over to the first.
        base: of the one spectrum.
        coordinates: how positions are read.
        extension: context extension of the spectrum: one for all axes, or one or None for each;
            HunyuanVL's ``alpha`` is `NTKAware` with this factor.

    Shape: positions ``[..., L, A]`` → `Rotation` with ``cos``, ``sin`` and ``second
    [..., 1, L, P]``, float32; it has no parameters. A coordinate that a token lacks counts as 0.
    Raises: ValueError for sections that are not half the features in all, or an odd head.

    >>> XDRoPE(16, sections=(2, 2, 2, 2)).pair_axes
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    """

    relative: ClassVar[bool] = False

    def __init__(
        self,
        head_dim: int,
        axes: Axes = 4,
        *,
        sections: Sequence[int] | None = None,
        base: float = 10000.0,
        coordinates: Coordinates | None = None,
        extension: Extension | Sequence[Extension | None] | None = None,
    ) -> None:
        count = axis_count(axes)
        own = None if sections is None else tuple(sections)
        if own is not None:
            check_sections(own, head_dim // 2, count)
        super().__init__(
            head_dim,
            axes,
            base=base,
            split=own or split_pairs(head_dim // 2, count),
            rotary_dim=head_dim,
            layout="half",
            coordinates=coordinates,
            extension=extension,
        )
        self.sections = own

    @property
    def pair_axes(self) -> list[int]:
        """Which axis each feature reads: the first ones of all pairs, then the second ones."""
        return [axis for axis, pairs in enumerate(self.pairs) for _ in range(2 * pairs)]

    def spectrum(self, axis: int) -> list[float]:
        """Frequencies of all pairs before any extension, the same for each axis."""
        return geometric(sum(self.pairs), self._bases()[axis])

    def place(self, row: Tensor, axis: int) -> Tensor:
        """The spectrum ``[..., P]`` at the features ``[..., 2 P]`` that read ``axis``, else 0."""
        own = torch.tensor([axis == other for other in self.pair_axes], device=row.device)
        return torch.where(own, torch.cat((row, row), dim=-1), 0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sections={self.pairs}"

    def _turn(self, cos: Tensor, sin: Tensor, read: Tensor) -> Rotation:
        (cos, other_cos), (sin, other_sin) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        other = (other_cos.float(), other_sin.float())
        return super()._turn(cos, sin, read)._replace(second=other)
