"""Batches of rows that have a text, an image, a sound, or some of them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from .padding import padded

MODALITIES = ("text", "image", "audio")


class Parts(NamedTuple):
    """What a row has: text, int64 ``[L]``, one byte or more; an image, float32 ``[C, H, W]``; the
    frames of a sound, float32 ``[bins, T]``. What it lacks is None.
    """

    text: Tensor | None = None
    image: Tensor | None = None
    audio: Tensor | None = None

    def without(self, blank: Iterable[str]) -> "Parts":
        """The rest, without these modalities."""
        return self._replace(**dict.fromkeys(blank))


class Mixed(NamedTuple):
    """B rows of any modalities, as `tasks.MultimodalClassification` takes them.

    A modality that no row has is None, values and mask. Where some have it, the others have zeros
    and a mask that is False throughout; where all is real, the mask is None.
    """

    text: Tensor | None
    """Bytes ``[B, L]``, int64, 0 beyond the end of each row."""
    text_mask: Tensor | None
    """``[B, L]``, True for what is real."""
    image: Tensor | None
    """``[B, C, H, W]``."""
    image_mask: Tensor | None
    """``[B]``, True for rows that have one."""
    audio: Tensor | None
    """Frames ``[B, bins, T]``, 0 beyond the end of each row."""
    audio_mask: Tensor | None
    """``[B, T]``, True for what is real."""
    step: float
    """Seconds from a frame to the next."""


Item = tuple[Parts, Any]
"""A row and its labels, or its name."""


def batch(items: Sequence[Item], step: float) -> tuple[Mixed, Any]:
    """Rows in one batch, and all labels or names; ``step`` is of their frames."""
    rows, labels = zip(*items, strict=True)
    text, text_mask = _sequences([row.text for row in rows])
    frames, audio_mask = _sequences([None if r.audio is None else r.audio.mT for r in rows])
    audio = None if frames is None else frames.mT.contiguous()
    image, image_mask = _images([row.image for row in rows])
    mixed = Mixed(text, text_mask, image, image_mask, audio, audio_mask, step)
    return mixed, default_collate(list(labels))


Masked = tuple[Tensor | None, Tensor | None]


def _sequences(rows: Sequence[Tensor | None]) -> Masked:
    """Rows ``[Lᵢ, …]``, padded, and their mask ``[B, L]``."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None, None
    values, mask = padded([like[:0] if row is None else row for row in rows])
    return values, None if mask.all() else mask


def _images(rows: Sequence[Tensor | None]) -> Masked:
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None, None
    mask = torch.tensor([row is not None for row in rows])
    values = torch.stack([torch.zeros_like(like) if row is None else row for row in rows])
    return values, None if mask.all() else mask
