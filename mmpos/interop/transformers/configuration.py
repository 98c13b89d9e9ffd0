"""What a configuration of transformers says of positions, as encodings."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from mmpos.interop.transformers import absolute, relative, rotary, vision
from mmpos.interop.transformers.encodings import Encodings, Part
from mmpos.interop.transformers.families import Family
from mmpos.rotary.rotation import Layout

Reader = Callable[[Any], Encodings]

_SAID_AND_SO = (  # of published configurations: they say what is so anyway
    ("position_embedding_type", "absolute"),
    ("rotary", True),
    ("offset_alibi", 100),
)
_ABOUT_POSITIONS = re.compile(r"rope|rotary|alibi|relative|position|_theta$|pos_")


def encodings(config: Any, part: Part = "", *, layout: Layout | None = None) -> Encodings:
    """What a model of transformers knows of positions, by its configuration.

    Args:
        config: the configuration, the data of a ``config.json``, a folder with one or a name that
            transformers knows; a model gives its own.
        part: which network, where the model has several.
        layout: of the weights, for a model type that is not known and turns queries and keys by
            rope parameters as Llama does.

    The learned numbers are drawn anew: `take_weights` takes them from a model.
    Raises: ValueError for a model type or a part that is not known, and for options about
        positions that its code does not read.

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 5e5}
    >>> print(encodings(config))
    llama: 2 layers
      rotary: RotaryEncoding(head_dim=128, axes=1, base=500000.0, rotary_dim=128, layout=half)
    """
    given = configuration(config)
    if part not in get_args(Part):
        raise ValueError(f"part must be one of {get_args(Part)[1:]}, got {part!r}")
    config, part = _network(given, part)
    kind = config.model_type
    reader = _readers().get((kind, part))
    if reader is None and layout is None:
        parts = [own for name, own in _readers() if name == kind]
        if parts:
            raise ValueError(f"{kind} has the parts {', '.join(parts)}: pass part={parts[0]!r}")
        near = difflib.get_close_matches(kind, [name for name, _ in _readers()], 1)
        hint = f", did you mean {near[0]}?" if near else ":"
        raise ValueError(
            f"model_type {kind!r} is not known{hint} if it turns queries and keys as Llama does, "
            "pass the layout of its weights, 'half' or 'interleaved'"
        )
    refuse_unread(config)
    if reader is None:
        return rotary.turned(config, Family(layout=layout or "half", partial=True))
    found = reader(config)
    if layout is not None and any(own.layout != layout for own, _ in found.each("rotary")):
        raise ValueError(f"{kind} has another layout than {layout!r}: leave it out")
    return found


def configuration(config: Any) -> Any:
    """The configuration of transformers that is meant, of its data, a model, or itself.

    Raises: TypeError for what is none of these, ValueError for data that transformers refuses, or
        where it finds none.
    """
    if isinstance(config, str | Path):
        from transformers import AutoConfig

        return _of_transformers(AutoConfig.from_pretrained, str(config))
    if isinstance(config, Mapping):
        from transformers import AutoConfig

        if "model_type" not in config:
            raise ValueError(
                "a configuration names its model_type; for rope parameters alone there is "
                "rotary_encoding"
            )
        data = {key: value for key, value in config.items() if key != "model_type"}
        return _of_transformers(AutoConfig.for_model, config["model_type"], **data)
    found = getattr(config, "config", config)
    if not hasattr(found, "model_type"):
        raise TypeError(
            "a configuration of transformers, its data or a model is needed, "
            f"got {type(config).__name__}"
        )
    return found


def _of_transformers(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return make(*args, **options)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"transformers refuses this configuration: {said}") from None


def refuse_unread(config: Any) -> None:
    """Refuse options about positions that the model's code does not read.

    Transformers keeps any option it is given; one that no code reads does nothing.
    """
    known = {field.name for field in fields(config)} | set(config.attribute_map)
    known |= {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    known |= {"original_max_position_embeddings", "ignore_keys_at_rope_validation"}
    for name, value in vars(config).items():
        if name.startswith("_") or name in known or value in (None, False):
            continue
        if (name, value) in _SAID_AND_SO:
            continue
        if _ABOUT_POSITIONS.search(name):
            near = difflib.get_close_matches(name, list(known), 1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "drop it"
            raise ValueError(f"{config.model_type} does not read {name}={value!r}: {hint}")


def _network(config: Any, part: Part) -> tuple[Any, Part]:
    """The configuration of a part, where it has its own, and what is left to say of it."""
    parts = {
        name.removesuffix("_config"): name
        for name in getattr(config, "sub_configs", {})
        if getattr(config, name, None) is not None and name != "audio_config"
    }
    known = {name for name, _ in _readers()}
    if (config.model_type, part) in _readers() or not parts:
        return config, part
    if part in parts:
        return getattr(config, parts[part]), ""
    if not part and config.model_type not in known:
        own = [name for name in parts if name in get_args(Part)]
        raise ValueError(
            f"{config.model_type} has several networks: pass part= one of {', '.join(own)}"
        )
    return config, part


@functools.cache
def _readers() -> dict[tuple[str, str], Reader]:
    return {**rotary.READERS, **absolute.READERS, **relative.READERS, **vision.READERS, **_EITHER}


def _falcon(config: Any) -> Encodings:
    return (relative if config.alibi else rotary).READERS["falcon", ""](config)


def _esm(config: Any) -> Encodings:
    turned = config.position_embedding_type == "rotary"
    return (rotary if turned else absolute).READERS["esm", ""](config)


def _conformer(config: Any) -> Encodings:
    turned = config.position_embeddings_type == "rotary"
    return (rotary if turned else relative).READERS[config.model_type, ""](config)


_EITHER: dict[tuple[str, str], Reader] = {
    ("falcon", ""): _falcon,
    ("esm", ""): _esm,
    ("wav2vec2-conformer", ""): _conformer,
    ("wav2vec2-bert", ""): _conformer,
}
"""Models that know positions in one of two ways."""
