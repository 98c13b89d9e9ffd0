"""What models of transformers add to attention scores: ALiBi, T5, Shaw, Transformer-XL, DeBERTa."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mmpos.bias import ALiBi, DisentangledBias, ShawBias, T5Bias, TransformerXLBias
from mmpos.bias.alibi import alibi_slopes
from mmpos.interop.transformers.absolute import Reader, check_absolute, learned_table
from mmpos.interop.transformers.encodings import Bias, Encodings, Part

_Own = TypeVar("_Own", bound=Bias)


def _t5(config: Any, part: Part, *, each: bool = False) -> Encodings:
    """Buckets; in UMT5 ``each`` layer has numbers of its own."""
    layers = config.num_layers if part == "encoder" else config.num_decoder_layers

    def make() -> T5Bias:
        return T5Bias(
            config.num_heads,
            buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            bidirectional=part == "encoder",
        )

    return Encodings(
        config.model_type,
        part,
        layers,
        bias=tuple(make() for _ in range(layers)) if each else make(),
        scale=1.0,
        note="" if part == "encoder" else "attention to the encoder has no bias",
    )


def _longt5_encoder(config: Any) -> Encodings:
    if config.encoder_attention_type != "local":
        raise ValueError(
            f"encoder_attention_type={config.encoder_attention_type!r} has a second table, for "
            "blocks of tokens, which is not known here: 'local' is"
        )
    note = f"attention has window={config.local_radius + 1}"
    return dataclasses.replace(_t5(config, "encoder"), note=note)


def _mpnet(config: Any) -> Encodings:
    check_absolute(config)
    buckets, known = config.relative_attention_num_buckets, 32
    if buckets != known:
        raise ValueError(
            f"relative_attention_num_buckets={buckets}, but transformers reads {known} buckets "
            "of MPNet whatever is said there"
        )
    return Encodings(
        "mpnet",
        "",
        config.num_hidden_layers,
        additive=learned_table(config.max_position_embeddings, config.hidden_size),
        bias=T5Bias(config.num_attention_heads, buckets=buckets),
        position_offset=2,  # MPNet's padding token is 1, whatever its configuration says
        max_length=config.max_position_embeddings - 2,
        note="padding before a token does not count for the table",
    )


def _bloom(config: Any) -> Encodings:
    return Encodings("bloom", "", config.n_layer, bias=ALiBi(config.n_head))


def _mpt(config: Any) -> Encodings:
    attention: Any = config.attn_config
    if not attention.alibi:
        raise ValueError(
            "attn_config.alibi=False stands for a table, which transformers does not read: its MPT "
            "has ALiBi whatever is said there"
        )
    heads, most = config.n_heads, attention.alibi_bias_max
    slopes = None if most == 8 else [own ** (most / 8) for own in alibi_slopes(heads)]
    return Encodings(
        "mpt",
        "",
        config.n_layers,
        bias=ALiBi(heads, slopes=slopes),
        scale=attention.softmax_scale,
        note=f"alibi_bias_max={most}; transformers computes with 8" if slopes else "",
    )


def _falcon(config: Any) -> Encodings:
    if not config.alibi:
        raise ValueError("falcon with alibi=False rotates: it has no bias")
    heads = config.num_attention_heads
    scale = (config.hidden_size // heads) ** -0.5
    return Encodings(
        "falcon",
        "",
        config.num_hidden_layers,
        bias=ALiBi(heads, slopes=[scale * slope for slope in alibi_slopes(heads)]),
        note="slopes are scaled as scores are; transformers rounds the bias to bfloat16, and with "
        "eager attention adds it twice",
    )


def _xlnet(config: Any) -> Encodings:
    if config.clamp_len > 0 or config.bi_data:
        raise ValueError(
            f"clamp_len={config.clamp_len} and bi_data={config.bi_data}: XLNet's offsets are known "
            "without a limit and in one direction, clamp_len=-1 and bi_data=False"
        )
    layers = config.n_layer
    return Encodings(
        "xlnet",
        "",
        layers,
        bias=_each(
            layers,
            partial(TransformerXLBias, config.n_head, head_dim=config.d_head, dim=config.d_model),
        ),
        note="its term for segments is not among these",
    )


def _conformer(config: Any) -> Encodings:
    kind = config.position_embeddings_type
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = config.hidden_size // heads
    bias: tuple[Bias, ...] | None = None
    if kind == "relative":
        make = partial(TransformerXLBias, heads, head_dim=head_dim, layout="interleaved")
        bias = _each(layers, make)
    elif kind == "relative_key" and config.model_type == "wav2vec2-bert":
        reach = (config.left_max_position_embeddings, config.right_max_position_embeddings)
        make = partial(ShawBias, heads, head_dim=head_dim, distance=reach, values=False)
        bias = _each(layers, make)
    elif kind is not None:
        raise ValueError(
            f"{config.model_type} with position_embeddings_type={kind!r} has no bias that is known"
        )
    return Encodings(config.model_type, "", layers, bias=bias)


def _vits(config: Any) -> Encodings:
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    bias = None
    if config.window_size:
        make = partial(
            ShawBias,
            heads,
            head_dim=config.hidden_size // heads,
            distance=config.window_size,
            clip=False,
        )
        bias = _each(layers, make)
    return Encodings("vits", "text", layers, bias=bias)


def _deberta(config: Any) -> Encodings:
    """DeBERTa of the first version, and of the second and third."""
    second = config.model_type == "deberta-v2"
    parts = tuple(config.pos_att_type or ())
    if set(parts) - {"c2p", "p2c"} or len(set(parts)) != len(parts):
        raise ValueError(f"pos_att_type is c2p and p2c, each once at most, got {list(parts)}")
    if getattr(config, "talking_head", False):
        raise ValueError("talking_head=True mixes the scores of heads: it is not known here")
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    head_dim = config.hidden_size // heads
    norms = str(getattr(config, "norm_rel_ebd", "none")).lower().split("|") if second else []
    shared = second and getattr(config, "share_att_key", False)
    longest = config.max_relative_positions
    longest = config.max_position_embeddings if longest < 1 else longest
    buckets = getattr(config, "position_buckets", -1) if second else -1
    bias: tuple[DisentangledBias, ...] | None = None
    if config.relative_attention and parts:
        make = partial(
            DisentangledBias,
            heads,
            head_dim=head_dim,
            span=buckets if buckets > 0 else longest,
            max_distance=longest if buckets > 0 else None,
            parts=parts,
            dim=config.hidden_size,
            norm_eps=config.layer_norm_eps if "layer_norm" in map(str.strip, norms) else None,
            constants=(second, True),
        )
        bias = _each(layers, make)
        for own in bias[1:]:
            own.share_table(bias[0])
    table, width = None, getattr(config, "embedding_size", config.hidden_size)
    if getattr(config, "position_biased_input", True):
        table = learned_table(config.max_position_embeddings, width)
    note = "projections are copies of those of contents; pos_key_proj is the name they go by"
    return Encodings(
        config.model_type,
        "",
        layers,
        additive=table,
        bias=bias,
        scale=(head_dim * (1 + len(parts))) ** -0.5,
        max_length=None if table is None else table.grid[0],
        note=note if shared and bias else "",
    )


def _each(layers: int, make: Callable[[], _Own]) -> tuple[_Own, ...]:
    """A bias for each layer."""
    return tuple(make() for _ in range(layers))


READERS: dict[tuple[str, Part], Reader] = {
    **{
        (name, part): partial(_t5, part=part, each=name == "umt5")
        for name in ("t5", "mt5", "umt5", "switch_transformers")
        for part in ("encoder", "decoder")
    },
    ("longt5", "encoder"): _longt5_encoder,
    ("longt5", "decoder"): partial(_t5, part="decoder"),
    ("mpnet", ""): _mpnet,
    ("bloom", ""): _bloom,
    ("mpt", ""): _mpt,
    ("falcon", ""): _falcon,
    ("deberta", ""): _deberta,
    ("deberta-v2", ""): _deberta,
    ("xlnet", ""): _xlnet,
    ("wav2vec2-conformer", ""): _conformer,
    ("wav2vec2-bert", ""): _conformer,
    ("vits", "text"): _vits,
}
"""How each network's configuration is read, by the name of the model and the part of it."""
