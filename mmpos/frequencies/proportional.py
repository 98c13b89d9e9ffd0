from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor


@dataclass(frozen=True, kw_only=True)
class Proportional(Extension):
    """Only the fastest pairs turn, the others are at rest: the first ``⌊fraction · P⌋`` of ``P``.

    The exponent counts all pairs, so those that turn do so as without it; with ``rotary_dim``, the
    other way to turn a part, it counts those that turn. In the layout ``half`` the features that
    turn are other ones too: a pair is ``(p, p + P)`` with all ``P`` pairs.

    Source: p-RoPE (arXiv:2410.06205, sec. 6); Gemma 4's global layers (``proportional`` in
    transformers, fraction 0.25).

    Args:
        fraction: of the pairs, that turn.
        factor: those that turn do so slower by it.

    Raises: ValueError for a fraction not above 0 or above 1, one in which no pair turns, or a
    factor below 1.

    >>> quarter = mmpos.frequencies.Proportional(fraction=0.25)
    >>> rotation = mmpos.RotaryEncoding(16, extension=quarter)(torch.tensor([[1]]))
    >>> rotation.sin.count_nonzero().item()
    2
    """

    fraction: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0, and 1 at most, got {self.fraction}")
        check_factor(self, self.factor)

    def check(self, pairs: int, base: float) -> None:
        if int(self.fraction * pairs) < 1:
            raise ValueError(
                f"fraction={self.fraction} of {pairs} pairs turns none: "
                f"it must be {1 / max(pairs, 1):g} or more"
            )

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        pairs = frequencies.shape[-1]
        turns = torch.arange(pairs, device=frequencies.device) < int(self.fraction * pairs)
        return torch.where(turns, frequencies / self.factor, 0)
