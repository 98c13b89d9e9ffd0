"""Towers of patches: what their configurations say of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmpos.additive import LearnedEncoding
from mmpos.coordinates import Centered, OneBased
from mmpos.frequencies import PositionInterpolation
from mmpos.interop.transformers.encodings import Encodings
from mmpos.positions import Axes
from mmpos.rotary import RotaryEncoding, VJEPA2Encoding


def _pair(size: Any) -> tuple[int, int]:
    """A size of an image or a patch, in rows and columns."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _grid(config: Any) -> tuple[int, int]:
    images, patches = _pair(config.image_size), _pair(config.patch_size)
    return images[0] // patches[0], images[1] // patches[1]


def _found(config: Any, **own: Any) -> Encodings:
    layers = getattr(config, "num_hidden_layers", None) or config.depth
    return Encodings(config.model_type, "", layers, **own)


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    width = getattr(config, "embed_dim", None) or config.hidden_size
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    return own or width // heads


def _base(config: Any) -> float:
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ("axial", "default"):
        raise ValueError(f"{config.model_type} turns axes alone, and does not read {kind!r}")
    return float(config.rope_parameters["rope_theta"])


def _qwen(config: Any) -> Encodings:
    axial = RotaryEncoding(_head_dim(config), 2, base=_base(config), layout="half")
    merged = config.spatial_merge_size
    table = getattr(config, "num_position_embeddings", None)
    added = f", and a learned table of {table} cells, read between them," if table else ""
    note = f"rows and columns{added} of patches in blocks of {merged} × {merged}"
    return _found(config, rotary=axial, note=note)


def _pixtral(config: Any) -> Encodings:
    head_dim, base = _head_dim(config), _base(config)
    between = PositionInterpolation(factor=base ** (2 / head_dim))
    axial = RotaryEncoding(head_dim, 2, base=base, layout="half", extension=(None, between))
    note = "rows have every second frequency of one spectrum, columns those between"
    return _found(config, rotary=axial, note=note)


def _dinov3(config: Any) -> Encodings:
    reading = Centered(
        turns=True,
        shift=config.pos_embed_shift or 0.0,
        jitter=config.pos_embed_jitter or 1.0,
        rescale=config.pos_embed_rescale or 1.0,
    )
    axial = RotaryEncoding(
        _head_dim(config), 2, base=config.rope_theta, layout="half", coordinates=reading
    )
    return _found(config, rotary=axial, note="class and register tokens have no place")


def _vjepa2(config: Any) -> Encodings:
    side = config.crop_size // config.patch_size
    grid: Axes = (config.frames_per_clip // config.tubelet_size, side, side)
    return _found(
        config, rotary=VJEPA2Encoding(_head_dim(config), grid), note="time, rows and columns"
    )


def _llama4(config: Any) -> Encodings:
    axial = RotaryEncoding(
        _head_dim(config), 2, base=_base(config), order=(1, 0), coordinates=OneBased()
    )
    return _found(config, rotary=axial, note="columns turn first; the class token comes last")


def _gemma4(config: Any) -> Encodings:
    raise ValueError(
        "gemma4_vision pairs features within the half of each axis, a layout that RotaryEncoding "
        "does not have: channel_plan(config) has it, and the order that makes it one it has"
    )


def _table(prefix_rows: int) -> Callable[[Any], Encodings]:
    def read(config: Any) -> Encodings:
        table = LearnedEncoding(config.hidden_size, _grid(config), prefix_rows=prefix_rows)
        return _found(config, additive=table)

    return read


READERS: dict[tuple[str, str], Callable[[Any], Encodings]] = {
    **{
        (name, ""): _qwen
        for name in (
            *("qwen2_vl_vision", "qwen2_5_vl_vision"),
            *("qwen3_vl_vision", "qwen3_vl_moe_vision"),
        )
    },
    ("pixtral", ""): _pixtral,
    ("dinov3_vit", ""): _dinov3,
    ("vjepa2", ""): _vjepa2,
    ("llama4_vision_model", ""): _llama4,
    ("gemma4_vision", ""): _gemma4,
    **{(name, ""): _table(1) for name in ("vit", "dinov2", "clip_vision_model")},
    ("deit", ""): _table(2),
    ("dinov2_with_registers", ""): _table(1),
    ("siglip_vision_model", ""): _table(0),
}
"""By model type and part."""
