"""Whether and how encodings of mmpos fit into a transformers model; nothing here changes it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from mmpos.additive import AdditiveEncoding
from mmpos.bias import AttentionBias, ContentBias
from mmpos.interop.transformers.attention import BASES, base_of, seen
from mmpos.interop.transformers.forms import Form, asked, forms, sizes
from mmpos.interop.transformers.places import Places, Taken
from mmpos.interop.transformers.rotations import Turns
from mmpos.interop.transformers.sites import KNOWN_BIASES, Site, foreign, read, takes_any
from mmpos.interop.transformers.tables import Added, check_table
from mmpos.models.slots import fill, fill_layers, with_head_dim
from mmpos.rotary import RotaryEncoding, Rotation
from mmpos.rotary.rotation import Layout

GROWING = ("llama4_text", "ministral3", "mistral4")
"""Models whose attention grows queries by a temperature of its own."""

Keep = Literal["keep"]
KEEP: Keep = "keep"


def kept(given: Any) -> bool:
    """Whether a place is left to the model."""
    return isinstance(given, str) and given == KEEP


def planned(
    stack: Any,
    given: dict[str, Any],
    own: Sequence[str],
    length: int | None,
    layout: Layout | None,
    held: Places | None,
) -> tuple[Places, Site]:
    """Places filled with what is given, and in them how they are asked; no model is changed."""
    unknown = set(own) - {"rotary", "bias"}
    if unknown:
        raise ValueError(f"per_layer names rotary or bias, got {unknown.pop()!r}")
    site = read(stack)
    if not site.of_tokens:
        raise ValueError(
            f"{type(stack).__name__} is a tower of patches, and encodings are put into networks of "
            "tokens in a row: see mmpos.interop.timm for images, and channel_plan for its rotation"
        )
    names = list(inspect.signature(type(stack).forward).parameters)[1:]
    places = Places(site.axes, site.types, names, length)
    replaced = {place for place, slot in given.items() if not kept(slot)}
    if held is not None:
        replaced |= held.replaced
        places.length = held.length if length is None and kept(given["rotary"]) else length
        if layout is None and kept(given["rotary"]):
            layout = held.layout
    places.replaced, places.layout = replaced, layout
    known: dict[str | None, Form] = {}
    if "rotary" in replaced and site.rotary is not None:
        known = forms(site)
        if layout is not None:
            known = {kind: form.of_weights(layout) for kind, form in known.items()}
    elif layout is not None:
        raise ValueError(f"layout={layout!r} is of weights that a rotation turns: pass rotary too")
    heads, own_keys, head_dims = 0, True, {0}
    if replaced & {"rotary", "bias"}:
        if not known and site.rotary is not None:
            known = forms(site)
        heads, own_keys, head_dims = sizes(site, known)
    for place, (kind, size, needed) in {
        "additive": (AdditiveEncoding, "dim", _dim(site)),
        "rotary": (RotaryEncoding, "head_dim", head_dims),
        "bias": ((AttentionBias, ContentBias), "heads", heads),
    }.items():
        if kept(given[place]):
            if held is not None and place in held.replaced:
                setattr(places, place, getattr(held, place))
                if place != "additive":
                    setattr(places, f"{place}_of", getattr(held, f"{place}_of"))
            continue

        def make(slot: Any, kind: Any = kind, size: str = size, needed: Any = needed) -> Any:
            if isinstance(needed, set):
                needed = _one(slot, needed)
            made = fill(with_head_dim(slot, min(head_dims)), kind, size, needed, site.axes)
            if isinstance(made, ContentBias):
                raise ValueError(
                    f"{type(made).__name__} looks at queries and keys, which the attention of "
                    "transformers does not show: use mmpos.models.Transformer"
                )
            return made

        if place == "additive":
            places.additive = None if given[place] is None else make(given[place])
        else:
            filled, of = fill_layers(given[place], make, len(site.layers), place, place in own)
            setattr(places, place, filled)
            setattr(places, f"{place}_of", of)
    _plan_additive(site, places)
    _plan_rotary(site, places, known, heads, own_keys)
    _plan_bias(site, places)
    if places.uses_interface:
        _check_interface(site, known)
    if length is not None and not any(each.needs_length for each in places.encodings("rotary")):
        raise ValueError(f"length={length} is for frequencies that depend on it, and none here do")
    return places, site


def _one(slot: Any, head_dims: set[int]) -> int:
    """The size of a head that a slot is for.

    Raises: ValueError for a callable where layers have heads of several sizes.
    """
    if isinstance(slot, RotaryEncoding) and slot.head_dim in head_dims:
        return slot.head_dim
    if len(head_dims) > 1 and not isinstance(slot, nn.Identity):
        raise ValueError(
            f"layers have heads of {sorted(head_dims)} features: give a list with an encoding for "
            "each layer"
        )
    return min(head_dims)


def _dim(site: Site) -> int:
    table = site.table.module if site.table is not None else None
    return getattr(table, "embedding_dim", None) or site.stack.config.hidden_size


def _plan_additive(site: Site, places: Places) -> None:
    if "additive" not in places.replaced:
        return
    if getattr(places.additive, "prefix_rows", 0):
        raise ValueError(
            "prefix rows would be read by padding: make the encoding with prefix_rows=0"
        )
    if site.table is not None:
        check_table(site.table)
        new = Added(places, site.table.module, site.stack)
        places.taken.append(Taken(*site.table, new))
        return
    own = foreign(site, "additive")
    if own is not None:
        raise ValueError(
            f"{type(site.stack).__name__} has positions of its own ({own}) that cannot be taken "
            "off: keep them"
        )
    if places.additive is not None:
        if getattr(site.stack.config, "layerdrop", 0):
            raise ValueError(
                "layerdrop is above 0, and the first layer adds positions: set it to 0"
            )
        places.adds = True


def _plan_rotary(
    site: Site, places: Places, known: dict[str | None, Form], heads: int, own_keys: bool
) -> None:
    if "rotary" not in places.replaced:
        return
    _let_grow(site, places)
    own = foreign(site, "rotary")
    if own is not None:
        raise ValueError(
            f"{type(site.stack).__name__} has a rotation of its own ({own}) that cannot be taken "
            "off: keep it"
        )
    carried = True
    for index, encoding in enumerate(places.encodings("rotary")):
        rotation = _tried(places, encoding)
        per_head = rotation.cos.shape[-3]
        if per_head > 1 and (per_head != heads or not own_keys):
            shared = "" if own_keys else ", which share keys"
            raise ValueError(
                f"{type(encoding).__name__} turns each of {per_head} heads, the model has "
                f"{heads}{shared}"
            )
        for kind, form in known.items():
            of = [
                i
                for i, own, attention in zip(
                    places.rotary_of, places.types, site.attentions, strict=True
                )
                if own == kind and attention is not None
            ]
            if index not in of:
                continue
            misfit = form.misfit(rotation, encoding.head_dim)
            if misfit is not None:
                raise ValueError(misfit)
            carried &= form.carries(rotation) and set(of) == {index}
    if places.rotary is not None and not (known and carried):
        places.in_attention = places.uses_interface = True
        for form in known.values():
            places.seen_layout = form.seen_layout
    if site.rotary is not None:
        places.taken.append(Taken(*site.rotary, Turns(places, known)))


def _let_grow(site: Site, places: Places) -> None:
    """Leave to a model's code what it does with its queries itself: grow them by their position."""
    if site.kind not in GROWING:
        return
    given = places.encodings("rotary")
    places.rotary_of = [
        None if index is None or given[index].rotary_dim == 0 else index
        for index in places.rotary_of
    ]
    turning = [copy.copy(own) for own in given]  # the caller's stay as they are
    for own in turning:
        own.temperature = None
    if isinstance(places.rotary, nn.ModuleList):
        places.rotary = nn.ModuleList(turning)
    elif turning:
        (places.rotary,) = turning


