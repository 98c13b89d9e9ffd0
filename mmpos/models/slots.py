"""Which encoding each layer has: one for all, one for each, or a pattern that repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from mmpos.bias import ContentBias
from mmpos.positions import Axes, axis_count

Slot = Callable[[int, Any], nn.Module]
"""An encoding, or what makes one from the size it serves and the axes: its class, for example."""


def fill(slot: Slot, kind: type | tuple[type, ...], size: str, needed: int, axes: Axes) -> Any:
    """The encoding of a slot; None for `nn.Identity`, which stands for none.

    Args:
        kind: what the slot takes.
        size, needed: the name of the size that the encoding serves, and what it must be.

    Raises: TypeError for an encoding of another kind, ValueError for one made for other sizes.
    """
    if not callable(slot):
        hint = "; make it by mmpos.build" if isinstance(slot, Mapping) else ""
        raise TypeError(
            f"a place takes an encoding, its class or a callable that makes it, got {slot!r}{hint}"
        )
    encoding: Any = slot if isinstance(slot, nn.Module) else slot(needed, axes)
    if isinstance(encoding, nn.Identity):
        return None
    if not isinstance(encoding, kind):
        name = kind[0].__name__ if isinstance(kind, tuple) else kind.__name__
        raise TypeError(
            f"this place takes a kind of {name}, got {type(encoding).__name__}: "
            "additive, rotary and bias are three places for three kinds"
        )
    if getattr(encoding, size) != needed:
        raise ValueError(
            f"{type(encoding).__name__} was made for {size}={getattr(encoding, size)}, "
            f"the transformer needs {needed}: pass its class, or make it with {size}={needed}"
        )
    if axis_count(encoding.axes) != axis_count(axes):
        raise ValueError(
            f"{type(encoding).__name__} was made for {axis_count(encoding.axes)} axes, "
            f"the transformer has {axis_count(axes)}"
        )
    return encoding


def with_head_dim(slot: Any, head_dim: int) -> Any:
    """A slot of biases, told the size of a head if it makes one that needs it: a class, or a
    partial of one, also as a config gives it (of a function that is given the class).
    """
    made = (slot.func, *slot.args) if isinstance(slot, partial) else (slot,)
    content = any(isinstance(part, type) and issubclass(part, ContentBias) for part in made)
    given = isinstance(slot, partial) and slot.keywords.get("head_dim") is not None
    return partial(slot, head_dim=head_dim) if content and not given else slot


def pattern(given: Any, depth: int, name: str) -> list[Any]:
    """What each layer gets: ``given`` for all, or a list of which they take turns.

    Raises: ValueError for a list that does not divide the layers.
    """
    if not isinstance(given, Sequence) or isinstance(given, nn.Module | str):
        return [given] * depth
    if not given or depth % len(given):
        raise ValueError(
            f"{name} is a pattern of {len(given)} layers, which does not divide a depth of {depth}"
        )
    return [given[layer % len(given)] for layer in range(depth)]


def fill_layers(
    slots: Slot | Sequence[Slot] | None,
    make: Callable[[Slot], nn.Module | None],
    depth: int,
    name: str,
    own: bool,
) -> tuple[Any, list[int | None]]:
    """The encodings of all layers, and the index of each layer's, None where it has none.

    `nn.Identity` in a pattern is a layer without one. With ``own`` a callable makes one for each
    layer. The encodings are a single module if all layers share it, else a `ModuleList`.
    """
    made: dict[Any, int | None] = {}
    modules: list[nn.Module] = []
    index: list[int | None] = []
    places = len(slots) if isinstance(slots, Sequence) and not isinstance(slots, str) else 1
    for layer, slot in enumerate(pattern(slots, depth, name)):
        if slot is None:
            index.append(None)
            continue
        key = slot if isinstance(slot, nn.Module) else layer if own else layer % places
        if key not in made:
            module = make(slot)
            made[key] = None if module is None else len(modules)
            modules += [] if module is None else [module]
        index.append(made[key])
    if not modules:
        return None, index
    single = len(modules) == 1 and not isinstance(slots, Sequence)
    return modules[0] if single else nn.ModuleList(modules), index
