"""Configurations from encodings: the other way of `encodings`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmpos.additive import LearnedEncoding
from mmpos.bias import T5Bias
from mmpos.coordinates import Index
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
from mmpos.interop.transformers.comparison import differences
from mmpos.interop.transformers.configuration import configuration
from mmpos.interop.transformers.configuration import encodings as read
from mmpos.interop.transformers.encodings import Encodings
from mmpos.rotary import LogTemperature, MRoPE, RotaryEncoding


def rope_parameters(rotary: RotaryEncoding) -> dict[str, Any]:
    """The ``rope_parameters`` of a configuration in which transformers turns as ``rotary`` does.

    What the architecture fixes is not among them, and must be the model's own: ``layout``,
    ``trailing`` and the positions. `NTKAware` is a larger ``rope_theta``. `DynamicNTK` reads
    ``max_position_embeddings`` beside them, as `config_entries` says.

    Raises: ValueError for what no such parameters say: several axes with spectra of their own,
    other readings of positions, a temperature other than Ministral's, other classes.

    >>> extension = mmpos.frequencies.YaRN(factor=4, original_length=4096)
    >>> parameters = rope_parameters(mmpos.RotaryEncoding(64, extension=extension))
    >>> parameters["rope_type"], parameters["original_max_position_embeddings"]
    ('yarn', 4096)
    """
    several = isinstance(rotary.extension, tuple) or isinstance(rotary.base, tuple)
    shared = type(rotary) is MRoPE
    if several or not (shared or (type(rotary) is RotaryEncoding and len(rotary.pairs) == 1)):
        raise ValueError(
            f"rope parameters say one spectrum, for one axis or M-RoPE's, and {rotary} is another: "
            "a tower of patches has its own configuration"
        )
    if not (isinstance(rotary.coordinates, Index) and rotary.coordinates.neutral):
        raise ValueError(
            f"transformers turns by the position itself, and this encoding reads "
            f"{type(rotary.coordinates).__name__}: make it with Index()"
        )
    width = 2 * sum(rotary.pairs)
    out: dict[str, Any] = {"rope_theta": float(rotary.base), "rope_type": "default"}  # pyright: ignore[reportArgumentType]
    if width != rotary.head_dim:
        out["partial_rotary_factor"] = _fraction(width, rotary.head_dim)
    if isinstance(rotary, MRoPE):
        out |= {"mrope_section": list(rotary.pairs), "mrope_interleaved": rotary.interleaved}
    _put_extension(out, rotary)
    _put_temperature(out, rotary.temperature)
    return out


def config_entries(encodings: Encodings, config: Any) -> dict[str, Any]:
    """What to change in a configuration so that its model knows positions as ``encodings`` say.

    >>> from mmpos.interop import transformers
    >>> config = {"model_type": "llama", "num_hidden_layers": 2}
    >>> found = transformers.encodings(config)
    >>> found.rotary.extend(mmpos.frequencies.PositionInterpolation(factor=4))
    >>> config_entries(found, config)
    {'rope_parameters': {'rope_theta': 10000.0, 'rope_type': 'linear', 'factor': 4}}

    Args:
        encodings: of the same model type and part. ``max_length``, if it was changed (by
            `dataclasses.replace`), is written as ``max_position_embeddings``, which serving goes
            by; an extension alone leaves that number as it is.
        config: the configuration that is changed, its data, or a model; it stays as it is. Of
            several networks it is the one of that type.

    The entries are read again, and must turn and add the same.
    Raises: ValueError for what no configuration of this model type says.
    """
    known = _of_type(configuration(config), encodings.model_type)
    before = read(known, encodings.part)
    entries: dict[str, Any] = {}
    if encodings.max_length != before.max_length and encodings.max_length is not None:
        entries["max_position_embeddings"] = encodings.max_length
    if encodings.rotary is not None:
        entries |= _rotary_entries(encodings, known)
    if isinstance(encodings.additive, LearnedEncoding):
        entries |= _table_entries(encodings.additive, before, known)
    for bias, _ in encodings.each("bias"):
        if isinstance(bias, T5Bias) and hasattr(known, "relative_attention_max_distance"):
            entries["relative_attention_num_buckets"] = bias.buckets
            entries["relative_attention_max_distance"] = bias.max_distance
    changed = {**known.to_dict(), **entries}
    changed.pop("rope_scaling", None)
    again = read({"model_type": known.model_type, **changed}, encodings.part)
    left = differences(encodings, again)
    if left:
        raise ValueError(
            f"no configuration of {known.model_type} says that: its code has {left[0].second} "
            f"where the encodings have {left[0].first} ({left[0].name})"
        )
    return entries


def _of_type(config: Any, model_type: str) -> Any:
    """The configuration of a type: itself, or that of one of its networks."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for known in (config, *parts):
        if getattr(known, "model_type", None) == model_type:
            return known
    raise ValueError(f"the encodings are of {model_type}, the configuration of {config.model_type}")


