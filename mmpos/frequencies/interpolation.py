from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Extension):
    """All pairs turn slower: ``f / factor``, as if positions were divided by ``factor``.

    Source: Position Interpolation (arXiv:2306.15595, sec. 3.2, eq. 4); ``linear`` in transformers.
    Neighbours move together too, which costs some accuracy at short range.

    Args:
        factor: extended length over trained length.

    Raises: ValueError for a factor below 1.

    >>> double = mmpos.frequencies.PositionInterpolation(factor=2)
    >>> rotation = mmpos.RotaryEncoding(64, extension=double)(torch.tensor([[8]]))
    >>> torch.equal(rotation.cos, mmpos.RotaryEncoding(64)(torch.tensor([[4]])).cos)
    True
    """

    factor: float

    def __post_init__(self) -> None:
        check_factor(self, self.factor)

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        return frequencies / self.factor
