"""What models of transformers turn queries and keys by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mmpos.frequencies import NTKAware
from mmpos.interop.transformers.encodings import Encodings
from mmpos.interop.transformers.families import FAMILIES, Family, head_dim_of, turns
from mmpos.interop.transformers.parameters import rotary_encoding
from mmpos.rotary import LogTemperature, RotaryEncoding, XDRoPE
from mmpos.rotary.rotation import Layout

Reader = Callable[[Any], Encodings]


def _by_family(family: Family) -> Reader:
    return lambda config: turned(config, family)


def turned(config: Any, family: Family) -> Encodings:
    """What a model knows whose configuration has rope parameters."""
    kinds = getattr(config, "layer_types", None) or []
    parameters = _parameters(config)
    nested = [kind for kind in dict.fromkeys(kinds) if kind in parameters]
    of_kind: dict[str, RotaryEncoding] = {}
    for kind in nested or [""]:
        own = parameters[kind] if kind else parameters
        if own is not None:
            of_kind[kind] = _rotary(_layer(config, kind), own, family)
    resting = _resting(config, family)
    each = [
        of_kind.get(kinds[layer] if nested else "") if turned else resting
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
        heads=None if family.latent else config.num_attention_heads,
        key_heads=None if family.latent else getattr(config, "num_key_value_heads", None),
    )


def of_unknown(config: Any, layout: Layout) -> Encodings:
    """What a model of an unknown type knows, that turns queries and keys as Llama's code does.

    Raises: ValueError for a configuration that says more than Llama's code reads.
    """
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or []}
    said = [name for name in _MORE_THAN_LLAMA if getattr(config, name, None)]
    said += ["layer_types"] if len(kinds) > 1 else []
    said += ["mrope_section"] if "mrope_section" in _parameters(config) else []
    if said:
        raise ValueError(
            f"{config.model_type} has {said[0]}, which Llama's code does not: its layout does not "
            "say what it turns; rotary_encoding(rope parameters, head_dim) makes an encoding"
        )
    return turned(config, Family(layout=layout, partial=True))


def _parameters(config: Any) -> Mapping[str, Any]:
    """The rope parameters of a configuration, in older words too.

    Raises: ValueError where there are none.
    """
    given = getattr(config, "rope_parameters", None)
    if given:
        return given
    theta = getattr(config, "rope_theta", None)
    if theta is None:
        raise ValueError(
            f"{config.model_type} has no rope parameters: it turns nothing that is known"
        )
    return {"rope_theta": theta, **(getattr(config, "rope_scaling", None) or {})}


_MORE_THAN_LLAMA = (
    *("qk_rope_head_dim", "position_embedding_type", "use_mem_rope", "no_rope_layers"),
    *("alibi", "attn_temperature_tuning", "relative_attention_num_buckets"),
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
        halves = config.model_type != "deepseek_v2" and not config.rope_interleave
        layout = "half" if halves else "interleaved"
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
    given = _parameters(config)
    grown = given.get("mscale_all_dim") if given.get("rope_type", "default") != "default" else None
    if not grown:
        return None
    factor = 0.1 * grown * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * factor**2


def _gptj(config: Any) -> Encodings:
    head_dim = config.n_embd // config.n_head
    rotary = RotaryEncoding(head_dim, rotary_dim=config.rotary_dim or None)
    return Encodings(config.model_type, "", config.n_layer, rotary=rotary)


def _esm(config: Any) -> Encodings:
    rotary = RotaryEncoding(head_dim_of(config), base=config.rope_theta, layout="half")
    return Encodings("esm", "", config.num_hidden_layers, rotary=rotary)


def _roformer(config: Any) -> Encodings:
    if config.rotary_value:
        raise ValueError("rotary_value=True turns values too, which no encoding of mmpos does")
    return Encodings(
        "roformer", "", config.num_hidden_layers, rotary=RotaryEncoding(head_dim_of(config))
    )


def _conformer(config: Any) -> Encodings:
    rotary = RotaryEncoding(
        head_dim_of(config), base=float(config.rotary_embedding_base), layout="half"
    )
    return Encodings(config.model_type, "", config.num_hidden_layers, rotary=rotary)


def _hunyuan_vl(config: Any) -> Encodings:
    """By the rotation that all families have, but for how its pairs read the axes."""
    given = dict(config.rope_parameters)
    sections = given.pop("mrope_section", None)
    if sections is None:
        raise ValueError("hunyuan_vl_text needs mrope_section: pairs of each axis")
    plain = _rotary(config, given, Family(keys=("alpha",)))
    if not isinstance(plain.extension, NTKAware | None):
        raise ValueError(f"hunyuan_vl_text with {plain.extension} is no scheme that is known")
    rotary = XDRoPE(
        plain.head_dim,
        len(sections),
        sections=sections,
        base=float(given["rope_theta"]),
        extension=plain.extension,
    )
    return Encodings(config.model_type, "", config.num_hidden_layers, rotary=rotary)


READERS: dict[tuple[str, str], Reader] = {
    **{(name, ""): _by_family(family) for name, family in FAMILIES.items()},
    ("gptj", ""): _gptj,
    ("codegen", ""): _gptj,
    ("roformer", ""): _roformer,
    ("esm", ""): _esm,
    ("wav2vec2-conformer", ""): _conformer,
    ("wav2vec2-bert", ""): _conformer,
    ("hunyuan_vl_text", ""): _hunyuan_vl,
}
"""By model type and part."""