def _tried(places: Places, encoding: Any) -> Rotation:
    """The rotation of two tokens."""
    like = next(encoding.parameters(), torch.empty(0))
    where = places.read(torch.arange(2, device=like.device)[None])
    training = encoding.training
    with torch.no_grad():
        rotation = encoding.eval()(where, length=2 if encoding.needs_length else None)
    encoding.train(training)
    return rotation


def _plan_bias(site: Site, places: Places) -> None:
    if "bias" not in places.replaced:
        return
    argument = KNOWN_BIASES.get(site.kind)
    if argument is not None:
        if argument == "position_bias" and not all(b.relative for b in places.encodings("bias")):
            raise ValueError(
                f"{type(site.stack).__name__} has one bias for all sequences of a batch, wherever "
                "they begin: it needs one that depends on differences of positions alone"
            )
        places.argument = argument
        return
    own = foreign(site, "bias")
    if own is not None:
        raise ValueError(
            f"{type(site.stack).__name__} has a bias of its own ({own}) that cannot be taken "
            "off: keep it"
        )
    places.uses_interface |= places.bias is not None
    for attention in site.relative:
        for name, instead in (
            ("relative_attention_bias", None),
            ("has_relative_attention_bias", False),
        ):
            places.taken.append(Taken(attention, name, getattr(attention, name), instead))


def _check_interface(site: Site, known: dict[str | None, Form]) -> None:
    for layer, attention, kind in zip(site.layers, site.attentions, site.types, strict=True):
        own = f"{type(site.stack).__name__} computes attention in a way of its own"
        if attention is None or not (takes_any(layer) and takes_any(attention)):
            raise ValueError(
                f"{own}, where these encodings cannot be put: make a transformer with "
                "mmpos.models.Transformer"
            )
        hidden, given = asked(site, attention, known.get(kind))
        if seen(attention, hidden, layer, **given, mmpos=hidden).now is not hidden:
            raise ValueError(
                f"{type(layer).__name__} does not hand on to its attention what it is called with, "
                "so encodings cannot be put there"
            )
    name = base_of(site.stack.config._attn_implementation)
    if name not in BASES:
        raise ValueError(
            f"attention by {name!r} takes no encodings of mmpos: load the model with "
            "attn_implementation='sdpa'"
        )
