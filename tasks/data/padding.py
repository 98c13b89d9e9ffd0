"""Rows of different lengths in one batch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Padded(NamedTuple):
    """Rows ``[B, L, …]`` padded by 0 at their ends, and a mask ``[B, L]``, True for what is real.

    It is what a `mmpos.models.Classifier` takes.
    """

    values: Tensor
    mask: Tensor


def padded(rows: Sequence[Tensor]) -> Padded:
    """Rows ``[Lᵢ, …]``, one or more, as long as the longest of them."""
    lengths = torch.tensor([len(row) for row in rows])
    values = pad_sequence(list(rows), batch_first=True)
    return Padded(values, torch.arange(values.shape[1]) < lengths[:, None])
