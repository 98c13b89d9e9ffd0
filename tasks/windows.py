"""Answers about what is cut into several rows of a batch: windows of a sound, views of a video."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

ROWS = 64
"""Rows that are looked at together when nothing is trained."""


def averaged(
    answer: Callable[..., dict[str, Tensor]],
    owner: Int[Tensor, " rows"] | None,
    *parts: Any,
) -> dict[str, Tensor]:
    """The mean of the logits of each owner's rows.

    Args:
        answer: the logits ``[rows, answers]`` of each question, of as many parts.
        owner: whose each row is, rising from 0; each row is its own if None.
        parts: what ``answer`` takes: tensors with an entry for each row, or what all rows share.
    """
    if owner is None:
        return answer(*parts)
    rows = len(owner)
    size = rows if torch.is_grad_enabled() else ROWS
    found = [
        answer(*(_cut(part, rows, start, start + size) for part in parts))
        for start in range(0, rows, size)
    ]
    owners = int(owner.max()) + 1
    counts = owner.bincount(minlength=owners).unsqueeze(-1)
    answers = {}
    for question in found[0]:
        logits = torch.cat([part[question] for part in found]).float()
        total = logits.new_zeros(owners, logits.shape[-1]).index_add(0, owner, logits)
        answers[question] = total / counts
    return answers


def _cut(part: Any, rows: int, start: int, end: int) -> Any:
    each = isinstance(part, Tensor) and part.ndim and len(part) == rows
    return part[start:end] if each else part
