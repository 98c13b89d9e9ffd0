from __future__ import annotations

import math
from abc import ABC, abstractmethod

from jaxtyping import Float, Num
from torch import Tensor, nn

from mmpos.coordinates import Coordinates, Extent, read_both, reading
from mmpos.positions import Axes, axis_count, check_size
from mmpos.spec import Specified


class ContentTerms(ABC):
    """What a bias that looks at content adds to attention, for given positions.

    `mmpos.attend` takes it as its bias. It then forms all scores and weights, ``B · H · Lq · Lk``
    numbers each: content terms cost that memory, in which kernels for fixed biases save.
    """

    shape: tuple[int, int, int, int]
    """``[batch, head, query, key]`` of what is added, 1 for a batch that shares it."""

    @abstractmethod
    def scores(
        self,
        q: Float[Tensor, "batch head query head_dim"],
        k: Float[Tensor, "batch head key head_dim"],
        scale: float,
    ) -> Float[Tensor, "#batch head query key"]:
        """What is added to ``scale · q kᵀ``."""

    def values(
        self, weights: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query head_dim"] | None:
        """What is added to the output, given the attention weights; None is nothing."""
        return None


class ContentBias(Specified, nn.Module, ABC):
    """Terms of attention that depend on queries and keys as well as on their positions.

    It is called once per forward pass, and gives what `mmpos.attend` and `prepare` take as
    ``bias``. Positions and what they mean are as for `AttentionBias`. ``head_dim`` must be given; a
    `mmpos.models.Transformer` gives it to classes and their partials in its slots.
    """

    def __init__(
        self,
        heads: int,
        axes: Axes = 1,
        *,
        head_dim: int | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        super().__init__()
        check_size("heads", heads)
        if head_dim is None:
            raise TypeError(
                f"{type(self).__name__} needs head_dim, the features of a head, such as head_dim=64"
            )
        check_size("head_dim", head_dim)
        axis_count(axes)
        self.heads = heads
        self.axes = axes
        self.head_dim: int = head_dim
        self.coordinates = reading(coordinates)

    def forward(
        self,
        queries: Num[Tensor, "*#batch query axes"],
        keys: Num[Tensor, "*#batch key axes"],
        extent: Extent | None = None,
    ) -> ContentTerms:
        """The terms for tokens at the positions ``queries`` and ``keys``."""
        q, k = read_both(
            self.coordinates,
            queries,
            keys,
            axes=self.axes,
            extent=extent,
            training=self.training,
        )
        terms = self.terms(q, k)
        terms.shape = (math.prod(q.shape[:-2]), self.heads, q.shape[-2], k.shape[-2])
        return terms

    @abstractmethod
    def terms(self, q: Tensor, k: Tensor) -> ContentTerms:
        """The terms for coordinates that were read, ``[..., Lq, A]`` and ``[..., Lk, A]``."""

    def extra_repr(self) -> str:
        return f"heads={self.heads}, axes={self.axes}, head_dim={self.head_dim}"
