"""What a configuration of transformers says of positions, as encodings."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from mmpos.interop.transformers import absolute, relative, vision
from mmpos.interop.transformers.encodings import Encodings, Part
from mmpos.interop.transformers.families import FAMILIES, Family, head_dim_of, turns
from mmpos.interop.transformers.parameters import rotary_encoding
from mmpos.rotary import LogTemperature, RotaryEncoding
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
        return _turned(config, Family(layout=layout or "half", partial=True))
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


def _readers() -> dict[tuple[str, str], Reader]:
    rotary = {(name, ""): _by_family(family) for name, family in FAMILIES.items()}
    return {
        **rotary,
        **absolute.READERS,
        **relative.READERS,
        **vision.READERS,
        **{(name, ""): reader for name, reader in _OTHERS.items()},
    }


def _by_family(family: Family) -> Reader:
    return lambda config: _turned(config, family)


def _turned(config: Any, family: Family) -> Encodings:
    """Of a model whose configuration has rope parameters."""
    kinds = getattr(config, "layer_types", None) or []
    parameters = config.rope_parameters
    nested = [kind for kind in dict.fromkeys(kinds) if kind in parameters]
    of_kind: dict[str, RotaryEncoding] = {}
    for kind in nested or [""]:
        own = parameters[kind] if kind else parameters
        if own is not None:
            of_kind[kind] = _rotary(_layer(config, kind), own, family)
    each = [
        of_kind.get(kinds[layer] if nested else "") if turned else _resting(config, family)
        for layer, turned in enumerate(turns(config, family))
    ]
    same = all(own is each[0] for own in each)
    return Encodings(
        model_type=config.model_type,
        part="",
        layers=len(each),
        rotary=each[0] if same else tuple(each),
        scale=_scale(config, family),
        max_length=getattr(config, "max_position_embeddings", None),
    )


def _layer(config: Any, kind: str) -> Any:
    """The configuration of one kind of layer, where some options differ between them."""
    own = getattr(config, "per_layer_config", None) if kind else None
    try:
        return own[kind] if own is not None else config
    except (KeyError, ValueError):
        return config


def _rotary(config: Any, parameters: Mapping[str, Any], family: Family) -> RotaryEncoding:
    given = dict(parameters)
    for key in ("alpha", "llama_4_scaling_beta"):
        if given.get(key) is not None and key not in family.keys:
            raise ValueError(f"{config.model_type} does not read {key}={given[key]!r}: drop it")
    partial = given.get("partial_rotary_factor") not in (None, 1, 1.0)
    if partial and not family.partial and given.get("rope_type") != "proportional":
        raise ValueError(
            f"{config.model_type} turns whole heads and does not read "
            f"partial_rotary_factor={given['partial_rotary_factor']}: drop it"
        )
    if family.sections and given.get("mrope_section") is None:
        given["mrope_section"] = family.sections
    if family.sections:
        given["mrope_interleaved"] = family.interleaved
    elif given.get("mrope_section") is not None:
        raise ValueError(f"{config.model_type} has one axis and does not read mrope_section")
    layout: Layout = family.layout
    head_dim, width = head_dim_of(config), None
    if family.latent:
        width = config.qk_rope_head_dim
        head_dim = config.qk_nope_head_dim + width
        layout = "interleaved" if getattr(config, "rope_interleave", True) else "half"
    return rotary_encoding(
        given,
        head_dim,
        max_length=getattr(config, "max_position_embeddings", None),
        layout=layout,
        trailing=family.latent,
        rotary_dim=width,
    )


def _resting(config: Any, family: Family) -> RotaryEncoding | None:
    """What a layer has that does not turn: Llama 4 grows its queries instead."""
    if not getattr(config, "attn_temperature_tuning", False):
        return None
    grown = LogTemperature(length=config.floor_scale, beta=config.attn_scale)
    return RotaryEncoding(
        head_dim_of(config), rotary_dim=0, layout=family.layout, temperature=grown
    )


def _scale(config: Any, family: Family) -> float | None:
    if family.scale == "one":
        return 1.0
    if family.scale == "query_pre_attn_scalar":
        return config.query_pre_attn_scalar**-0.5
    if family.scale:
        return float(getattr(config, family.scale))
    if not family.latent:
        return None
    given = config.rope_parameters
    grown = given.get("mscale_all_dim") if given.get("rope_type", "default") != "default" else None
    if not grown:
        return None
    factor = 0.1 * grown * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * factor**2


def _gptj(config: Any) -> Encodings:
    head_dim = config.n_embd // config.n_head
    rotary = RotaryEncoding(head_dim, rotary_dim=config.rotary_dim or None)
    return Encodings(config.model_type, "", config.n_layer, rotary=rotary)


def _falcon(config: Any) -> Encodings:
    if config.alibi:
        return relative.READERS["falcon", ""](config)
    return _turned(config, FAMILIES["falcon"])


def _esm(config: Any) -> Encodings:
    if config.position_embedding_type != "rotary":
        return absolute.READERS["esm", ""](config)
    rotary = RotaryEncoding(head_dim_of(config), base=config.rope_theta, layout="half")
    return Encodings("esm", "", config.num_hidden_layers, rotary=rotary)


def _roformer(config: Any) -> Encodings:
    if config.rotary_value:
        raise ValueError("rotary_value=True turns values too, which no encoding of mmpos does")
    return Encodings(
        "roformer", "", config.num_hidden_layers, rotary=RotaryEncoding(head_dim_of(config))
    )


_OTHERS: dict[str, Reader] = {
    "gptj": _gptj,
    "codegen": _gptj,
    "falcon": _falcon,
    "roformer": _roformer,
}
