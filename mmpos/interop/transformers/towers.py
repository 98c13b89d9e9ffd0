"""Channel plans of transformers' vision towers and multimodal text models, from their configs."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from mmpos.coordinates import Centered, OneBased, Scaled
from mmpos.frequencies import geometric
from mmpos.interop.transformers.configuration import configuration
from mmpos.interop.transformers.plan import ChannelPlan

HEIGHT, WIDTH = 0, 1
"""Axes of a plan of two; one of three begins with time."""


def channel_plan(config: Any) -> ChannelPlan:
    """What a model of transformers does to each feature of q and k, by its configuration.

    For models whose tokens have several coordinates: vision towers, and text models with M-RoPE.
    Axes are those of mmpos, (time,) height, width, whatever the order in which the model has them;
    HunyuanVL's are the order in the text, width, height and image. Positions are indices of the
    grid: how the model reads them is the plan's ``coordinates``. A configuration of several
    networks stands for its vision tower; give that of the text model for the text model.

    Args:
        config: a configuration, its data, a folder, or a model.

    Raises: TypeError for what is no configuration; ValueError for a model type that is not known or
    has no rotation, a kind of context extension in it, or sections that do not fit.

    >>> import transformers
    >>> config = transformers.PixtralVisionConfig(hidden_size=64, num_attention_heads=4)
    >>> print(channel_plan(config))
    16 features: h 0–3, 8–11; w 4–7, 12–15; pairs (c, c + 8); frequencies 1 to 0.0003162; a rotation
    """
    config = configuration(config)
    kind = config.model_type
    if kind in PLANS:
        return PLANS[kind](config)
    inner = _tower(config)
    if inner is not None:
        return channel_plan(inner)
    if kind in WITHOUT:
        raise ValueError(f"{kind} has {WITHOUT[kind]}, and rotates nothing: it has no plan")
    near = difflib.get_close_matches(kind, PLANS, 3)
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(PLANS)}"
    raise ValueError(
        f"no plan is known for model type {kind!r}: {hint}; ChannelPlan.of reads an encoding's"
    )


def _tower(config: Any) -> Any:
    """The one vision tower of a configuration, also within its thinker or vision part."""
    names = ("vision_config", "thinker_config", "backbone_config")
    found = [getattr(config, name, None) for name in names]
    found = [inner for inner in found if getattr(inner, "model_type", None)]
    return found[0] if len(found) == 1 else None


def _head(config: Any) -> int:
    """Features of a head."""
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return getattr(config, "head_dim", None) or width // config.num_attention_heads


def _theta(config: Any, allowed: tuple[str, ...] = ("axial", "default")) -> float:
    """The base; raises ValueError for frequencies that are not those of the base alone."""
    given = config.rope_parameters
    kind = given.get("rope_type", "default")
    if kind not in allowed:
        raise ValueError(
            f"{config.model_type} has rope_type {kind!r}, a plan is known for {allowed}: "
            "make an encoding with this extension, and ChannelPlan.of it"
        )
    return given["rope_theta"]


def _axial(config: Any) -> ChannelPlan:
    """Half the pairs for rows, half for columns, each with its own spectrum; halves are pairs."""
    return _blocks(config, "half", (HEIGHT, WIDTH))


def _blocks(config: Any, pairs: Any, order: tuple[int, int], **more: Any) -> ChannelPlan:
    """Two blocks of pairs with the same spectrum, of one axis each."""
    width = _head(config)
    share = width // 4
    axis = [own for own in order for _ in range(share)]
    spectrum = 2 * geometric(share, _theta(config))
    return ChannelPlan.of_pairs(width, pairs, axis, spectrum, axes=2, **more)


def _pixtral(config: Any) -> ChannelPlan:
    """One spectrum: rows have its even frequencies, columns its odd ones."""
    width = _head(config)
    spectrum = geometric(width // 2, _theta(config))
    rows, columns = spectrum[::2], spectrum[1::2]
    axis = [HEIGHT] * len(rows) + [WIDTH] * len(columns)
    return ChannelPlan.of_pairs(width, "half", axis, rows + columns, axes=2)


def _gemma4(config: Any) -> ChannelPlan:
    """Half the features for columns, half for rows, and in each the halves are pairs."""
    share = _head(config) // 4
    pairs = [(start + p, start + share + p) for start in (0, 2 * share) for p in range(share)]
    return _blocks(config, pairs, (WIDTH, HEIGHT))


def _dinov3(config: Any) -> ChannelPlan:
    """Rows, then columns, of coordinates from -1 to 1 in whole turns."""
    width = config.hidden_size // config.num_attention_heads
    share = width // 4
    reading = Centered(
        turns=True,
        shift=config.pos_embed_shift or 0.0,
        jitter=config.pos_embed_jitter or 1.0,
        rescale=config.pos_embed_rescale or 1.0,
    )
    axis = [HEIGHT] * share + [WIDTH] * share
    spectrum = 2 * geometric(share, config.rope_theta)
    return ChannelPlan.of_pairs(width, "half", axis, spectrum, axes=2, coordinates=reading)


def _vjepa2(config: Any) -> ChannelPlan:
    """Time, rows, columns: neighbours are pairs, with frequencies as if halves were."""
    width = config.hidden_size // config.num_attention_heads
    share = width // 3 // 2
    turned = 6 * share
    rest = [None] * (width - turned)
    own = 2 * geometric(share, 10000.0)
    return ChannelPlan(
        partner=(*(feature ^ 1 for feature in range(turned)), *range(turned, width)),
        sign=(-1, 1) * (turned // 2) + (0,) * len(rest),
        axis=(*(axis for axis in range(3) for _ in own), *rest),
        frequency=(*3 * own, *(0.0 for _ in rest)),
        axes=3,
    )


def _llama4(config: Any) -> ChannelPlan:
    """Columns, then rows, counted from one; neighbours are pairs."""
    return _blocks(config, "interleaved", (WIDTH, HEIGHT), coordinates=OneBased())


def _step3(config: Any) -> ChannelPlan:
    """Columns, then rows; halves are pairs."""
    return _blocks(config, "half", (WIDTH, HEIGHT))


def _kimi(config: Any) -> ChannelPlan:
    """Columns and rows take pairs in turn, with each frequency for both."""
    width = _head(config)
    spectrum = geometric(width // 4, _theta(config))
    axis = [WIDTH, HEIGHT] * len(spectrum)
    doubled = [each for each in spectrum for _ in range(2)]
    return ChannelPlan.of_pairs(width, "half", axis, doubled, axes=2)


def _minimax(config: Any) -> ChannelPlan:
    """Time, rows, columns, a third each; what is left of the head passes."""
    width = _head(config)
    share = width // 3 // 2
    axis = [axis for axis in range(3) for _ in range(share)]
    spectrum = 3 * geometric(share, _theta(config))
    return ChannelPlan.of_pairs(width, "half", axis, spectrum, axes=3)


def _sam2(config: Any) -> ChannelPlan:
    """Of the attention to memory: columns, then rows; neighbours are pairs."""
    narrow = config.memory_attention_hidden_size // config.memory_attention_downsample_rate
    share = narrow // config.memory_attention_num_attention_heads // 4
    axis = [WIDTH] * share + [HEIGHT] * share
    spectrum = 2 * geometric(share, _theta(config))
    return ChannelPlan.of_pairs(4 * share, "interleaved", axis, spectrum, axes=2)


def _sam3(config: Any) -> ChannelPlan:
    """Columns, then rows, scaled to a window; neighbours are pairs."""
    reading = Scaled((config.window_size,) * 2)
    return _blocks(config, "interleaved", (WIDTH, HEIGHT), coordinates=reading)


def _text_pairs(config: Any) -> int:
    """Pairs that are turned in a head of a text model."""
    return int(_head(config) * config.rope_parameters.get("partial_rotary_factor", 1.0)) // 2


def _sections(config: Any, default: tuple[int, ...], pairs: int) -> list[int]:
    """Pairs of each of three axes; raises ValueError unless they are all of the pairs."""
    sections = list(config.rope_parameters.get("mrope_section") or default)
    if len(sections) != 3 or sum(sections) != pairs:
        raise ValueError(
            f"{config.model_type} has mrope_section {sections}, expected 3 numbers that are "
            f"{pairs} in all, half the features that are turned"
        )
    return sections


def _chunked(layout: Any, default: tuple[int, ...]) -> Callable[[Any], ChannelPlan]:
    """M-RoPE with sections of one spectrum, one after the other."""

    def plan(config: Any) -> ChannelPlan:
        width, pairs = _head(config), _text_pairs(config)
        sections = _sections(config, default, pairs)
        axis = [axis for axis, count in enumerate(sections) for _ in range(count)]
        spectrum = geometric(pairs, _theta(config))
        return ChannelPlan.of_pairs(width, layout, axis, spectrum, axes=3)

    return plan


def _in_turn(default: tuple[int, ...]) -> Callable[[Any], ChannelPlan]:
    """M-RoPE whose axes take pairs in turn, as far as a section goes; the rest is time's."""

    def plan(config: Any) -> ChannelPlan:
        width, pairs = _head(config), _text_pairs(config)
        sections = list(config.rope_parameters.get("mrope_section") or default)
        if len(sections) != 3:
            raise ValueError(
                f"{config.model_type} has mrope_section {sections}, expected 3 numbers"
            )
        axis = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
        spectrum = geometric(pairs, _theta(config))
        return ChannelPlan.of_pairs(width, "half", axis, spectrum, axes=3)

    return plan