def _rotary_entries(encodings: Encodings, config: Any) -> dict[str, Any]:
    kinds = getattr(config, "layer_types", None) or []
    given = getattr(config, "rope_parameters", None)
    entries: dict[str, Any] = {}
    turned = [(own, layers) for own, layers in encodings.each("rotary") if own.rotary_dim != 0]
    for own, _ in turned:
        if isinstance(own.extension, DynamicNTK):
            entries["max_position_embeddings"] = int(own.extension.original_length)
    if given is None:  # GPT-J, whose code has a base of its own
        width = 2 * sum(turned[0][0].pairs)
        return {"rotary_dim": width} if hasattr(config, "rotary_dim") else {}
    if any(type(own) is not MRoPE and len(own.pairs) > 1 for own, _ in turned):
        return {}  # a tower's, which its code fixes
    nested = [kind for kind in dict.fromkeys(kinds) if kind in given]
    latent = hasattr(config, "qk_rope_head_dim")  # whose width is said by that

    def written(own: RotaryEncoding) -> dict[str, Any]:
        out = rope_parameters(own)
        if latent:
            out.pop("partial_rotary_factor", None)
        return out

    if nested:
        of_kind = {kinds[layer]: own for own, layers in turned for layer in layers}
        entries["rope_parameters"] = {kind: written(own) for kind, own in of_kind.items()}
    elif turned:
        entries["rope_parameters"] = written(turned[0][0])
        original = entries["rope_parameters"].get("original_max_position_embeddings")
        if original is not None and hasattr(config, "original_max_position_embeddings"):
            entries["original_max_position_embeddings"] = original
    return entries


def _table_entries(table: LearnedEncoding, before: Encodings, config: Any) -> dict[str, Any]:
    """The size of a table, if it is another."""
    old = before.additive
    if not isinstance(old, LearnedEncoding):
        raise ValueError(f"a model of type {before.model_type} adds {old}")
    if table.grid == old.grid:
        return {}
    if len(table.grid) != 1:
        raise ValueError("the grid of a table is said by the sizes of images and patches")
    sides = {"encoder": "source", "decoder": "target"}
    names = (
        f"max_{sides.get(before.part)}_positions",
        f"max_{before.part}_position_embeddings",
        "max_position_embeddings",
    )
    name = next(name for name in names if hasattr(config, name))
    return {name: getattr(config, name) + table.grid[0] - old.grid[0]}


def _fraction(width: int, head_dim: int) -> float:
    """A fraction of which models make just this width: they cut what is after the point."""
    fraction = width / head_dim
    return fraction if int(head_dim * fraction) == width else (width + 0.5) / head_dim


def _put_extension(out: dict[str, Any], rotary: RotaryEncoding) -> None:
    extension: Any = rotary.extension
    if extension is None:
        return
    write = _WRITE.get(type(extension))
    if write is None:
        raise ValueError(f"transformers has no rope_type for {extension}")
    if isinstance(extension, NTKAware):
        pairs = sum(rotary.pairs)
        out["rope_theta"] *= extension.factor ** (pairs / (pairs - 1))
    out |= write(extension)


def _put_temperature(out: dict[str, Any], temperature: LogTemperature | None) -> None:
    if temperature is None:
        return
    original = out.get("original_max_position_embeddings")
    if original != temperature.length or temperature.offset or not temperature.steps:
        raise ValueError(
            f"rope parameters say a temperature by llama_4_scaling_beta, which grows in steps of "
            f"YaRN's original length: {temperature} is another"
        )
    out["llama_4_scaling_beta"] = temperature.beta


def _yarn(extension: YaRN) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": extension.factor,
        "original_max_position_embeddings": extension.original_length,
        "beta_fast": extension.beta_fast,
        "beta_slow": extension.beta_slow,
        "truncate": extension.truncate,
    }
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(extension, name) is not None:
            out[name] = getattr(extension, name)
    return out


def _longrope(extension: LongRoPE) -> dict[str, Any]:
    out: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": list(extension.short_factor),
        "long_factor": list(extension.long_factor),
        "original_max_position_embeddings": extension.original_length,
    }
    if extension.max_length is not None:
        out["factor"] = extension.max_length / extension.original_length
    elif extension.factor is not None:
        out["factor"] = extension.factor
    if extension.attention_factor is not None:
        out["attention_factor"] = extension.attention_factor
    return out


_WRITE: dict[type[Extension], Callable[[Any], Mapping[str, Any]]] = {
    PositionInterpolation: lambda own: {"rope_type": "linear", "factor": own.factor},
    NTKAware: lambda own: {},
    DynamicNTK: lambda own: {"rope_type": "dynamic", "factor": own.factor},
    YaRN: _yarn,
    LongRoPE: _longrope,
    Llama3: lambda own: {
        "rope_type": "llama3",
        "factor": own.factor,
        "original_max_position_embeddings": own.original_length,
        "low_freq_factor": own.low_frequency_factor,
        "high_freq_factor": own.high_frequency_factor,
    },
    Proportional: lambda own: {
        "rope_type": "proportional",
        "partial_rotary_factor": own.fraction,
        "factor": own.factor,
    },
}
