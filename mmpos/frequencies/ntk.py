from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.frequencies.extension import Extension, check_factor, check_original, needed


@dataclass(frozen=True, kw_only=True)
class NTKAware(Extension):
    """Slow pairs are interpolated, fast ones kept: ``f[p] · factor ** (-p / (P - 1))``.

    This is the spectrum of the base ``base · factor ** (P / (P - 1))``, ``P`` pairs: the first
    frequency stays, the last is divided by ``factor``. Frequencies between meet angles beyond those
    of training, so a factor somewhat larger than the extension is usual.

    Source: YaRN (arXiv:2309.00071, sec. 3.1), after bloc97. It is static: the same at all lengths
    (HunyuanVL's ``alpha``).

    Args:
        factor: how much slower the last pair turns.

    Raises: ValueError for a factor below 1, or fewer than 2 pairs.

    >>> longer = mmpos.RotaryEncoding(8, base=1000, extension=mmpos.frequencies.NTKAware(factor=8))
    >>> [round(float(f), 4) for f in longer.frequencies(torch.float32, torch.device("cpu"))[0, 0]]
    [1.0, 0.0889, 0.0079, 0.0007]
    """

    factor: float

    def __post_init__(self) -> None:
        check_factor(self, self.factor)

    def check(self, pairs: int, base: float) -> None:
        _two_pairs(self, pairs)

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        return frequencies * self.factor ** -_progress(frequencies)


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Extension):
    """NTK-aware scaling that grows with the sequence, from its trained length on.

    A sequence of ``n`` tokens has the factor ``max(1, 1 + factor · (n / original_length - 1))``: it
    is turned as in training up to ``original_length``, and ``factor`` says how fast the scaling
    grows from there. Each sequence of a batch has its own. Keys in a cache were turned with the
    frequencies of the length they were turned at: while decoding, pass the same length throughout.

    Source: YaRN (arXiv:2309.00071, sec. 3.3), after emozilla; ``dynamic`` in transformers, whose
    formula this is (that of the paper is ``factor=1``).

    Args:
        original_length: tokens in training.
        factor: how fast the scaling grows.

    Raises: ValueError for a factor below 1, an original length not above 0, fewer than 2 pairs, or
    in the call for a missing length.

    >>> encoding = mmpos.RotaryEncoding(
    ...     128, extension=mmpos.frequencies.DynamicNTK(factor=2, original_length=2048)
    ... )
    >>> lengths = torch.tensor([100, 4096])
    >>> tuple(encoding(mmpos.positions.sequence(4096), length=lengths).cos.shape)
    (2, 1, 4096, 64)
    """

    needs_length: ClassVar[bool] = True

    original_length: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_factor(self, self.factor)
        check_original(self.original_length)

    def check(self, pairs: int, base: float) -> None:
        _two_pairs(self, pairs)

    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        beyond = (needed(self, length) / self.original_length - 1).clamp_min(0)
        factor = 1 + self.factor * beyond
        return frequencies * factor.unsqueeze(-1) ** -_progress(frequencies)


def _progress(frequencies: Tensor) -> Tensor:
    """From 0 at the first pair to 1 at the last."""
    pairs = frequencies.shape[-1]
    return torch.arange(pairs, dtype=frequencies.dtype, device=frequencies.device) / (pairs - 1)


def _two_pairs(extension: Extension, pairs: int) -> None:
    if pairs < 2:
        raise ValueError(
            f"{type(extension).__name__} keeps the first pair and slows the last: the axis needs 2 "
            f"pairs or more, it has {pairs}; PositionInterpolation works with one"
        )
