"""Encodings of mmpos within a transformers model: where they are kept, and asked in each pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmpos.additive import AdditiveEncoding
from mmpos.interop.transformers.attention import BASES, NAME, base_of, choose, implementation
from mmpos.interop.transformers.biases import give
from mmpos.positions import axis_count
from mmpos.rotary import Rotation, rotate
from mmpos.rotary.rotation import Layout


class Taken(NamedTuple):
    """What a model had of its own, where, and what is there instead."""

    module: nn.Module
    name: str
    value: Any
    instead: Any


class Now:
    """The sequences at hand: where they begin, and what the encodings give for them."""

    def __init__(self, ids: Tensor | None, mask: Tensor | None, before: int) -> None:
        self.ids = ids
        self.mask = mask
        self.before = before
        self.asked = False
        self.learned = False
        self.positions: Tensor = torch.empty(0)
        self.rotations: list[tuple[Rotation, Rotation]] = []
        self.biases: list[Tensor] = []

    def __reduce__(self) -> tuple:
        return Now, (None, None, 0)


class Places(nn.Module):
    """The three places of a transformers model. A place that is not replaced is the model's own.

    Args:
        axes: of positions, or the grid.
        types: the type of each layer.
        names: of the arguments of the network.
        length: to which frequencies that depend on the length are frozen.
    """

    def __init__(
        self, axes: Any, types: list[str | None], names: list[str], length: int | None
    ) -> None:
        super().__init__()
        depth = len(types)
        self.axes = axes
        self.types = types
        self.names = names
        self.length = length
        self.layout: Layout | None = None
        self.additive: AdditiveEncoding | None = None
        self.rotary: Any = None
        self.bias: Any = None
        self.rotary_of: list[int | None] = [None] * depth
        self.bias_of: list[int | None] = [None] * depth
        self.replaced: set[str] = set()
        self.adds = False
        self.in_attention = False
        self.uses_interface = False
        self.seen_layout: Layout | None = None
        self.argument: str | None = None
        self.configs: list[Any] = []
        self.taken: list[Taken] = []
        self.now = Now(None, None, 0)

    @property
    def takes_bias(self) -> bool:
        """Whether the model's own bias is off."""
        return "bias" in self.replaced

    @property
    def hooked(self) -> bool:
        """Whether layers must be given something."""
        return self.uses_interface or self.adds or self.argument is not None

    def encodings(self, place: str) -> list[Any]:
        """The encodings of a place."""
        held = getattr(self, place)
        return [] if held is None else list(held) if isinstance(held, nn.ModuleList) else [held]

    def of_type(self, layer_type: str | None) -> Any:
        """The rotary encoding that all layers of a type share."""
        index = self.rotary_of[self.types.index(layer_type)]
        return None if index is None else self.encodings("rotary")[index]

    def read(self, ids: Tensor) -> Tensor:
        """Positions ``[B, L, A]`` of position ids: ``[B, L]``, or one row of these for each axis.

        A row before those of the axes, which tells documents apart, is left out.
        """
        axes = axis_count(self.axes)
        if ids.ndim == 3:
            return ids[-axes:].movedim(0, -1)
        ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
        return ids.unsqueeze(-1).expand(*ids.shape, axes)

    def length_of(self, encoding: Any, positions: Tensor) -> Any:
        """The length that an encoding is told: the frozen one, or one more than the last place."""
        if not encoding.needs_length:
            return None
        return self.length or positions.amax((-2, -1)) + 1

    def ask(self, hidden: Tensor) -> None:
        """Ask all encodings for the tokens of ``hidden [B, L, D]`` and those in the cache."""
        now, length = self.now, hidden.shape[1]
        now.asked = True
        queries, keys = self._places(now, length, hidden.device)
        now.positions = queries
        if self.in_attention:
            for encoding in self.encodings("rotary"):
                frozen = self.length_of(encoding, queries)
                own = encoding(queries, length=frozen)
                other = own if keys is queries else encoding(keys, length=frozen)
                now.rotations.append((self._seen(own), self._seen(other.dual)))
        parts = (self.rotary, self.bias) if self.training and torch.is_grad_enabled() else ()
        now.learned = any(p.requires_grad for part in parts if part for p in part.parameters())
        now.biases = [encoding(queries, keys) for encoding in self.encodings("bias")]
        now.biases = [each if each.ndim == 4 else each.unsqueeze(0) for each in now.biases]

    def placed(
        self, layer: int, now: Now | None, query: Tensor, key: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys turned, and the bias of a layer for the keys it has."""
        if now is None:
            raise RuntimeError(
                "attention was called without its model, which knows the positions: call the model"
            )
        index, length = self.rotary_of[layer], key.shape[-2]
        if length > now.before + query.shape[-2]:
            raise ValueError(
                f"attention got {length} keys for {now.before + query.shape[-2]} tokens: encodings "
                "of mmpos in attention need a cache that holds no empty places"
            )
        if self.in_attention and index is not None:
            own, other = now.rotations[index]
            query, key = rotate(query, own), rotate(key, _last(other, length))
        index = self.bias_of[layer]
        return query, key, None if index is None else now.biases[index][..., -length:]

    def _seen(self, rotation: Rotation) -> Rotation:
        return rotation if self.seen_layout is None else rotation._replace(layout=self.seen_layout)

    def _places(self, now: Now, length: int, device: Any) -> tuple[Tensor, Tensor]:
        """Positions of queries ``[B, L, A]`` and of keys, those in the cache before them."""
        ids, mask, before = now.ids, now.mask, now.before
        whole: Tensor | None = None
        told = mask is not None and mask.ndim == 2 and mask.shape[1] == before + length
        if mask is not None and told and self.argument != "position_bias" and not _full(mask):
            whole = (mask.long().cumsum(1) - 1).clamp_min(0).to(device)
        if ids is None:
            every = torch.arange(before + length, device=device)[None]
            ids = (every if whole is None else whole)[:, before:]
        queries = self.read(ids.to(device))
        if not before:
            return queries, queries
        if queries.shape[-1] > 1:
            raise ValueError(
                f"keys in a cache have places on {queries.shape[-1]} axes, which it does not hold: "
                "pass use_cache=False"
            )
        first = queries[:, :1]
        if whole is None:
            earlier = first + torch.arange(-before, 0, device=device)[None, :, None]
        else:
            earlier = whole[:, :before, None] + (first - whole[:, before : before + 1, None])
        earlier = earlier.expand(max(len(earlier), len(queries)), -1, -1)
        return queries, torch.cat((earlier, queries.expand(len(earlier), -1, -1)), 1)


def enter(stack: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """The hook of a network: note where its tokens are."""
    places: Places = stack.mmpos
    given = dict(zip(places.names, args, strict=False)) | kwargs
    cache = given.get("cache")
    cache = given.get("past_key_values") if cache is None else cache
    for config in places.configs:
        _choose_again(config, stack)
    if getattr(cache, "is_compileable", False) and (places.uses_interface or places.argument):
        raise ValueError(
            f"a {type(cache).__name__} holds empty places, and encodings in attention need to know "
            "where each key is: use a DynamicCache"
        )
    before = 0 if cache is None else int(cache.get_seq_length())
    mask = given.get("attention_mask")
    places.now = Now(given.get("position_ids"), mask if isinstance(mask, Tensor) else None, before)


def arrive(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The hook of a layer: give it what it needs of the encodings."""
    places, index = layer.mmpos
    now: Now = places.now
    hidden = args[0] if args else kwargs["hidden_states"]
    if not now.asked:
        places.ask(hidden)
    if places.adds and index == 0:
        hidden = hidden + places.additive(now.positions).to(hidden.dtype)
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs["hidden_states"] = hidden
    if now.learned and getattr(layer, "gradient_checkpointing", False):
        how = getattr(layer._gradient_checkpointing_func, "keywords", {})
        if how.get("use_reentrant"):
            raise ValueError(
                "checkpointing with use_reentrant=True gives no gradients to encodings: pass "
                "use_reentrant=False"
            )
    if places.argument is not None:
        own = places.bias_of[index]
        give(places.argument, None if own is None else now.biases[own], hidden, kwargs)
    if places.uses_interface:
        kwargs[NAME] = now
    return args, kwargs


def _choose_again(config: Any, stack: Any) -> None:
    """Have attention ask places, also after another implementation of transformers was chosen."""
    name = config._attn_implementation
    if name in BASES:
        choose(config, implementation(name))
    elif base_of(name) not in BASES or base_of(name) == name:
        raise ValueError(
            f"the attention of {type(stack).__name__} was set to {name!r}, which takes no "
            "encodings of mmpos: set it to 'sdpa'"
        )


def _last(rotation: Rotation, length: int) -> Rotation:
    """A rotation of the last tokens, which a cache of a window holds."""
    if rotation.cos.shape[-2] == length:
        return rotation

    def cut(part: Tensor | None) -> Any:
        return None if part is None else part[..., -length:, :]

    second = None if rotation.second is None else tuple(map(cut, rotation.second))
    return rotation._replace(
        cos=cut(rotation.cos), sin=cut(rotation.sin), scale=cut(rotation.scale), second=second
    )


def _full(mask: Tensor) -> bool:
    """Whether a mask hides nothing."""
    return not torch.compiler.is_compiling() and bool(mask.all())
