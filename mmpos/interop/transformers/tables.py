"""In place of a table of a transformers model: an encoding of mmpos, called as the table is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmpos.interop.transformers.sites import Child, offset


def _of_ids(input: Tensor) -> Tensor:
    return input


def _of_sequence(
    input_ids: Tensor, cache_length: int = 0, position_ids: Tensor | None = None
) -> Tensor:
    return _counted(input_ids.shape[1], cache_length, position_ids, input_ids.device)


def _of_shape(
    input_ids_shape: Any, cache_length: int = 0, position_ids: Tensor | None = None
) -> Tensor:
    device = None if position_ids is None else position_ids.device
    return _counted(input_ids_shape[1], cache_length, position_ids, device)


def _of_mask(
    attention_mask: Tensor, cache_length: int = 0, position_ids: Tensor | None = None
) -> Tensor:
    if position_ids is None:
        seen = attention_mask.long()
        position_ids = (seen.cumsum(1) * seen - 1)[:, cache_length:]
    return position_ids


def _counted(length: int, before: int, ids: Tensor | None, device: Any) -> Tensor:
    if ids is None:
        ids = torch.arange(length, device=device) + before
    return ids.unsqueeze(0) if ids.ndim == 1 else ids


_CALLS: dict[tuple[str, ...], Callable[..., Tensor]] = {
    ("input",): _of_ids,
    ("input_ids", "cache_length", "position_ids"): _of_sequence,
    ("input_ids_shape", "cache_length", "position_ids"): _of_shape,
    ("attention_mask", "cache_length", "position_ids"): _of_mask,
}
"""How tables are called, by the names of their arguments, and the ids that they then read.

All but the first add their offset themselves.
"""


class Added(nn.Module):
    """What an encoding adds at the positions that a table is asked for, from 0 on.

    A position before 0, as some models give padding, has no place: nothing is added there. A table
    with as many rows as the model's or more, those before the first token among them, is read as
    that one.
    """

    def __init__(self, places: Any, table: Any, stack: Any) -> None:
        super().__init__()
        self.places = (places,)
        self.stack = (stack,)
        self.call = _CALLS[_named(table)]
        self.num_embeddings: int = table.num_embeddings
        self.embedding_dim: int = table.embedding_dim
        first = offset(table)
        whole = getattr(places.additive, "grid", (0,))[0] >= table.num_embeddings
        self.shift = (first if whole else 0) - (first if self.call is _of_ids else 0)
        self.negative = not whole and (first > 0 or self.call is _of_mask)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (places,), (stack,) = self.places, self.stack
        like = next(p for p in stack.parameters() if p.is_floating_point())
        ids = self.call(*args, **kwargs).to(like.device) + self.shift
        if places.additive is None:
            return torch.zeros(*ids.shape, self.embedding_dim, dtype=like.dtype, device=ids.device)
        if self.negative:
            ids = torch.where(ids < 0, torch.nan, ids.float())
        return places.additive(ids.unsqueeze(-1)).to(like.dtype)


def check_table(child: Child) -> None:
    """Raise ValueError for a table that is called in a way that is not known."""
    table = child.module
    if not isinstance(table, nn.Embedding) or _named(table) not in _CALLS:
        raise ValueError(
            f"{type(table).__name__} ({child.name}) is called in a way of its own, with "
            f"{', '.join(_named(table))}: it can only be kept"
        )


def _named(table: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(type(table).forward).parameters)[1:]
