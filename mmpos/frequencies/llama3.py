from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor, check_original


@dataclass(frozen=True, kw_only=True)
class Llama3(Extension):
    """Slow pairs are interpolated, fast ones kept, those between blended by how often they turn.

    A pair turns ``t = original_length · f / 2π`` times in the trained length. It keeps its
    frequency if ``t`` is above ``high_frequency_factor``, has ``f / factor`` if ``t`` is below
    ``low_frequency_factor``, and between them ``f · (b + (1 - b) / factor)``, with ``b`` linear in
    ``t`` from 0 to 1.

    Source: Llama 3.1 (arXiv:2407.21783, and its code); Llama 3.2 uses a factor of 32.

    Args:
        factor: how much slower the slow pairs turn.
        original_length: tokens in training.
        low_frequency_factor, high_frequency_factor: turns at the ends of the blend; the same
            number for a step without one (Llama 4).

    Raises: ValueError for a factor below 1, an original length not above 0, or turns out of order.

    >>> extension = mmpos.frequencies.Llama3(factor=8, original_length=8192)
    >>> mmpos.build(extension.spec()) == extension
    True
    """

    factor: float
    original_length: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_original(self.original_length)
        if not 0 < self.low_frequency_factor <= self.high_frequency_factor < math.inf:
            raise ValueError(
                "expected 0 < low_frequency_factor <= high_frequency_factor, "
                f"got {self.low_frequency_factor} and {self.high_frequency_factor}"
            )

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        turns = self.original_length / (2 * math.pi) * frequencies
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = (
            ((turns - low) / (high - low)).clamp(0, 1) if low < high else (turns >= low).to(turns)
        )
        return frequencies * (kept + (1 - kept) / self.factor)
