from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mmpos.spec import Specified

Length = int | Sequence[int | Tensor] | Tensor
"""Tokens along the axes that are extended: one number for all, one for each axis, or a tensor
``[...]`` with one for each sequence of a batch (also as the entry of an axis)."""


class Extension(Specified, ABC):
    """Context extension: a transformation of the frequencies of one axis.

    A rotary encoding takes one for all its axes, or one (or None) for each.
    """

    needs_length: ClassVar[bool] = False
    """Whether the frequencies depend on how long the sequence is."""

    @property
    def magnitude(self) -> float:
        """Multiplies cos and sin, so that scores between turned features grow by its square."""
        return 1.0

    def check(self, pairs: int, base: float) -> None:
        """Raise ValueError unless a spectrum ``base ** (-p / pairs)`` can be extended so."""

    @abstractmethod
    def __call__(
        self,
        frequencies: Float[Tensor, " pairs"],
        *,
        base: float,
        length: Float[Tensor, "*batch"] | None = None,
    ) -> Float[Tensor, "*#batch pairs"]:
        """The extended frequencies, in the dtype of those given.

        Args:
            frequencies: the spectrum ``base ** (-p / P)`` of one axis.
            base: of that spectrum.
            length: tokens of each sequence along this axis; for extensions that need it.
        """


def check_factor(extension: Extension, factor: float, name: str = "factor") -> None:
    """Raise ValueError unless ``factor`` extends."""
    if isinstance(factor, bool | str) or not 0 < factor < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {factor}")
    if factor < 1:
        raise ValueError(
            f"{type(extension).__name__} only extends: {name} is how many times longer, 1 or "
            f"more, got {factor}: did you mean {1 / factor:g}?"
        )


def check_original(original_length: float) -> None:
    """Raise ValueError unless ``original_length`` is a length."""
    if not 0 < original_length < math.inf:
        raise ValueError(f"original_length must be above 0 and finite, got {original_length}")


def needed(extension: Extension, length: Tensor | None) -> Tensor:
    """``length``; raises ValueError if it is missing."""
    if length is None:
        raise ValueError(
            f"{type(extension).__name__} depends on the length of the sequence: pass length, and "
            "while decoding the length that was frozen at its start"
        )
    return length


def axis_lengths(
    length: Length | None, axes: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """One length, number or batch of numbers, for each axis.

    Raises: ValueError for a sequence that has not one number for each axis, or numbers below 1.
    """
    if length is None:
        return [None] * axes
    each = length if isinstance(length, Sequence) else [length] * axes
    if len(each) != axes:
        raise ValueError(
            f"length has {len(each)} numbers, the encoding has {axes} axes: pass a tensor if it "
            "is one for each sequence"
        )
    if any(not isinstance(one, Tensor) and one < 1 for one in each):
        raise ValueError(f"length must be 1 token or more, got {length}")
    return [
        one.to(device, dtype)
        if isinstance(one, Tensor)
        else torch.full((), one, dtype=dtype, device=device)
        for one in each
    ]
