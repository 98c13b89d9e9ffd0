from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor, check_original


@dataclass(frozen=True, kw_only=True)
class YaRN(Extension):
    """Fast pairs are kept, slow ones interpolated, those between blended; scores are sharpened.

    ``f · ((1 - r) + r / factor)``, with a ramp ``r`` from 0 to 1 over the index of the pair. It
    begins at the pair that turns ``beta_fast`` times within the trained length, and ends at the one
    that turns ``beta_slow`` times. Pair ``P · ln(L / 2πn) / ln(base)`` of ``P`` turns ``n`` times
    in ``L`` tokens; the end is clamped to ``2 P - 1``. cos and sin are multiplied by
    ``0.1 · ln(factor) + 1``.

    Source: YaRN (arXiv:2309.00071, sec. 3.2 and 3.4), with the ramp of its code, in which published
    weights were trained: the paper's is linear in the number of turns, and differs by up to
    three quarters.

    DeepSeek's ``mscale`` has two parts. The one here multiplies cos and sin by
    ``m(mscale) / m(mscale_all_dim)``, ``m(k) = 0.1 · k · ln(factor) + 1``; the other multiplies the
    scale of the softmax by ``m(mscale_all_dim) ** 2``, and belongs to attention: pass
    ``scale=head_dim ** -0.5 * m ** 2`` to `mmpos.attend`.

    Args:
        factor: extended length over trained length.
        original_length: tokens in training.
        beta_fast, beta_slow: turns within ``original_length`` at the ends of the ramp.
        truncate: whether the ends are rounded outwards to whole pairs (GPT-OSS does not).
        attention_factor: multiplies cos and sin, whatever ``factor`` and ``mscale`` are.
        mscale, mscale_all_dim: as above, both or neither.

    Raises: ValueError for a factor below 1, betas out of order, one mscale alone, a base not above
    1, or an axis so short that no pair turns ``beta_slow`` times in it.

    >>> encoding = mmpos.RotaryEncoding(
    ...     128, layout="half", extension=mmpos.frequencies.YaRN(factor=16, original_length=4096)
    ... )
    >>> round(float(encoding(torch.tensor([[0]])).cos[0, 0, 0]), 5)
    1.27726
    """

    factor: float
    original_length: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_original(self.original_length)
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError(
                "expected 0 < beta_slow <= beta_fast, "
                f"got beta_slow={self.beta_slow} and beta_fast={self.beta_fast}"
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < math.inf:
            raise ValueError(f"attention_factor must be above 0, got {self.attention_factor}")
        pair = (self.mscale, self.mscale_all_dim)
        if (pair[0] is None) != (pair[1] is None) or any(m is not None and m < 0 for m in pair):
            raise ValueError(
                "mscale and mscale_all_dim are two numbers of 0 or more, or both None: "
                f"got {self.mscale} and {self.mscale_all_dim}"
            )

    def check(self, pairs: int, base: float) -> None:
        if not base > 1:
            raise ValueError(f"YaRN needs a base above 1, got {base}")
        if not self.original_length > 2 * math.pi * self.beta_slow:
            raise ValueError(
                f"no pair turns beta_slow={self.beta_slow} times in original_length="
                f"{self.original_length}: YaRN would interpolate them all, which is "
                f"PositionInterpolation(factor={self.factor})"
            )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._growth(1.0)
        return self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    def _growth(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1

    def ramp(self, pairs: int, base: float) -> tuple[float, float]:
        """The pairs at which the ramp begins and ends."""
        low, high = (
            pairs * math.log(self.original_length / (2 * math.pi * turns)) / math.log(base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, 2 * pairs - 1)

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        pairs = frequencies.shape[-1]
        low, high = self.ramp(pairs, base)
        index = torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device)
        share = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * ((1 - share) + share / self.factor)
