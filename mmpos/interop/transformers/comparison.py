"""What is different between two ways to know positions, in words."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mmpos.frequencies import geometric
from mmpos.interop.transformers.configuration import encodings
from mmpos.interop.transformers.encodings import Encodings, Part
from mmpos.interop.transformers.weights import take_weights
from mmpos.interop.transformers.words import ranges
from mmpos.rotary import MRoPE, RotaryEncoding
from mmpos.spec import Specified


@dataclass(frozen=True)
class Difference:
    """One thing that two models do otherwise.

    Args:
        name: what it is: base, type, factor, layout, …
        first, second: what each has.
        layers: where, if not everywhere.
    """

    name: str
    first: str
    second: str
    layers: str = ""

    def __str__(self) -> str:
        where = f" (layers {self.layers})" if self.layers else ""
        both = " and ".join(filter(None, (self.first, self.second)))
        return f"{self.name}{where}: {both}"


def compare(first: Any, second: Any, part: Part = "") -> list[Difference]:
    """Every difference that matters between what two models know of positions.

    Args:
        first: a configuration of transformers, its data, a model, or `Encodings`.
        second: another of these, or weights: a state dict or a ``.safetensors`` file, whose
            frequencies (``inv_freq``, in older checkpoints), tables and head sizes are held against
            the configuration.
        part: which network, of models that have several.

    Returns: a difference for each of: what fills the three places; of rotations base, type of
        extension, factor, original length and its other numbers, attention factor, layout,
        fraction of the head, sections, temperature, and how far angles are apart; of tables and
        biases their sizes; what scores are multiplied by. Alike, the list is empty.
    Raises: as `encodings`.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 2}
    >>> for difference in compare(llama, {**llama, "rope_theta": 5e5}):
    ...     print(difference)
    base: 10000 and 500000
    angles: apart by up to 265 radians within 2048 positions (pair 6)
    """
    known = first if isinstance(first, Encodings) else encodings(first, part)
    if isinstance(second, str | Path) and Path(second).suffix == ".safetensors":
        second = load_file(second)
    if isinstance(second, Mapping) and any(isinstance(own, Tensor) for own in second.values()):
        return list(_weights(known, second))
    other = second if isinstance(second, Encodings) else encodings(second, part)
    return differences(known, other)


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
            found.append(Difference(words[name], *map(_said, (mine, other))))
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
    yield from _between_specs(one, two, _COUNTED)
    yield from _between_extensions(one.extension, two.extension)
    factors = [getattr(own.extension, "magnitude", 1.0) for own in (one, two)]
    if not _same(*factors):
        yield _pair("attention factor", factors[0], factors[1], _said)
    apart = _apart(one, two, length)
    if apart:
        yield Difference("angles", apart, "")


def _between_extensions(one: Any, two: Any) -> Found:
    if type(one) is type(two) and isinstance(one, Specified):
        yield from _between_specs(one, two, _DERIVED)
    elif type(one) is not type(two):
        yield _pair("type", one, two, lambda own: _KINDS.get(_class(own), str(own)))
        for name in ("factor", "original_length"):
            mine, other = (getattr(own, name, None) for own in (one, two))
            if not _same(mine, other):
                yield _pair(_WORDS.get(name, name), mine, other, _said)
    elif one != two:
        yield _pair("extension", one, two, str)


def _apart(one: RotaryEncoding, two: RotaryEncoding, length: int | None) -> str:
    """How far the angles of two rotations are apart at most, on one axis."""
    if sum(one.pairs) != sum(two.pairs) or len(one.pairs) != len(two.pairs) or not sum(one.pairs):
        return ""
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


def _weights(known: Encodings, state: Mapping[str, Tensor]) -> Iterator[Difference]:
    """What weights are made for otherwise than a configuration says."""
    for name, value in state.items():
        layer = _layer_of(name)
        if name.endswith("inv_freq"):
            turned = [own for own in known.by_layer("rotary") if isinstance(own, RotaryEncoding)]
            own = known.by_layer("rotary")[layer] if layer is not None else (turned or [None])[0]
            where = "" if layer is None else str(layer)
            yield from _frequencies(own, value, where)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            own = known.by_layer("rotary")[layer or 0]
            if own is not None and value.shape[-1] % own.head_dim:
                yield Difference("head size", str(own.head_dim), f"{value.shape[-1]} in {name}")
        elif name.endswith(("q_proj.weight", "k_proj.weight")) and value.ndim == 2:
            own = known.by_layer("rotary")[layer or 0]
            if own is not None and value.shape[0] % own.head_dim:
                words = f"{value.shape[0]} rows of {name}, which are no heads of it"
                yield Difference("head size", str(own.head_dim), words)
    learned = copy.deepcopy(known)
    try:
        take_weights(learned, state)
    except ValueError as refused:
        yield Difference("learned numbers", "as configured", str(refused))


def _frequencies(own: Any, value: Tensor, where: str) -> Iterator[Difference]:
    given = value.double().flatten()
    if own is None:
        yield Difference("rotary", "none", f"frequencies of {len(given)} pairs", where)
        return
    length = 1 if own.needs_length else None
    expected = own.frequencies(torch.float64, torch.device("cpu"), length).sum((0, 1))
    if len(given) != len(expected):
        yield Difference("features turned", str(2 * len(expected)), str(2 * len(given)), where)
        return
    rounding = 5e-3 if value.dtype.itemsize < 4 else 1e-4
    if torch.allclose(given, expected, rtol=rounding, atol=1e-12):
        return
    base = float(given[1] ** -len(given)) if given[-1] > 0 and len(given) > 1 else 0.0
    plain = torch.tensor(geometric(len(given), base), dtype=given.dtype) if base > 0 else expected
    if torch.allclose(given, plain, rtol=10 * rounding, atol=0):
        mine = f"{own.base:g}" + (f" with {own.extension}" if own.extension is not None else "")
        yield Difference("base", mine, f"{base:.6g} in the weights' frequencies", where)
    else:
        ratio = (given / expected).nan_to_num(1.0)
        pair = int((ratio.log().abs().nan_to_num(0.0)).argmax())
        words = f"{given[pair]:.4g} in the weights"
        yield Difference(f"frequency of pair {pair}", f"{expected[pair]:.4g}", words, where)


def _layer_of(name: str) -> int | None:
    """The number of a layer in the name of a weight."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else None


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=1e-9)
    return one == two


def _class(value: Any) -> str:
    return type(value).__name__


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
