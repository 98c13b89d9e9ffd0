from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Num
from torch import Tensor

from mmpos.positions import check
from mmpos.spec import Specified


@dataclass(frozen=True, kw_only=True)
class LogTemperature(Specified):
    """Queries grow with the logarithm of their position, so that long softmaxes stay sharp.

    ``1 + beta · ln(1 + ⌊(x + offset) / length⌋)`` with ``steps`` (Llama 4's layers without RoPE:
    length 8192, offset 1; Ministral 3: offset 0), else ``1 + beta · ln(max((x + offset) / length,
    1))``. Keys keep their size. Growing with ``ln n`` comes from Scalable-Softmax
    (arXiv:2501.19399).

    Args:
        length: positions up to which nothing is scaled, usually the trained length.
        beta: growth per e-fold.
        offset: added to the position.
        steps: whether the scale grows in steps of ``length``, or smoothly beyond it.
        axis: which axis of the positions is read.

    Shape: positions ``[..., L, A]`` → ``[..., 1, L, 1]``, float32. A token without a place is not
    scaled.
    Raises: ValueError for a length that is not above 0, or positions in half precision.

    >>> scaled = LogTemperature(length=4, offset=0.0)
    >>> scaled(torch.tensor([[0.0], [3.0], [4.0], [20.0]])).flatten().tolist()
    [1.0, 1.0, 1.06931471824646, 1.1791759729385376]
    """

    length: float
    beta: float = 0.1
    offset: float = 1.0
    steps: bool = True
    axis: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.length < math.inf:
            raise ValueError(f"length must be above 0 and finite, got {self.length}")
        if not (math.isfinite(self.beta) and math.isfinite(self.offset)):
            raise ValueError(f"beta and offset must be finite, got {self.beta} and {self.offset}")

    def __call__(
        self, positions: Num[Tensor, "*batch length axes"]
    ) -> Float[Tensor, "*batch 1 length 1"]:
        """The scale of queries at ``positions``."""
        check(positions, positions.shape[-1])
        exact = positions.float() if positions.device.type == "mps" else positions.double()
        ratio = (exact[..., self.axis] + self.offset) / self.length
        grown = torch.log1p(ratio.floor().clamp_min(0)) if self.steps else ratio.clamp_min(1).log()
        scale = 1 + self.beta * torch.where(ratio.isnan(), 0.0, grown)
        return scale.float()[..., None, :, None]
