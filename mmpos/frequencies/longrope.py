from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor, check_original, needed


@dataclass(frozen=True, kw_only=True)
class LongRoPE(Extension):
    """Each pair has a searched factor of its own: ``f[p] / long_factor[p]`` for long sequences.

    Sequences of up to ``original_length`` tokens have ``short_factor``, longer ones
    ``long_factor``; each sequence of a batch by its own length. cos and sin are multiplied by
    ``sqrt(1 + ln(s) / ln(original_length))``, ``s`` the extension, at all lengths. Keys in a cache
    were turned with the factors of the length they were turned at: while decoding, pass the same
    length throughout. Factors that differ from layer to layer are one encoding for each layer.

    Source: LongRoPE (arXiv:2402.13753, sec. 3), as in Phi-3 (arXiv:2404.14219): without the paper's
    first tokens that are not interpolated.

    Args:
        short_factor, long_factor: a positive number for each pair of the axis.
        original_length: tokens in training.
        factor: extended length over ``original_length``; or
        max_length: the extended length.
        attention_factor: multiplies cos and sin in place of the formula.

    Raises: ValueError for factors that are not above 0 or not one for each pair, an original length
    not above 1, none of ``factor``, ``max_length`` and ``attention_factor`` (one must say how much
    cos and sin grow) or both of the first two; in the call for a missing length.

    >>> encoding = mmpos.RotaryEncoding(
    ...     4,
    ...     extension=mmpos.frequencies.LongRoPE(
    ...         short_factor=[1, 1], long_factor=[1, 8], original_length=4096, max_length=131072
    ...     ),
    ... )
    >>> round(float(encoding(torch.tensor([[0]]), length=1).cos[0, 0, 0]), 6)
    1.190238
    """

    needs_length: ClassVar[bool] = True

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_length: float
    factor: float | None = None
    max_length: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        check_original(self.original_length)
        for name in ("short_factor", "long_factor"):
            given = tuple(getattr(self, name))
            object.__setattr__(self, name, given)
            if not all(0 < factor < math.inf for factor in given):
                raise ValueError(f"{name} must be above 0 for each pair, got {given}")
        if self.factor is not None and self.max_length is not None:
            raise ValueError(
                f"factor={self.factor} and max_length={self.max_length} say the same: pass one"
            )
        if self.attention_factor is not None:
            if not 0 < self.attention_factor < math.inf:
                raise ValueError(f"attention_factor must be above 0, got {self.attention_factor}")
        elif self.factor is None and self.max_length is None:
            raise ValueError(
                "cos and sin grow with the extension: pass factor, max_length or attention_factor"
            )
        elif not self.original_length > 1:
            raise ValueError(f"original_length must be above 1, got {self.original_length}")
        if self.factor is not None:
            check_factor(self, self.factor)
        if self.max_length is not None and not self.max_length >= self.original_length:
            raise ValueError(
                f"max_length={self.max_length} must be original_length={self.original_length} or "
                "more"
            )

    def check(self, pairs: int, base: float) -> None:
        for name in ("short_factor", "long_factor"):
            given = len(getattr(self, name))
            if given != pairs:
                raise ValueError(
                    f"{name} has {given} numbers, the axis has {pairs} pairs: pass one for each"
                )

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or (self.max_length or 0) / self.original_length
        return math.sqrt(1 + math.log(factor) / math.log(self.original_length))

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        short, long = (
            torch.tensor(factors, dtype=frequencies.dtype, device=frequencies.device)
            for factors in (self.short_factor, self.long_factor)
        )
        beyond = needed(self, length).unsqueeze(-1) > self.original_length
        return frequencies / torch.where(beyond, long, short)
