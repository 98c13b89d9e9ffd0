from __future__ import annotations

from torch import Tensor

from mmpos.coordinates import Extent
from mmpos.frequencies import Length
from mmpos.positions import axis_count
from mmpos.rotary import RotaryEncoding


def length_for(
    rotary: RotaryEncoding,
    tokens: int | Tensor,
    extent: Extent | None,
    given: Length | None,
    segments: Tensor | None,
) -> Length | None:
    """What the context extension of an encoding takes for the length.

    That is what was given, or the real tokens of each row, or its grid; None where no extension
    asks for it.
    Raises: ValueError for rows of several documents or images, each of which has its own.
    """
    if given is not None or not rotary.needs_length:
        return given
    if segments is not None or (isinstance(extent, Tensor) and extent.ndim == 3):
        raise ValueError(
            "a context extension here depends on the length, and what is packed in a row has "
            "lengths of its own: pass one length for all, or pad"
        )
    if axis_count(rotary.axes) == 1:
        return tokens if isinstance(tokens, Tensor) else max(1, tokens)
    return tuple(extent.unbind(-1)) if isinstance(extent, Tensor) else extent
