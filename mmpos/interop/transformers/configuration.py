"""What a configuration of transformers says of positions, as encodings."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from torch import nn

from mmpos.interop.transformers import absolute, relative, rotary, vision
from mmpos.interop.transformers.encodings import Encodings, Part, Place
from mmpos.interop.transformers.weights import take_weights
from mmpos.rotary.rotation import Layout

Reader = Callable[[Any], Encodings]
_PLACES: tuple[Place, ...] = ("additive", "rotary", "bias")

_SAID_AND_SO: tuple[tuple[str, Any], ...] = (
    ("position_embedding_type", "absolute"),
    ("position_embedding_type", "rope"),
    ("position_embedding_type", "rope_gptj"),
    ("rotary", True),
    ("rotary_pct", 1.0),
    ("use_rotary_pos_emb", True),
    ("offset_alibi", 100),
    ("static_position_embeddings", True),
    ("extra_pos_embeddings", 2),
)
"""What published configurations say, and what is so anyway."""

_SAID_AND_NOTHING = {
    *((name, "n_positions") for name in ("t5", "mt5", "umt5", "switch_transformers", "longt5")),
    ("nomic_bert", "n_positions"),
}
"""What published configurations say of nothing that there is, by model type."""

_ABOUT_POSITIONS = re.compile(r"rope|rotary|alibi|relative|position|_theta$|pos_")


def encodings(config: Any, part: Part = "", *, layout: Layout | None = None) -> Encodings:
    """What a model of transformers knows of positions, by its configuration.

    Args:
        config: the configuration, the data of a ``config.json``, a folder with one or a name that
            transformers knows; or a model, of which they are what it has learned.
        part: which network, where the model has several.
        layout: of the weights, for a model type that is not known and turns queries and keys by
            rope parameters as Llama does. Its options are taken as they are.

    Of a model the encodings have its learned numbers, and are in training if it is; else numbers
    are drawn anew (`take_weights` takes them from a state dict), and encodings are in evaluation.
    Raises: ValueError for a model type or a part that is not known, and for options about
        positions that its code does not read.

    >>> config = {"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 5e5}
    >>> print(encodings(config))
    llama: 2 layers
      rotary: RotaryEncoding(head_dim=128, axes=1, base=500000.0, rotary_dim=128, layout=half)
    """
    given = configuration(config)
    model = config if isinstance(config, nn.Module) else None
    if part not in get_args(Part):
        raise ValueError(f"part must be one of {get_args(Part)[1:]}, got {part!r}")
    config, part = _network(given, part or _part_of(model, given))
    kind = config.model_type
    reader = _readers().get((kind, part))
    if reader is None and (layout is None or part):
        raise ValueError(_unknown(kind, part))
    if reader is None:
        found = rotary.of_unknown(config, layout or "half")
    else:
        refuse_unread(config)
        found = reader(config)
        if layout is not None and any(own.layout != layout for own, _ in found.each("rotary")):
            raise ValueError(f"{kind} has another layout than {layout!r}: leave it out")
    for place in _PLACES:
        for own, _ in found.each(place):
            own.train(model is not None and model.training)
    if model is not None:
        _take(found, model)
    return found


def is_part(config: Any, part: Part) -> bool:
    """Whether a configuration is of several networks of which one is the part."""
    sub = getattr(config, "sub_configs", {})
    return (config.model_type, part) in _readers() or f"{part}_config" in sub


def _part_of(model: Any, config: Any) -> Part:
    """Which part of its kind a model is, told by its class: T5's and BART's stacks have one."""
    name = type(model).__name__
    parts = [part for kind, part in _readers() if kind == config.model_type and part]
    if name.endswith("Stack") and hasattr(model, "is_decoder"):
        name = "Decoder" if model.is_decoder else "Encoder"
    for part in get_args(Part)[1:3]:
        if part in parts and name.lower().endswith(part):
            return part
    return ""


def _unknown(kind: str, part: Part) -> str:
    """What to say of a model type without a reader."""
    parts = [own for name, own in _readers() if name == kind]
    if parts == [""]:
        return f"{kind} is one network: leave part={part!r} out"
    if parts:
        return f"{kind} has several networks: pass part= one of {', '.join(parts)}"
    near = difflib.get_close_matches(kind, [name for name, _ in _readers()], 1, cutoff=0.9)
    hint = f", did you mean {near[0]}?" if near else ":"
    return (
        f"model_type {kind!r} is not known{hint} if it turns queries and keys as Llama does, "
        "pass the layout of its weights, 'half' or 'interleaved'"
    )


def _take(found: Encodings, model: nn.Module) -> None:
    """Take the learned numbers of a model, as they are now."""
    paths = (name.split(".") for name, _ in model.named_modules())
    names = [".".join(path) for path in paths if path[-1] == "mmpos"]
    if found.part:  # the other part may have been filled
        names = [name for name in names if name == "mmpos" or f"{found.part}." in name]
    if names:
        raise ValueError(
            f"encodings of this model were replaced, by those in its {names[0]}: read these, or "
            "restore it first; model.config says what it was made with"
        )
    if any(own.is_meta for own in model.parameters()):
        return
    encodings = [own for place in _PLACES for own, _ in found.each(place)]
    if any(list(own.parameters()) for own in encodings):
        for own in encodings:
            like = next(model.parameters())
            own.to(like.device)
        take_weights(found, model.state_dict())


def configuration(config: Any) -> Any:
    """The configuration of transformers that is meant, of its data, a model, or itself.

    Raises: TypeError for what is none of these, ValueError for data that transformers refuses, or
        where it finds none.
    """
    if isinstance(config, str | Path):
        from transformers import AutoConfig

        if str(config).startswith((".", "/", "~")) and not Path(config).exists():
            raise ValueError(f"there is no folder or file {config}")
        return _of_transformers(AutoConfig.from_pretrained, str(config))
    if isinstance(config, Mapping):
        from transformers import AutoConfig

        if "model_type" not in config:
            raise ValueError(
                "a configuration names its model_type; for rope parameters alone there is "
                "rotary_encoding"
            )
        data = copy.deepcopy(dict(config))  # transformers writes into what it is given
        return _of_transformers(AutoConfig.for_model, data.pop("model_type"), **data)
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
        said = " ".join(str(error).split())
        said = said if len(said) < 200 else f"{said[:200]} …"
        raise ValueError(f"transformers refuses this configuration: {said}") from None


def refuse_unread(config: Any) -> None:
    """Refuse options about positions that the model's code does not read.

    Transformers keeps any option it is given; one that no code reads does nothing. What published
    configurations say and what is so anyway passes.
    """
    known = {field.name for field in fields(config)} | set(config.attribute_map)
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
        known |= {"original_max_position_embeddings", "ignore_keys_at_rope_validation"}
    code = _code(type(config))
    for name, value in vars(config).items():
        if name.startswith("_") or name in known or value in (None, False):
            continue
        said = (name, value) in _SAID_AND_SO or (config.model_type, name) in _SAID_AND_NOTHING
        if _ABOUT_POSITIONS.search(name) and not said and not re.search(rf"\b{name}\b", code):
            near = difflib.get_close_matches(name, list(known), 1, cutoff=0.8)
            hint = f"did you mean {near[0]}?" if near else "leave it out, if the weights allow it"
            raise ValueError(f"{config.model_type} does not read {name}={value!r}: {hint}")


@functools.cache
def _code(config: type) -> str:
    """The code of a model and of its configuration."""
    name = config.__module__
    text = inspect.getsource(importlib.import_module(name))
    try:
        model = importlib.import_module(name.replace("configuration_", "modeling_"))
    except ImportError:
        return text
    return text + inspect.getsource(model)


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
