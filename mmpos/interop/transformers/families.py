"""How each family of models with RoPE turns queries and keys, beside what its parameters say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mmpos.rotary.rotation import Layout


@dataclass(frozen=True)
class Family:
    """What the code of a family fixes, and its configurations do not say.

    Args:
        layout: of the weights of queries and keys.
        partial: whether ``partial_rotary_factor`` is read; where it is not, the whole head turns.
        sections: pairs of each axis where the parameters do not say (M-RoPE).
        interleaved: whether axes take pairs in turn, or have sections one after the other.
        scale: the option whose number multiplies scores, in place of ``head_dim ** -0.5``;
            ``"one"`` for families that do not scale.
        latent: whether keys have a part of their own that turns (DeepSeek's MLA).
        resting: which layers do not turn: ``"listed"`` in ``no_rope_layers``, or those of
            ``"global"`` attention where others have a window.
        keys: rope parameters that the family reads beside those of transformers.
    """

    layout: Layout = "half"
    partial: bool = False
    sections: tuple[int, ...] | None = None
    interleaved: bool = False
    scale: str = ""
    latent: bool = False
    resting: str = ""
    keys: tuple[str, ...] = ()


_PLAIN = Family()
_PARTIAL = Family(partial=True)
_NEIGHBOURS = Family(layout="interleaved")
_SCALAR = Family(scale="query_pre_attn_scalar")
_UNSCALED = Family(scale="one")
_MULTIPLIED = Family(scale="attention_multiplier")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            *("apertus", "arcee", "bitnet", "chameleon", "csm", "cwm", "dbrx", "diffllama"),
            *("doge", "dots1", "eurobert", "falcon", "flex_olmo", "gemma", "gpt_oss", "gte"),
            *("jina_embeddings_v3", "llama", "mimi", "ministral", "mistral", "mixtral"),
            *("mllama_text_model", "modernbert", "modernbert-decoder", "moshi", "nomic_bert"),
            *("olmo", "olmo2", "olmo3", "olmoe", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
            *("qwen3_moe", "seed_oss", "starcoder2"),
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        (
            *("glm4_moe", "gpt_neox", "gpt_neox_japanese", "minimax_m2", "nemotron"),
            *("persimmon", "phi", "phi3", "qwen3_next", "stablelm"),
        ),
        _PARTIAL,
    ),
    **dict.fromkeys(("cohere", "ernie4_5", "ernie4_5_moe", "helium"), _NEIGHBOURS),
    "glm": Family(layout="interleaved", partial=True),
    "glm4": Family(layout="interleaved", partial=True),
    "cohere2": replace(_NEIGHBOURS, resting="global"),
    "exaone4": replace(_PLAIN, resting="global"),
    "smollm3": replace(_PLAIN, resting="listed"),
    "llama4_text": replace(_NEIGHBOURS, resting="listed"),
    **dict.fromkeys(("gemma2", "gemma3_text", "vaultgemma"), _SCALAR),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), _UNSCALED),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _MULTIPLIED),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), replace(_PLAIN, keys=("alpha",))),
    "ministral3": replace(_PLAIN, keys=("llama_4_scaling_beta",)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(layout="interleaved", latent=True)),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), Family(sections=(16, 24, 24))),
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text"), Family(sections=(24, 20, 20), interleaved=True)
    ),
    "qwen3_5_text": Family(partial=True, sections=(11, 11, 10), interleaved=True),
    "glm4v_text": Family(layout="interleaved", partial=True, sections=(8, 12, 12)),
}
"""By the ``model_type`` of transformers."""


def head_dim_of(config: Any) -> int:
    """Features of a head, as the modelling code has it."""
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def turns(config: Any, family: Family) -> list[bool]:
    """Whether each layer turns queries and keys."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * layers
    attends = [kind not in ("linear_attention", "conv", "mamba") for kind in kinds]
    if family.resting == "listed":
        listed = config.no_rope_layers or [1] * layers
        return [bool(own) for own in listed[:layers]]
    if family.resting == "global" and getattr(config, "sliding_window", None) is not None:
        return [kind == "sliding_attention" for kind in kinds]
    return attends
