"""What is different between two ways to know positions, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmpos.frequencies import LongRoPE
from mmpos.interop.transformers.checkpoint import against_weights
from mmpos.interop.transformers.configuration import configuration, encodings, is_part
from mmpos.interop.transformers.difference import Difference
from mmpos.interop.transformers.encodings import Encodings, Part
from mmpos.interop.transformers.words import ranges
from mmpos.rotary import MRoPE, RotaryEncoding
from mmpos.spec import Specified


def compare(first: Any, second: Any, part: Part = "") -> list[Difference]:
    """Every difference that matters between what two models know of positions.

    Args:
        first: a configuration of transformers, its data, a model, or `Encodings`.
        second: another of these, or weights: a state dict or a ``.safetensors`` file, whose
            frequencies (``inv_freq``, in older checkpoints), tables, layers, heads and head sizes
            are held against the configuration; of base and layout they tell no more.
        part: which network, of models that have several; the other may be that network alone.

    Returns: a difference for each of: what fills the three places; of rotations base, type of
        extension, factor, original length and its other numbers, attention factor, layout,
        fraction of the head, sections, temperature, and how far angles are apart; of tables and
        biases their sizes; what scores are multiplied by. Alike, the list is empty.
    Raises: as `encodings`; ValueError for weights of which no name is one of the model's.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 2}
    >>> for difference in compare(llama, {**llama, "rope_theta": 5e5}):
    ...     print(difference)
    base: 10000 and 500000
    angles: apart by up to 265 radians within 2048 positions (pair 6)
    """
    known = _read(first, part)
    if isinstance(second, str | Path) and Path(second).suffix and not Path(second).exists():
        raise ValueError(f"there is no file {second}")
    if isinstance(second, str | Path) and Path(second).is_file():
        if Path(second).suffix != ".safetensors":
            raise ValueError(
                f"weights are read from .safetensors, got {second}: load it with torch, and give "
                "the state dict"
            )
        second = load_file(second)
    if isinstance(second, Mapping) and any(isinstance(own, Tensor) for own in second.values()):
        return against_weights(known, second)
    return differences(known, _read(second, part))


def _read(given: Any, part: Part) -> Encodings:
    """The encodings that are meant; a part is told to a model that has it."""
    if isinstance(given, Encodings):
        return given
    if part and not is_part(configuration(given), part):
        part = ""
    return encodings(given, part)


def differences(first: Encodings, second: Encodings) -> list[Difference]:
    """What is different between encodings, as `compare` tells."""
    found: list[Difference] = []
    if first.layers != second.layers:
        found.append(Difference("layers", str(first.layers), str(second.layers)))
    for place in ("additive", "rotary", "bias"):
        pairs = [each.by_layer(place) for each in (first, second)]
        groups: dict[tuple[int, int], list[int]] = {}
        for layer, (one, two) in enumerate(zip(*pairs, strict=False)):
            groups.setdefault((id(one), id(two)), []).append(layer)
        whole = min(len(own) for own in pairs)
        for layers in groups.values():
            one, two = (own[layers[0]] for own in pairs)
            where = "" if len(layers) == whole else ranges(layers)
            length = first.max_length or second.max_length
            found += [replace(own, layers=where) for own in _between(place, one, two, length)]
    for name in ("scale", "position_offset"):
        mine, other = getattr(first, name), getattr(second, name)
        if not _same(mine, other):
            words = {"scale": "scale of scores", "position_offset": "first position of the table"}
            usual = "head_dim ** -0.5" if name == "scale" else "none"
            said = (usual if own is None else _said(own) for own in (mine, other))
            found.append(Difference(words[name], *said))
    return found


_KINDS = {
    "NoneType": "default",
    "PositionInterpolation": "linear",
    "NTKAware": "static NTK",
    "DynamicNTK": "dynamic",
    "YaRN": "yarn",
    "LongRoPE": "longrope",
    "Llama3": "llama3",
    "Proportional": "proportional",
}
_WORDS = {"original_length": "original length", "low_frequency_factor": "low frequency factor"}
_WORDS |= {"high_frequency_factor": "high frequency factor", "rotary_dim": "features turned"}
_DERIVED = ("attention_factor", "mscale", "mscale_all_dim", "max_length")
_COUNTED = ("axes", "split", "sections", "rotary_dim", "extension")
Found = Iterator[Difference]


def _pair(name: str, one: Any, two: Any, say: Callable[[Any], str]) -> Difference:
    return Difference(name, say(one), say(two))


def _between(place: str, one: Any, two: Any, length: int | None) -> Found:
    """What is different between two encodings in a place, name by name."""
    if one is None or two is None:
        if one is not two:
            yield _pair(place, one, two, _said)
    elif isinstance(one, RotaryEncoding) and isinstance(two, RotaryEncoding):
        yield from _between_rotations(one, two, length)
    elif type(one) is not type(two):
        yield _pair(place, one, two, _class)
    else:
        yield from _between_specs(one, two)


def _between_specs(one: Specified, two: Specified, leave: tuple[str, ...] = ()) -> Found:
    """Arguments that are different."""
    names: list[str] = [name for own in (one, two) for name in own.spec()["init_args"]]
    for name in dict.fromkeys(names):
        mine, other = (getattr(own, name, None) for own in (one, two))
        if name not in leave and not _same(mine, other):
            yield _pair(_WORDS.get(name, name), mine, other, _said)


def _between_rotations(one: RotaryEncoding, two: RotaryEncoding, length: int | None) -> Found:
    if isinstance(one, MRoPE) != isinstance(two, MRoPE) or len(one.pairs) != len(two.pairs):
        yield _pair("axes", one, two, lambda own: f"{len(own.pairs)} ({_class(own)})")
    elif type(one) is not type(two):
        yield _pair("rotary", one, two, _class)
    elif len(one.pairs) > 1 and one.pairs != two.pairs:
        yield _pair("sections", one, two, lambda own: str(own.pairs))
    if not _same(*(sum(own.pairs) / own.head_dim for own in (one, two))):
        turned = "{} of {} features".format
        yield _pair(
            "fraction of the head", one, two, lambda own: turned(2 * sum(own.pairs), own.head_dim)
        )
    factors = [getattr(own.extension, "magnitude", 1.0) for own in (one, two)]
    apart = _apart(one, two, length)
    lengths = any(own.needs_length for own in (one, two))
    same = apart == "" and _same(*factors) and not lengths  # in other words, perhaps
    yield from _between_specs(one, two, (*_COUNTED, "base") if same else _COUNTED)
    if not same or type(one.extension) is type(two.extension):
        yield from _between_extensions(one.extension, two.extension)
    if not _same(*factors):
        yield _pair("attention factor", factors[0], factors[1], _said)
    if apart:
        yield Difference("angles", apart, "")


def _between_extensions(one: Any, two: Any) -> Found:
    if type(one) is type(two) and isinstance(one, Specified):
        derived = (*_DERIVED, "factor") if isinstance(one, LongRoPE) else _DERIVED
        yield from _between_specs(one, two, derived)
    elif type(one) is not type(two):
        yield _pair("type", one, two, lambda own: _KINDS.get(_class(own), str(own)))
        for name in ("factor", "original_length"):
            mine, other = (getattr(own, name, None) for own in (one, two))
            if not _same(mine, other):
                yield _pair(_WORDS.get(name, name), mine, other, _said)
    elif one != two:
        yield _pair("extension", one, two, str)


def _apart(one: RotaryEncoding, two: RotaryEncoding, length: int | None) -> str | None:
    """How far the angles of two rotations are apart at most; None if they have no pairs alike."""
    if sum(one.pairs) != sum(two.pairs) or len(one.pairs) != len(two.pairs) or not sum(one.pairs):
        return None
    last = (length or 4096) - 1
    rows = [
        own.frequencies(torch.float64, torch.device("cpu"), last + 1 if own.needs_length else None)
        for own in (one, two)
    ]
    gap = ((rows[0] - rows[1]).abs() * last).amax((0, 1))
    if not gap.max() > 1e-6:
        return ""
    pair = int(gap.argmax())
    return f"apart by up to {gap.max():.4g} radians within {last + 1} positions (pair {pair})"


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Specified) and isinstance(two, Specified):
        return one.spec() == two.spec()
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=1e-9)
    return one == two


def _class(value: Any) -> str:
    return type(value).__name__


def _said(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Specified) and not isinstance(value, nn.Module):
        own = value.spec()["init_args"]
        return f"{_class(value)}({', '.join(f'{name}={each}' for name, each in own.items())})"
    return f"{value:g}" if isinstance(value, float) else str(value)
