"""Attention of transformers that asks `Places` first, through its attention interface.

Two implementations are registered, each before one of transformers' own. A model whose
configuration names one of them has its masks made as that one needs them, and those of its
attention modules that hold places hand their queries and keys to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

NAME = "mmpos"
"""The name under which places lie, in the network and in the modules that ask them."""

BASES = ("sdpa", "eager")
"""Implementations of transformers to which a bias can be added."""


def implementation(base: str) -> str:
    """The implementation that asks places before it calls ``base``."""
    return f"{NAME}_{base}"


def base_of(name: str | None) -> str:
    """The implementation behind one of mmpos, else the one named."""
    return (name or "eager").removeprefix(f"{NAME}_")


def choose(config: Any, name: str) -> None:
    """Have a configuration name an implementation, and leave those within it as they are."""
    config._attn_implementation = {"": name}


def register() -> None:
    """Make the implementations known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    masks = AttentionMaskInterface()
    for base in BASES:
        AttentionInterface.register(implementation(base), partial(attend, base))
        AttentionMaskInterface.register(implementation(base), masks[base])


def attend(
    base: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one module; one that holds no places has what ``base`` gives."""
    now = kwargs.pop(NAME, None)
    held = getattr(module, NAME, None)
    if held is not None:
        places, layer = held
        query, key, bias = places.placed(layer, now, query, key)
        if places.takes_bias:
            kwargs.pop("position_bias", None)
        if bias is not None:
            causal = kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            attention_mask = masked(bias, attention_mask, query, causal and base == "sdpa")
    names = inspect.unwrap(type(module).forward).__globals__
    functions = names["ALL_ATTENTION_FUNCTIONS"]
    function = functions.get_interface(base, names.get("eager_attention_forward"))
    return function(module, query, key, value, attention_mask, **kwargs)


def masked(bias: Tensor, mask: Tensor | None, query: Tensor, causal: bool) -> Tensor:
    """``bias [..., H, Lq, Lk]`` in the dtype of queries, lowest where a key is hidden.

    Without a mask a ``causal`` query sees the keys up to its own, counted from the first.
    """
    bias = bias.to(query.dtype)
    if mask is None and causal and query.shape[-2] > 1:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias.expand(query.shape[0], *bias.shape[1:])
    if mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        return torch.where(mask, bias, lowest).expand(query.shape[0], -1, -1, -1)
    return bias + mask


class Seen(Exception):
    """Queries and keys as an attention module hands them on: nothing is computed from them."""

    def __init__(self, now: Any, query: Tensor, key: Tensor) -> None:
        super().__init__("seen")
        self.now = now
        self.query = query
        self.key = key


class Watch:
    """Places that look at queries and keys, and stop there."""

    def placed(self, layer: int, now: Any, query: Tensor, key: Tensor) -> Any:
        raise Seen(now, query, key)


def seen(attention: Any, hidden: Tensor, within: Any = None, **given: Any) -> Seen:
    """Queries ``[B, H, L, D]`` and keys that an attention module makes of hidden states.

    Args:
        within: a module to call instead, of which the attention is a part.
        given: arguments by name; those that are asked for and not given are None.

    Raises: ValueError if it does not come to hand them on.
    """
    called = attention if within is None else within
    parameters = list(inspect.signature(type(called).forward).parameters.values())[2:]
    supplied: dict[str, Any] = {
        "position_ids": torch.arange(hidden.shape[1], device=hidden.device)[None]
    }
    supplied |= {"shared_kv_states": {}}
    asked = {
        each.name: supplied.get(each.name)
        for each in parameters
        if (each.default is each.empty or each.name in supplied)
        and each.kind is each.POSITIONAL_OR_KEYWORD
    } | given
    with _watched(attention), torch.no_grad():
        try:
            called(hidden, **asked)
        except Seen as found:
            return found
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError) as cause:
            said = str(cause).split("\n")[0]
            raise ValueError(
                f"{type(called).__name__} cannot be asked for its queries and keys: {said}"
            ) from cause
    raise ValueError(f"{type(called).__name__} keeps its queries and keys to itself")


@contextmanager
def _watched(attention: Any) -> Iterator[None]:
    register()
    name, held = attention.config._attn_implementation, vars(attention).get(NAME)
    choose(attention.config, implementation("sdpa"))
    setattr(attention, NAME, (Watch(), 0))
    try:
        yield
    finally:
        choose(attention.config, name)
        delattr(attention, NAME)
        if held is not None:
            setattr(attention, NAME, held)
