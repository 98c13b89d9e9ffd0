"""What makes queries and keys in a model of transformers, found by names, with its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

QUERIES, KEYS, BLOCKS, GROUPS, LATENT = "queries", "keys", "blocks", "groups", "latent"

ROLES = {
    **dict.fromkeys(("q_proj", "query", "wq", "q_b_proj"), QUERIES),
    **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), QUERIES),
    **dict.fromkeys(("k_proj", "key", "wk"), KEYS),
    **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), KEYS),
    **dict.fromkeys(("qkv_proj", "qkv", "Wqkv", "c_attn"), BLOCKS),
    "query_key_value": GROUPS,
    "kv_a_proj_with_mqa": LATENT,
}
"""What a module of this name makes: queries, keys, blocks of queries, keys and values, these in a
group for each key head, or MLA's latent with the one key that is turned."""

NORMS = {name for name in ROLES if "norm" in name}
WRAPPERS = {"base_layer", "linear", "original_module", "modules_to_save", "default"}
"""Names between that of a projection and its weight, of those who wrap it."""

OWN = ("codegen", "gpt_bigcode", "minimax")
"""Model types in which fused projections have another arrangement under the same name."""
GATED = ("qwen3_next", "qwen3_5", "qwen4_exp")
"""Beginnings of those in which each head of queries is followed by its gate."""
RECURRENT = ("A_log", "dt_bias", "conv1d")
"""What lies beside the projections of linear attention, which rotates nothing."""


class Widths(NamedTuple):
    """Features of a head, and which of them are turned."""

    head_dim: int
    rotary_dim: int | None = None
    trailing: bool = False


class Sizes(NamedTuple):
    """Heads of a network, and what lies in one."""

    head: Widths
    heads: int | None
    key_heads: int | None
    latent: Widths | None = None
    gated: bool = False


class Move(NamedTuple):
    """Where in a tensor heads of queries and keys begin."""

    dim: int
    starts: tuple[int, ...]
    latent: bool = False


