"""What published checkpoints say of positions, by the names that people call them."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from typing import Any


def preset(name: str) -> dict[str, Any]:
    """The data of a published ``config.json``, as far as it says something of positions.

    `encodings` reads it, and `compare` holds two of them against each other. Of a model that sees,
    it is the network of language, or the tower where the name ends in ``-vision``. T5 and Whisper
    have a part ``encoder`` and a part ``decoder``.

    Args:
        name: one of `PRESETS`, in any case.

    Returns: a copy of its own, which may be changed.
    Raises: ValueError for a name that is not known.

    >>> from mmpos.interop.transformers import encodings
    >>> print(encodings(preset("gpt-neox-20b")))
    gpt_neox: 44 layers
      rotary: RotaryEncoding(head_dim=96, axes=1, base=10000.0, rotary_dim=24, layout=half)
    """
    known = PRESETS.get(name.lower())
    if known is None:
        near = difflib.get_close_matches(name.lower(), list(PRESETS), 3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(PRESETS)}"
        raise ValueError(f"preset {name!r} is not known: {hint}")
    return copy.deepcopy(known)


_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)


def _model(
    model_type: str,
    sizes: tuple[int, ...],
    rope: Mapping[str, Any] | float | None = None,
    **own: Any,
) -> dict[str, Any]:
    """Of the usual names, whose ``sizes`` are the first of `_SIZES`; ``rope`` may be a base."""
    data = {"model_type": model_type, **dict(zip(_SIZES, sizes, strict=False))}
    if rope is not None:
        data["rope_parameters"] = dict(rope) if isinstance(rope, Mapping) else _rope(rope)
    return {**data, **own}


def _rope(base: float, rope_type: str = "default", **own: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": base, **own}


def _extended(original: int, base: float, rope_type: str, **own: Any) -> dict[str, Any]:
    return _rope(base, rope_type, original_max_position_embeddings=original, **own)


def _llama3(factor: float) -> dict[str, Any]:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _extended(8192, 5e5, "llama3", factor=factor, **bands)


def _deepseek(mscale: float) -> dict[str, Any]:
    ramp = {"beta_fast": 32.0, "beta_slow": 1.0}
    grown = {"mscale": mscale, "mscale_all_dim": mscale}
    return _extended(4096, 1e4, "yarn", factor=40.0, **ramp, **grown)


def _longrope(short: str, long: str, **own: Any) -> dict[str, Any]:
    lists = {
        "short_factor": [float(factor) for factor in short.split()],
        "long_factor": [float(factor) for factor in long.split()],
    }
    return _extended(4096, 1e4, "longrope", factor=32.0, **lists, **own)


_PHI_3_MINI = _longrope(
    """
1.1 1.1 1.1 1.3000000000000003 1.3500000000000003 1.3500000000000003 1.4000000000000004
1.5500000000000005 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001 2.000000000000001
2.000000000000001 2.000000000000001 2.000000000000001 2.0500000000000007 2.0500000000000007
2.0500000000000007 2.0500000000000007 2.0500000000000007 2.0500000000000007 2.1000000000000005
2.1000000000000005 2.1500000000000004 2.25 2.25 2.25 2.25 2.25 2.3999999999999995 2.4499999999999993
2.499999999999999 2.6999999999999984 2.6999999999999984 2.7499999999999982 2.799999999999998
2.8999999999999977 3.049999999999997
""",
    """
1.0700000524520874 1.1200000047683716 1.149999976158142 1.4199999570846558 1.5699999332427979
1.7999999523162842 2.129999876022339 2.129999876022339 3.009999990463257 5.910000324249268
6.950000286102295 9.070000648498535 9.930000305175781 10.710000038146973 11.130000114440918
14.609999656677246 15.409998893737793 19.809999465942383 37.279998779296875 38.279998779296875
38.599998474121094 40.12000274658203 46.20000457763672 50.940006256103516 53.66000747680664
54.9373893737793 56.89738845825195 57.28738784790039 59.98738479614258 60.86738586425781
60.887386322021484 61.71739196777344 62.91739273071289 62.957393646240234 63.41739273071289
63.8173942565918 63.83739471435547 63.897396087646484 63.93739700317383 64.06739807128906
64.11434936523438 64.12435150146484 64.15435028076172 64.19435119628906 64.24435424804688
64.57435607910156 64.69000244140625 64.76000213623047
""",
)
_PHI_4_MINI = _longrope(
    "1.0 " * 48,
    """