def _hunyuan(config: Any) -> ChannelPlan:
    """XD-RoPE: halves are pairs, but sections are of features, so that pairs mix axes."""
    width, given = _head(config), config.rope_parameters
    base = _theta(config, ("default", "dynamic"))
    if given.get("rope_type") == "dynamic":
        if not given.get("alpha"):
            raise ValueError("hunyuan_vl_text has rope_type 'dynamic' without alpha: no one plan")
        base *= given["alpha"] ** (width / (width - 2))
    sections = [int(each) for each in given.get("mrope_section") or ()]
    if sum(sections) != width // 2:
        raise ValueError(
            f"hunyuan_vl_text has mrope_section {sections or None}, expected numbers that are "
            f"{width // 2} in all"
        )
    half = width // 2
    return ChannelPlan(
        partner=tuple((feature + half) % width for feature in range(width)),
        sign=(-1,) * half + (1,) * half,
        axis=tuple(axis for axis, count in enumerate(sections) for _ in range(2 * count)),
        frequency=tuple(2 * geometric(half, base)),
        axes=len(sections),
    )


PLANS: dict[str, Callable[[Any], ChannelPlan]] = {
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_5_vl_vision"), _axial),
    **dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe_vision", "glm4v_vision"), _axial),
    **dict.fromkeys(("qwen3_5_vision", "qwen3_5_moe_vision", "glm4v_moe_vision"), _axial),
    **dict.fromkeys(("glm_ocr_vision", "ernie4_5_vl_moe_vision", "exaone4_5_vision"), _axial),
    **dict.fromkeys(("video_llama_3_vision", "paddleocr_vl_vision", "lfm3_vl_vision"), _axial),
    **dict.fromkeys(("qwen2_5_omni_vision_encoder", "qwen3_omni_moe_vision_encoder"), _axial),
    "step3p5_vision": _step3,
    "inkling2_vision": _llama4,
    "pixtral": _pixtral,
    "gemma4_vision": _gemma4,
    "dinov3_vit": _dinov3,
    "vjepa2": _vjepa2,
    "llama4_vision_model": _llama4,
    "minimax_m3_vl_vision": _minimax,
    "kimi_k25_vision": _kimi,
    **dict.fromkeys(("sam2_video", "edgetam_video", "sam3_tracker_video"), _sam2),
    "sam3_vit_model": _sam3,
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _chunked("half", (16, 24, 24))),
    "qwen2_5_omni_text": _chunked("half", (16, 24, 24)),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), _chunked("interleaved", (8, 12, 12))),
    "glm4v_moe_text": _chunked("half", (8, 12, 12)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), _in_turn((24, 20, 20))),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _in_turn((11, 11, 10))),
    "hunyuan_vl_text": _hunyuan,
}
"""By the model type of a network."""

WITHOUT = {
    **dict.fromkeys(
        ("siglip_vision_model", "siglip2_vision_model", "clip_vision_model"), "a table"
    ),
    **dict.fromkeys(("vit", "dinov2", "beit", "hunyuan_vl_vision"), "a table"),
}
"""Towers that know positions otherwise."""
