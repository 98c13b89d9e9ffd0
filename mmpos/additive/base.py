from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Extent
from mmpos.positions import Axes, axis_count, check_size
from mmpos.spec import Specified


class AdditiveEncoding(Specified, nn.Module, ABC):
    """A vector for each token, to be added to it once, before the first layer.

    Shape: positions ``[..., L, A]`` → ``[..., L, dim]`` in float32. A token without a place gets
    zeros, unless the encoding has a row for it.
    """

    def __init__(self, dim: int, axes: Axes = 1) -> None:
        super().__init__()
        check_size("dim", dim)
        self.dim = dim
        self.axes = axes
        axis_count(axes)

    @abstractmethod
    def forward(
        self, positions: Num[Tensor, "*batch length axes"], extent: Extent | None = None
    ) -> Float[Tensor, "*batch length dim"]:
        """The vectors for tokens at ``positions``, on a grid of ``extent`` cells."""