1.0 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 2.446418898
2.735880826 3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 5.351743533 5.984965424
6.693110555 7.485043894 8.370679318 9.36110372 10.4687158 11.70738129 13.09260651 14.64173252
16.37415215 18.31155283 20.47818807 22.90118105 25.61086418 28.64115884 32.03 32.1 32.13 32.23 32.6
32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28 33.49 33.5 44.16 47.77
""",
    partial_rotary_factor=0.75,
)
_PART = _rope(1e4, partial_rotary_factor=0.25)
_LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}

# A comment says whose configuration it is; one without an owner is of those above it.
PRESETS: dict[str, dict[str, Any]] = {
    # meta-llama: Llama-2-7b-hf, Meta-Llama-3-8B, Llama-3.1-8B, Llama-3.2-1B and -3B
    "llama-2-7b": _model("llama", (32, 4096, 32, 32, 4096), 1e4),
    "llama-3-8b": _model("llama", (32, 4096, 32, 8, 8192), 5e5),
    "llama-3.1-8b": _model("llama", (32, 4096, 32, 8, 131072), _llama3(8.0)),
    "llama-3.2-1b": _model("llama", (16, 2048, 32, 8, 131072), _llama3(32.0), head_dim=64),
    "llama-3.2-3b": _model("llama", (28, 3072, 24, 8, 131072), _llama3(32.0), head_dim=128),
    # meta-llama/Llama-4-Scout-17B-16E, its network of language
    "llama-4-scout": _model(
        "llama4_text",
        (48, 5120, 40, 8, 10485760),
        {**_llama3(16.0), "high_freq_factor": 1.0},
        head_dim=128,
        no_rope_layers=[1, 1, 1, 0] * 12,
    ),
    # codellama/CodeLlama-7b-hf
    "code-llama-7b": _model("llama", (32, 4096, 32, 32, 16384), 1e6),
    # mistralai: Mistral-7B-v0.1 and -v0.3, Mixtral-8x7B-v0.1
    "mistral-7b-v0.1": _model("mistral", (32, 4096, 32, 8, 32768), 1e4),
    "mistral-7b-v0.3": _model("mistral", (32, 4096, 32, 8, 32768), 1e6),
    "mixtral-8x7b": _model("mixtral", (32, 4096, 32, 8, 32768), 1e6),
    # Qwen: Qwen2.5-7B-Instruct, as it is and with YaRN as its card says; Qwen3-8B
    "qwen2.5-7b": _model("qwen2", (28, 3584, 28, 4, 32768), 1e6),
    "qwen2.5-7b-yarn": _model(
        "qwen2", (28, 3584, 28, 4, 32768), _extended(32768, 1e6, "yarn", factor=4.0)
    ),
    "qwen3-8b": _model("qwen3", (36, 4096, 32, 8, 40960), 1e6, head_dim=128),
    # Qwen: Qwen2-VL-7B-Instruct, Qwen2.5-VL-7B-Instruct, Qwen3-VL-8B-Instruct, their text models
    "qwen2-vl-7b": _model(
        "qwen2_vl_text", (28, 3584, 28, 4, 32768), _rope(1e6, mrope_section=[16, 24, 24])
    ),
    "qwen2.5-vl-7b": _model(
        "qwen2_5_vl_text", (28, 3584, 28, 4, 128000), _rope(1e6, mrope_section=[16, 24, 24])
    ),
    "qwen3-vl-8b": _model(
        "qwen3_vl_text",
        (36, 4096, 32, 8, 262144),
        _rope(5e6, mrope_section=[24, 20, 20], mrope_interleaved=True),
        head_dim=128,
    ),
    # google: gemma-7b, gemma-2-9b, gemma-3-4b-it (text_config)
    "gemma-7b": _model("gemma", (28, 3072, 16, 16, 8192), 1e4, head_dim=256),
    "gemma-2-9b": _model(
        "gemma2", (42, 3584, 16, 8, 8192), 1e4, head_dim=256, query_pre_attn_scalar=256
    ),
    "gemma-3-4b": _model(
        "gemma3_text",
        (34, 2560, 8, 4, 131072),
        {"sliding_attention": _rope(1e4), "full_attention": _rope(1e6, "linear", factor=8.0)},
        head_dim=256,
        query_pre_attn_scalar=256,
        layer_types=[
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)
        ],
    ),
    # microsoft: phi-2, Phi-3-mini-4k-instruct, -128k-instruct, phi-4, Phi-4-mini-instruct
    "phi-2": _model("phi", (32, 2560, 32, 32, 2048), _rope(1e4, partial_rotary_factor=0.4)),
    "phi-3-mini-4k": _model("phi3", (32, 3072, 32, 32, 4096), 1e4),
    "phi-3-mini-128k": _model("phi3", (32, 3072, 32, 32, 131072), _PHI_3_MINI),
    "phi-4": _model("phi3", (40, 5120, 40, 10, 16384), 2.5e5),
    "phi-4-mini": _model("phi3", (32, 3072, 24, 8, 131072), _PHI_4_MINI),
    # EleutherAI: gpt-neox-20b, pythia-6.9b, gpt-j-6b
    "gpt-neox-20b": _model("gpt_neox", (44, 6144, 64), _PART, max_position_embeddings=2048),
    "pythia-6.9b": _model("gpt_neox", (32, 4096, 32), _PART, max_position_embeddings=2048),
    "gpt-j-6b": {
        "model_type": "gptj",
        "n_layer": 28,
        "n_embd": 4096,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
    },
    # tiiuae/falcon-7b
    "falcon-7b": _model("falcon", (32, 4544, 71), 1e4, max_position_embeddings=2048),
    # deepseek-ai: DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3
    "deepseek-v2-lite": _model(
        "deepseek_v2", (27, 2048, 16, 16, 163840), _deepseek(0.707), **_LATENT
    ),
    "deepseek-v2": _model("deepseek_v2", (60, 5120, 128, 128, 163840), _deepseek(0.707), **_LATENT),
    "deepseek-v3": _model("deepseek_v3", (61, 7168, 128, 128, 163840), _deepseek(1.0), **_LATENT),
    # openai/gpt-oss-20b
    "gpt-oss-20b": _model(
        "gpt_oss",
        (24, 2880, 64, 8, 131072),
        _extended(4096, 1.5e5, "yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False),
        head_dim=64,
    ),
    # HuggingFaceTB/SmolLM3-3B
    "smollm3-3b": _model("smollm3", (36, 2048, 16, 4, 65536), 5e6, no_rope_layers=[1, 1, 1, 0] * 9),
    # allenai/OLMo-2-1124-7B
    "olmo-2-7b": _model("olmo2", (32, 4096, 32, 32, 4096), 5e5),
    # bigscience/bloom-7b1
    "bloom-7b1": {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32},
    # mosaicml/mpt-7b
    "mpt-7b": {
        "model_type": "mpt",
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "max_seq_len": 2048,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
    },
    # openai-community/gpt2
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024},
    # google-bert/bert-base-uncased, FacebookAI/roberta-base, facebook/opt-1.3b
    "bert-base-uncased": _model("bert", (12, 768, 12), max_position_embeddings=512),
    "roberta-base": _model("roberta", (12, 768, 12), max_position_embeddings=514, pad_token_id=1),
    "opt-1.3b": _model("opt", (24, 2048, 32), max_position_embeddings=2048),
    # google-t5/t5-base
    "t5-base": {
        "model_type": "t5",
        "num_layers": 12,
        "d_model": 768,
        "num_heads": 12,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    # answerdotai/ModernBERT-base
    "modernbert-base": _model(
        "modernbert",
        (22, 768, 12),
        {"sliding_attention": _rope(1e4), "full_attention": _rope(1.6e5)},
        max_position_embeddings=8192,
        layer_types=["sliding_attention" if layer % 3 else "full_attention" for layer in range(22)],
    ),
    # openai/whisper-small
    "whisper-small": {
        "model_type": "whisper",
        "encoder_layers": 12,
        "decoder_layers": 12,
        "d_model": 768,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    # facebook: dinov3-vits16-pretrain-lvd1689m, vjepa2-vitl-fpc64-256
    "dinov3-vits16": _model(
        "dinov3_vit",
        (12, 384, 6),
        image_size=224,
        patch_size=16,
        rope_theta=100.0,
        pos_embed_rescale=2.0,
    ),
    "vjepa2-vitl": _model(
        "vjepa2",
        (24, 1024, 16),
        crop_size=256,
        patch_size=16,
        frames_per_clip=64,
        tubelet_size=2,
    ),
    # mistralai/Pixtral-12B-2409, its tower
    "pixtral-12b-vision": _model(
        "pixtral",
        (24, 1024, 16),
        _rope(1e4),
        image_size=1024,
        patch_size=16,
    ),
}
