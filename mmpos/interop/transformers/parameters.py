"""Rotations from the rope parameters of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmpos.frequencies import (
    DynamicNTK,
    Extension,
    Llama3,
    LongRoPE,
    NTKAware,
    PositionInterpolation,
    Proportional,
    YaRN,
)
from mmpos.rotary import LogTemperature, MRoPE, RotaryEncoding
from mmpos.rotary.rotation import Layout

_COMMON = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_MROPE = ("mrope_section", "mrope_interleaved")
_ORIGINAL = "original_max_position_embeddings"
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": (
        *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta"),
    ),
    "longrope": (
        *("factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"),
        *("short_mscale", "long_mscale"),
    ),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}
_OLD_TYPES = {"su": "longrope", "mrope": "default"}


def rotary_encoding(
    parameters: Mapping[str, Any] | None,
    head_dim: int,
    *,
    max_length: int | None = None,
    base: float | None = None,
    layout: Layout = "half",
    trailing: bool = False,
    rotary_dim: int | None = None,
) -> RotaryEncoding:
    """The rotation that ``rope_parameters``, or the older ``rope_scaling``, describe.

    All types of transformers: ``default``, ``linear`` (`PositionInterpolation`), ``dynamic``
    (`DynamicNTK`, or `NTKAware` by HunYuan's ``alpha``), ``yarn``, ``longrope`` (once ``su``),
    ``llama3`` and ``proportional``; ``partial_rotary_factor``, and with ``mrope_section`` `MRoPE`
    (whose sections are counted as the model reads them: they end where the spectrum does).

    Args:
        parameters: of one kind of layer; where a configuration has several, one of these. None, as
            older configurations have for ``rope_scaling``, is a plain rotation.
        head_dim: features of a head.
        max_length: the model's ``max_position_embeddings``, which some types read.
        base: where ``rope_theta`` is not among the parameters, as in older configurations.
        layout: of the weights: ``half`` in most models of transformers, ``interleaved`` in GPT-J,
            Cohere, GLM or ERNIE 4.5.
        trailing: whether the last features of a head are turned (DeepSeek).
        rotary_dim: features that are turned, where a model says so in its own way.

    Raises: ValueError for a type or a key that is not known, or that this type does not read, for
    one that is missing, and for values that no model could have meant.

    >>> rotary_encoding({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 64).extension
    PositionInterpolation(factor=4.0)
    """
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    kind = _type(given)
    _check_keys(kind, given, max_length)
    theta = given.get("rope_theta", base)
    if theta is None:
        raise ValueError("rope_theta is not among the rope parameters: pass base=10000, or its own")
    if base is not None and base != theta:
        raise ValueError(f"rope_theta={theta} and base={base} are two: pass one")
    width = rotary_dim
    fraction = float(given.get("partial_rotary_factor", 1.0))
    if width is None and fraction != 1 and kind != "proportional":
        width = int(head_dim * fraction)
        if width % 2 or width < 2:
            raise ValueError(
                f"partial_rotary_factor={fraction} of head_dim={head_dim} turns {width} features, "
                "which are no pairs: choose a fraction that gives an even number"
            )
    pairs = (head_dim if width is None else width) // 2
    temperature = None
    if "llama_4_scaling_beta" in given:
        temperature = LogTemperature(
            length=given[_ORIGINAL], beta=given["llama_4_scaling_beta"], offset=0.0
        )
    common: dict[str, Any] = {
        "base": float(theta),
        "rotary_dim": None if width == head_dim else width,
        "trailing": trailing,
        "layout": layout,
        "extension": _READ[kind](given, max_length),
        "temperature": temperature,
    }
    if "mrope_section" not in given:
        return RotaryEncoding(head_dim, **common)
    interleaved = bool(given.get("mrope_interleaved", False))
    sections = _sections(given["mrope_section"], pairs, interleaved)
    return MRoPE(head_dim, len(sections), sections=sections, interleaved=interleaved, **common)


def _type(given: Mapping[str, Any]) -> str:
    """The type of rope parameters, by its present name."""
    names = {
        _OLD_TYPES.get(str(given[key]), str(given[key]))
        for key in ("rope_type", "type")
        if key in given
    }
    if len(names) > 1:
        raise ValueError(
            f"rope_type={given['rope_type']!r} and type={given['type']!r} are two: keep rope_type"
        )
    kind = names.pop() if names else "default"
    if kind not in _KEYS:
        near = difflib.get_close_matches(kind, [*_KEYS, *_OLD_TYPES], 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
        raise ValueError(f"rope_type {kind!r} is not known: {hint}")
    return kind


def _check_keys(kind: str, given: Mapping[str, Any], max_length: int | None) -> None:
    known = {*_COMMON, *_MROPE, *_KEYS[kind]}
    if "alpha" in given:  # HunYuan's have the keys of YaRN beside it, which nothing reads
        known |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    for key, value in given.items():
        if key == "max_position_embeddings" and value == max_length:
            continue
        if key not in known:
            near = difflib.get_close_matches(key, list(known), 1, cutoff=0.75)
            others = [other for other, keys in _KEYS.items() if key in keys]
            hint = f"did you mean {near[0]}?" if near else "drop it, or say what it means"
            if others:
                hint = f"it is read by {' and '.join(others)}"
            raise ValueError(f"rope_type {kind!r} does not read {key}={value!r}: {hint}")
    if "mrope_interleaved" in given and "mrope_section" not in given:
        raise ValueError("mrope_interleaved says how sections lie: pass mrope_section too")


def _needed(given: Mapping[str, Any], *keys: str) -> list[Any]:
    missing = [key for key in keys if key not in given]
    if missing:
        raise ValueError(f"rope_type {_type(given)!r} needs {' and '.join(missing)}")
    return [given[key] for key in keys]


def _sections(given: Sequence[int], pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Pairs that each axis really has: interleaved sections are limits within the spectrum."""
    sections = tuple(int(own) for own in given)
    axes = len(sections)
    if not interleaved:
        return sections
    of = [pair % axes if pair < axes * sections[pair % axes] else 0 for pair in range(pairs)]
    return tuple(of.count(axis) for axis in range(axes))


def _factor(given: Mapping[str, Any], max_length: int | None) -> float:
    """How far a context is extended: said, or by the two lengths."""
    if "factor" in given:
        return given["factor"]
    (original,) = _needed(given, _ORIGINAL)
    if max_length is None:
        raise ValueError("without factor, the extension is by max_position_embeddings: pass it")
    return max_length / original


def _linear(given: Mapping[str, Any], max_length: int | None) -> Extension:
    (factor,) = _needed(given, "factor")
    return PositionInterpolation(factor=factor)


def _dynamic(given: Mapping[str, Any], max_length: int | None) -> Extension:
    if "alpha" in given:
        return NTKAware(factor=given["alpha"])
    (factor,) = _needed(given, "factor")
    if max_length is None:
        raise ValueError("rope_type 'dynamic' grows from max_position_embeddings on: pass it")
    return DynamicNTK(factor=factor, original_length=max_length)


def _yarn(given: Mapping[str, Any], max_length: int | None) -> Extension:
    (original,) = _needed(given, _ORIGINAL)
    pair = {name: given[name] for name in ("mscale", "mscale_all_dim") if given.get(name)}
    return YaRN(
        factor=_factor(given, max_length),
        original_length=original,
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        attention_factor=given.get("attention_factor"),
        **(pair if len(pair) == 2 else {}),
    )


def _longrope(given: Mapping[str, Any], max_length: int | None) -> Extension:
    short, long, original = _needed(given, "short_factor", "long_factor", _ORIGINAL)
    return LongRoPE(
        short_factor=short,
        long_factor=long,
        original_length=original,
        factor=max(1.0, _factor(given, max_length)),
        attention_factor=_grown(given),
    )


def _grown(given: Mapping[str, Any]) -> float | None:
    """What cos and sin are multiplied by, which Phi-3.5-MoE says for short and long sequences."""
    both = {given[name] for name in ("short_mscale", "long_mscale") if name in given}
    if len(both) > 1:
        raise ValueError(
            f"short_mscale and long_mscale are two, {sorted(both)}, and cos and sin have one "
            "attention factor"
        )
    return both.pop() if both else given.get("attention_factor")


def _llama3(given: Mapping[str, Any], max_length: int | None) -> Extension:
    factor, original, low, high = _needed(
        given, "factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"
    )
    return Llama3(
        factor=factor,
        original_length=original,
        low_frequency_factor=low,
        high_frequency_factor=high,
    )


def _proportional(given: Mapping[str, Any], max_length: int | None) -> Extension:
    return Proportional(
        fraction=given.get("partial_rotary_factor", 1.0), factor=given.get("factor", 1.0)
    )


_READ: dict[str, Callable[[Mapping[str, Any], int | None], Extension | None]] = {
    "default": lambda given, max_length: None,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
