"""Where a transformers model keeps its positions: its stack of layers, and what it has of its own.

Nothing here changes a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

TABLES = (
    "wpe",
    "position_embeddings",
    "position_embedding",
    "positions_embed",
    "embed_positions",
)
"""Names under which models have what they add to tokens."""

CROSS = ("cross", "encdecattention", "encoder_attn")
"""Parts of the names of attention to another sequence."""

KNOWN_BIASES = {"bloom": "alibi", "mpt": "position_bias"}
"""Models off the attention interface: the argument of a layer that is its bias."""

OWN_BIASES = ("relative", "rel_pos", "rel_embeddings", "alibi", "distance_embedding")
"""Parts of names that tell of a bias."""


class Child(NamedTuple):
    """A module and where it is."""

    parent: nn.Module
    name: str
    module: Any


@dataclass(frozen=True)
class Site:
    """The parts of a model that know of positions, or would.

    Args:
        stack: the network of layers, which gets the ids of its tokens' positions.
        layers: its layers.
        attentions: the self-attention of each, None where it is not on transformers' interface.
        rotary: the module that gives cos and sin, if there is one.
        table: the module that gives what is added, if there is one.
        relative: attention modules with T5's bias.
    """

    stack: Any
    layers: list[Any]
    attentions: list[Any]
    rotary: Child | None
    table: Child | None
    relative: list[Any]

    @property
    def kind(self) -> str:
        """The model's name in transformers."""
        return self.stack.config.model_type

    @property
    def of_tokens(self) -> bool:
        """Whether it takes tokens in a row, not images or clips."""
        return "pixel" not in str(getattr(self.stack, "main_input_name", ""))

    @property
    def turning(self) -> Child:
        """The rotary module of a model that has one."""
        assert self.rotary is not None
        return self.rotary

    @property
    def types(self) -> list[str | None]:
        """The type of each layer, where the rotary module is asked for one."""
        if self.rotary is None or not by_type(self.rotary.module):
            return [None] * len(self.layers)
        return list(self.stack.config.layer_types[: len(self.layers)])

    @property
    def axes(self) -> int | tuple[int, ...]:
        """Axes of positions: those of M-RoPE, or one with the tokens that the model is made for."""
        sections = getattr(self.rotary.module, "mrope_section", None) if self.rotary else None
        if sections is not None:
            sections = next(iter(sections.values())) if isinstance(sections, dict) else sections
            return len(sections)
        longest = getattr(self.stack.config, "max_position_embeddings", None)
        if self.table is not None and isinstance(self.table.module, nn.Embedding):
            longest = self.table.module.num_embeddings - offset(self.table.module)
        return (longest,) if isinstance(longest, int) and longest > 0 else 1


def network(model: object) -> Any:
    """The network of layers within a model of transformers.

    Raises: TypeError for what is no such model; ValueError for one of several networks.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        within = [n for n in ("module", "_orig_mod", "base_model") if hasattr(model, n)]
        hint = f": give its .{within[0]}" if within else ""
        raise TypeError(f"a model of transformers is needed, got {type(model).__name__}{hint}")
    networks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
        and not any(isinstance(m, PreTrainedModel) for m in list(module.modules())[1:])
    }
    if len(networks) > 1:
        names = " or ".join(f".{name}" for name in networks)
        raise ValueError(
            f"{type(model).__name__} has {len(networks)} networks, each with positions of its own: "
            f"give one of them, {names}"
        )
    return next(iter(networks.values()))


def read(stack: Any) -> Site:
    """What a network has.

    Raises: ValueError if it has no layers, or rotary modules that cannot be told apart.
    """
    layers = _layers(stack)
    inside = {id(part) for layer in layers for part in layer.modules()}
    found = [child for child in _children(stack) if id(child.module) not in inside]
    rotary = [c for c in found if "Rotary" in type(c.module).__name__ and _asked_by_ids(c.module)]
    if getattr(stack.config, "alibi", False):
        rotary = []  # Falcon's is there and not used
    if len(rotary) > 1:
        raise ValueError(
            f"{type(stack).__name__} has {len(rotary)} rotary modules, expected one: "
            f"{', '.join(child.name for child in rotary)}"
        )
    tables = [c for c in found if c.name in TABLES]
    return Site(
        stack=stack,
        layers=layers,
        attentions=[_attention(layer) for layer in layers],
        rotary=rotary[0] if rotary else None,
        table=tables[0] if tables and stack.config.model_type != "roformer" else None,
        relative=[
            part
            for layer in layers
            for part in layer.modules()
            if getattr(part, "has_relative_attention_bias", False) is True and on_interface(part)
        ],
    )


def on_interface(module: Any) -> bool:
    """Whether a module hands its queries and keys to transformers' attention interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def takes_any(module: Any) -> bool:
    """Whether a module's forward hands on arguments that it does not know."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def by_type(rotary: nn.Module) -> bool:
    """Whether a rotary module is asked for the type of a layer."""
    parameter = inspect.signature(type(rotary).forward).parameters.get("layer_type")
    return parameter is not None and not hasattr(rotary, "inv_freq")


def foreign(site: Site, place: str) -> str | None:
    """The name of something that fills a place of a model and that cannot be taken off."""
    if place == "bias" and site.kind == "falcon" and getattr(site.stack.config, "alibi", False):
        return "alibi"
    known = {id(part) for attention in site.relative for part in attention.modules()}
    known |= {id(child.module) for child in (site.rotary, site.table) if child is not None}
    for path, module in site.stack.named_modules():
        if id(module) in known:
            continue
        own = path.rpartition(".")[2]
        rotary = "rotary" in type(module).__name__.lower()
        if place == "rotary" and rotary:
            return path
        for name in (own, *module._parameters):
            said = name.lower()
            if place == "bias" and any(part in said for part in OWN_BIASES):
                return name
            if place == "additive" and "pos" in said and "emb" in said and not rotary:
                return name
    return None


def offset(table: Any) -> int:
    """The row of a table that the first token of a sequence has."""
    padding = table.padding_idx
    return getattr(table, "offset", 0 if padding is None else padding + 1)


def _layers(stack: Any) -> list[Any]:
    for module in stack.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            held = [any("Attention" in type(p).__name__ for p in e.modules()) for e in module]
            if any(held):
                return list(module)
    raise ValueError(f"{type(stack).__name__} has no layers with attention")


def _attention(layer: nn.Module) -> Any:
    """The self-attention of a layer, if it is on the interface."""
    for name, part in layer.named_modules():
        said = f"{name} {type(part).__name__}".lower()
        crossing = getattr(part, "is_cross_attention", False) or any(c in said for c in CROSS)
        if on_interface(part) and not crossing:
            return part
    return None


def _children(stack: nn.Module) -> Iterator[Child]:
    for parent in stack.modules():
        for name, module in parent.named_children():
            yield Child(parent, name, module)


def _asked_by_ids(module: Any) -> bool:
    names = _names(module)
    return len(names) > 1 and names[1] == "position_ids"


def _names(module: Any) -> Sequence[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]