def widths(
    config: Any,
    *,
    head_dim: int | None,
    heads: int | None,
    key_heads: int | None,
    rotary_dim: int | None,
    trailing: bool | None,
) -> Sizes:
    """The sizes that are given, and those of a configuration for the rest.

    Raises: ValueError for no head_dim, a configuration of several networks, or layers that differ.
    """
    varying = getattr(config, "per_layer_attributes", None) or ()
    given = {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    unlike = [name for name, value in given.items() if name in varying and value is None]
    if unlike:
        raise ValueError(
            f"{config.model_type} has layers of other {' and '.join(unlike)}: permute the weights "
            "of each kind of layer with its own"
        )

    def read(*names: str) -> Any:
        return next((each for name in names if (each := getattr(config, name, None))), None)

    kind = read("model_type") or ""
    if kind in OWN:
        raise ValueError(
            f"{kind} arranges queries, keys and values in a way that is not known here"
        )
    if read("text_config", "vision_config", "thinker_config") is not None:
        raise ValueError(
            f"{kind} is of several networks: pass one, such as model.language_model, "
            "and its configuration, such as config.text_config"
        )
    heads = heads or read("num_attention_heads")
    if key_heads is None:
        key_heads = _key_heads(config, read("num_key_value_heads", "num_kv_heads"), heads)
    rope, nope = read("qk_rope_head_dim"), read("qk_nope_head_dim") or 0
    if rope is not None and read("kv_lora_rank") is not None:
        latent = Widths(read("kv_lora_rank") + rope, rope, True)
        return Sizes(Widths(nope + rope, rope, True), heads, heads, latent)
    if head_dim is None:
        head_dim = read("head_dim")
        if head_dim is None and heads and read("hidden_size"):
            head_dim = read("hidden_size") // heads
        if read("global_head_dim") not in (None, head_dim):
            raise ValueError(
                f"{kind} has heads of {head_dim} and {read('global_head_dim')} "
                "features: permute the weights of each kind of layer with its head_dim"
            )
    if head_dim is None:
        raise ValueError("pass head_dim, or a configuration that says it")
    if rotary_dim is None and config is not None:
        rotary_dim = _rotary_dim(config, head_dim)
    head = Widths(head_dim, rotary_dim, bool(trailing))
    return Sizes(head, heads, key_heads, gated=kind.startswith(GATED))


def _key_heads(config: Any, given: int | None, heads: int | None) -> int | None:
    """Key heads; Falcon has one or as many as queries unless its decoder is the new one."""
    if getattr(config, "new_decoder_architecture", None) is False:
        return 1 if config.multi_query else heads
    return given or heads


def _rotary_dim(config: Any, head_dim: int) -> int | None:
    """How many features of a head are turned; raises ValueError where layers differ."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in given.values() if isinstance(each, dict)] or [given]
    share = getattr(config, "partial_rotary_factor", None) or 1.0
    found = {
        1.0
        if each.get("rope_type") == "proportional"
        else each.get("partial_rotary_factor") or share
        for each in kinds
    }
    if len(found) > 1:
        raise ValueError(
            f"layers turn other shares of a head, {sorted(found)}: permute the weights of each "
            "kind of layer with its rotary_dim"
        )
    (share,) = found
    own = getattr(config, "rotary_dim", None)
    return own if own and share == 1 else int(head_dim * share)


def moves(held: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Move]:
    """Which tensors have features of queries and keys, and where.

    Raises: ValueError if there are none, or one has not the shape; TypeError for quantised ones.
    """
    found = {}
    keys = [key.split(".") for key in held]
    recurrent = {
        tuple(parts[:place])
        for parts in keys
        for place, part in enumerate(parts)
        if part.endswith(RECURRENT)
    }
    for key, weights in held.items():
        parts = key.split(".")
        places = [place for place, part in enumerate(parts) if part in ROLES]
        if not places or places[-1] == len(parts) - 1 or weights.numel() == 1:
            continue
        if tuple(parts[: places[-1]]) in recurrent:
            continue
        name = parts[places[-1]]
        rest = [part for part in parts[places[-1] + 1 :] if part not in WRAPPERS]
        kind = _kind(key, name, rest, weights)
        if kind == "kept":
            continue
        found[key] = _norm(key, name, weights, sizes) if kind == "norm" else None
        if found[key] is None:
            found[key] = _move(key, name, weights, sizes)
    if not found:
        raise ValueError(f"nothing is named as queries or keys are: {', '.join(ROLES)}")
    return found


def _kind(key: str, name: str, rest: list[str], weights: Tensor) -> str:
    """``rows`` or ``norm``; ``kept`` for what is of the input; raises TypeError for the rest."""
    if rest and rest[0] in ("lora_A", "lora_embedding_A"):
        return "kept"
    plain = rest in (["weight"], ["bias"]) or rest[:1] in (["lora_B"], ["lora_magnitude_vector"])
    several = name in NORMS and rest[:1] == ["norms"]
    if not (plain or several) or not weights.is_floating_point() or weights.dtype.itemsize < 2:
        raise TypeError(
            f"{key} ({weights.dtype}) is of a quantised or parametrised {name}: permute before that"
        )
    return "norm" if name in NORMS else "rows"


def _norm(key: str, name: str, weights: Tensor, sizes: Sizes) -> Move | None:
    """Of a norm of each head; None for one of all heads."""
    if weights.shape[-1] == sizes.head.head_dim:
        return Move(weights.ndim - 1, (0,))
    return None


def _move(key: str, name: str, weights: Tensor, sizes: Sizes) -> Move:
    """Where the heads of a projection begin; raises ValueError for another shape."""
    role, width = ROLES[name], sizes.head.head_dim
    if role == LATENT:
        if sizes.latent is None:
            raise ValueError(f"{key} is MLA's: pass a configuration, with qk_rope_head_dim")
        _check(key, weights, 0, sizes.latent.head_dim, f"{sizes.latent.head_dim}")
        return Move(0, (0,), latent=True)
    heads, key_heads = sizes.heads, sizes.key_heads
    if role in (QUERIES, KEYS):
        count = heads if role == QUERIES else key_heads
        if count is None:
            count = max(weights.shape[0] // width, 1)
        step = 2 * width if sizes.gated and role == QUERIES and name not in NORMS else width
        _check(key, weights, 0, count * step, f"{count} heads of {step}")
        return Move(0, tuple(head * step for head in range(count)))
    if heads is None or key_heads is None:
        raise ValueError(f"{key} has queries, keys and values: pass heads and key_heads")
    rows = (heads + 2 * key_heads) * width
    dim = weights.ndim - 1 if name == "c_attn" and weights.shape[-1] == rows else 0
    _check(key, weights, dim, rows, f"{heads} + 2 · {key_heads} heads of {width}")
    if role == BLOCKS:
        return Move(dim, tuple(head * width for head in range(heads + key_heads)))
    each = heads // key_heads
    group = range(each + 1)  # queries, and the key
    return Move(
        dim, tuple((own * (each + 2) + head) * width for own in range(key_heads) for head in group)
    )


def _check(key: str, weights: Tensor, dim: int, rows: int, words: str) -> None:
    if weights.shape[dim] != rows:
        raise ValueError(
            f"{key} has shape {tuple(weights.shape)}, expected {rows} rows ({words} features)"
        )
