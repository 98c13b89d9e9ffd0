"""Biases of transformers models that compute attention by themselves: BLOOM and MPT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def give(argument: str, bias: Tensor | None, hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Put a bias ``[1 or B, H, Lq, Lk]`` into what a layer is called with, in the model's form.

    BLOOM's ``alibi`` is ``[B · H, 1 or Lq, Lk]`` and cannot be missing; MPT's ``position_bias`` is
    ``[H, Lq, Lk]``, the same for all sequences.
    """
    own: Tensor = kwargs[argument]
    if argument == "alibi":
        if bias is None:
            kwargs[argument] = torch.zeros_like(own)
        else:
            batched = bias.to(own.dtype).expand(hidden.shape[0], -1, -1, -1)
            kwargs[argument] = batched.reshape(-1, *bias.shape[-2:])
    else:
        kwargs[argument] = None if bias is None else bias.to(hidden.dtype).squeeze(0)
