"""What weights say of positions, held against a configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpos.frequencies import geometric
from mmpos.interop.transformers.difference import Difference
from mmpos.interop.transformers.encodings import Encodings
from mmpos.interop.transformers.weights import take_weights
from mmpos.rotary import MRoPE

_OTHERS = re.compile(r"(^|\.)(vision|visual|audio)")
"""Networks beside that of language, in the names of weights."""

_PROJECTIONS = {"q_proj.weight": "heads", "k_proj.weight": "key_heads"}


def against_weights(known: Encodings, state: Mapping[str, Tensor]) -> list[Difference]:
    """What weights are made for otherwise than a configuration says.

    Raises: ValueError for weights of which no name is one that the model has.
    """
    found, layers, read = [], 0, False
    turned = known.by_layer("rotary")
    sees = any(word in known.model_type for word in ("vision", "vit", "pixtral", "vjepa"))
    for name, value in state.items():
        if not sees and _OTHERS.search(name):
            continue
        layer = _layer_of(name)
        layers = max(layers, 0 if layer is None else layer + 1)
        own = turned[min(layer or 0, len(turned) - 1)]
        if name.endswith("inv_freq"):
            read = True
            possible = [own] if layer is not None else [own for own, _ in known.each("rotary")]
            where = "" if layer is None else str(layer)
            apart = [_frequencies(own, value, where) for own in possible or [None]]
            found += min(apart, key=len)  # which kind of layer has them is not said
        elif name.endswith(("q_norm.weight", "k_norm.weight")) and own is not None:
            read = True
            whole = {(count or 1) * own.head_dim for count in (1, known.heads, known.key_heads)}
            if value.shape[-1] not in whole:
                words = f"{value.shape[-1]} in {name}"
                found.append(Difference("head size", str(own.head_dim), words))
        for ending, heads in _PROJECTIONS.items():
            count = getattr(known, heads)
            if name.endswith(ending) and value.ndim == 2 and own is not None and count:
                read = True
                if value.shape[0] not in (count * own.head_dim, 2 * count * own.head_dim):
                    mine = f"{count} of {own.head_dim}"
                    words = f"{value.shape[0]} features in {name}"
                    found.append(Difference(heads.replace("_", " "), mine, words))
    if layers > known.layers and not known.part:  # fewer may be in a file of several
        found.append(Difference("layers", str(known.layers), str(layers)))
    learned = copy.deepcopy(known)
    places = (learned.each("additive"), learned.each("rotary"), learned.each("bias"))
    if any(list(own.parameters()) for place in places for own, _ in place):
        read = True
        try:
            take_weights(learned, state)
        except ValueError as refused:
            found.append(Difference("learned numbers", "as configured", str(refused)))
    if not read:
        raise ValueError(
            f"these weights have no name that a {known.model_type} has: nothing to compare"
        )
    return found


def _frequencies(own: Any, value: Tensor, where: str) -> list[Difference]:
    given = value.double().flatten()
    if own is None:
        return [Difference("rotary", "none", f"frequencies of {len(given)} pairs", where)]
    length = 1 if own.needs_length else None
    table: Any = own.frequencies(torch.float64, torch.device("cpu"), length)[0]
    axial = len(own.pairs) > 1 and not isinstance(own, MRoPE)  # towers keep those of one axis
    counts: list[int] = list(own.pairs)
    expected: Tensor = table[0, : counts[0]] if axial else table.sum(0)
    if len(given) != len(expected):
        mine, theirs = (str(2 * len(each)) for each in (expected, given))
        return [Difference("features turned", mine, theirs, where)]
    rounding = 5e-3 if value.dtype.itemsize < 4 else 1e-4
    if torch.allclose(given, expected, rtol=rounding, atol=1e-12):
        return []
    base = float(given[1] ** -len(given)) if given[-1] > 0 and len(given) > 1 else 0.0
    plain = torch.tensor(geometric(len(given), base), dtype=given.dtype) if base > 0 else expected
    if torch.allclose(given, plain, rtol=10 * rounding, atol=0):
        mine = f"{own.base:g}" + (f" with {own.extension}" if own.extension is not None else "")
        return [Difference("base", mine, f"{base:.6g} in the weights' frequencies", where)]
    ratio = (given / expected).nan_to_num(1.0)
    pair = int((ratio.log().abs().nan_to_num(0.0)).argmax())
    words = f"{given[pair]:.4g} in the weights"
    return [Difference(f"frequency of pair {pair}", f"{expected[pair]:.4g}", words, where)]


def _layer_of(name: str) -> int | None:
    """The number of a layer in the name of a weight."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else None
