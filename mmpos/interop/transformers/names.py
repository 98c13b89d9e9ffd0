"""What transformers calls the learned numbers of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmpos.additive import LearnedEncoding
from mmpos.bias import DisentangledBias, ShawBias, T5Bias, TransformerXLBias
from mmpos.interop.transformers.absolute import AS_BERT
from mmpos.interop.transformers.encodings import Encodings


class Held(NamedTuple):
    """A parameter, and what transformers calls it."""

    name: str
    parameter: nn.Parameter
    view: Callable[[Tensor], Tensor] = lambda own: own
    """The same memory in the shape that transformers has."""
    other: str = ""
    """Where the numbers are, if not under the name."""
    rows: slice | None = None
    """Which rows these are, of a table that holds more."""

    @property
    def seen(self) -> Tensor:
        """The parameter in the shape that transformers has, without a gradient."""
        return self.view(self.parameter.detach())


def names_of(encodings: Encodings, encoding: nn.Module, layers: list[int]) -> Iterator[Held]:
    """The learned numbers of an encoding that serves some layers."""
    kind, part = encodings.model_type, encodings.part
    if isinstance(encoding, LearnedEncoding):
        if kind in _TABLES and (
            kind in _GRIDS or (encoding.table.ndim, encoding.prefix) == (2, None)
        ):
            yield from _rows(table_name(encodings), encoding)
    elif isinstance(encoding, T5Bias) and kind in _BUCKETS:
        own = "LocalSelfAttention" if (kind, part) == ("longt5", "encoder") else "SelfAttention"
        for layer in layers[:1] if kind != "umt5" else layers:
            name = _BUCKETS[kind].format(part=part, layer=layer, own=own)
            yield Held(f"{name}.relative_attention_bias.weight", encoding.table)
    elif kind in _LAYERS:
        path, form, names = _LAYERS[kind]
        if isinstance(encoding, form):
            for layer in layers:
                yield from names(path.format(layer=layer), encoding)


def table_name(encodings: Encodings) -> str:
    """What a model calls the table that it adds to tokens; the empty word if it has none."""
    name, part = _TABLES.get(encodings.model_type, ""), encodings.part
    return f"{part}.{name}" if part and name else name


def _rows(name: str, encoding: LearnedEncoding) -> Iterator[Held]:
    """A table, and its prefix rows before it."""
    embedding = name.endswith("weight")  # a plain parameter has an axis more, for the batch

    def view(own: Tensor) -> Tensor:
        flat = own.view(-1, own.shape[-1])
        return flat if embedding else flat.unsqueeze(0)

    if encoding.prefix is None:
        yield Held(name, encoding.table, view)
        return
    first = len(encoding.prefix)
    yield Held(name, encoding.prefix, view, rows=slice(0, first))
    yield Held(name, encoding.table, view, rows=slice(first, None))


def _xlnet(path: str, bias: TransformerXLBias) -> Iterator[Held]:
    heads, head_dim = bias.content.shape
    yield Held(f"{path}.r", bias.weight, lambda own: own.T.unflatten(1, (heads, head_dim)))
    yield Held(f"{path}.r_w_bias", bias.content)
    yield Held(f"{path}.r_r_bias", bias.offset)


def _conformer(path: str, bias: TransformerXLBias) -> Iterator[Held]:
    yield Held(f"{path}.linear_pos.weight", bias.weight)
    yield Held(f"{path}.pos_bias_u", bias.content)
    yield Held(f"{path}.pos_bias_v", bias.offset)


def _conformer_bert(path: str, bias: TransformerXLBias | ShawBias) -> Iterator[Held]:
    if isinstance(bias, TransformerXLBias):
        yield from _conformer(path, bias)
    else:
        yield Held(f"{path}.distance_embedding.weight", bias.key_table, lambda own: own[0])


def _vits(path: str, bias: ShawBias) -> Iterator[Held]:
    yield Held(f"{path}.emb_rel_k", bias.key_table)
    if bias.value_table is not None:
        yield Held(f"{path}.emb_rel_v", bias.value_table)


def _deberta(path: str, bias: DisentangledBias) -> Iterator[Held]:
    yield Held("encoder.rel_embeddings.weight", bias.table, lambda own: own[0])
    yield from _linear(f"{path}.pos_proj", bias.key)
    yield from _linear(f"{path}.pos_q_proj", bias.query)


def _deberta_v2(path: str, bias: DisentangledBias) -> Iterator[Held]:
    yield Held("encoder.rel_embeddings.weight", bias.table, lambda own: own[0])
    if bias.norm is not None:
        yield Held("encoder.LayerNorm.weight", bias.norm.weight)
        yield Held("encoder.LayerNorm.bias", bias.norm.bias)
    yield from _linear(f"{path}.pos_key_proj", bias.key, f"{path}.key_proj")
    yield from _linear(f"{path}.pos_query_proj", bias.query, f"{path}.query_proj")


def _linear(name: str, projection: nn.Linear | None, other: str = "") -> Iterator[Held]:
    for own, parameter in () if projection is None else projection.named_parameters():
        yield Held(f"{name}.{own}", parameter, other=f"{other}.{own}" if other else "")


_TABLES = {
    **dict.fromkeys(
        (*AS_BERT, "mpnet", "deberta", "deberta-v2"), "embeddings.position_embeddings.weight"
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo"), "wpe.weight"),
    **dict.fromkeys(
        ("vit", "deit", "dinov2", "dinov2_with_registers"), "embeddings.position_embeddings"
    ),
    "openai-gpt": "positions_embed.weight",
    "opt": "decoder.embed_positions.weight",
    **dict.fromkeys(
        (
            *("clip_text_model", "siglip_text_model"),
            *("clip_vision_model", "siglip_vision_model"),
        ),
        "embeddings.position_embedding.weight",
    ),
    **dict.fromkeys(
        (
            *("bart", "mbart", "plbart", "mvp", "led", "whisper", "biogpt"),
            *("blenderbot", "blenderbot-small", "bigbird_pegasus", "marian", "pegasus"),
        ),
        "embed_positions.weight",
    ),
}
"""What a table is called, within the part if there are several."""

_GRIDS = (
    *("vit", "deit", "dinov2", "dinov2_with_registers"),
    *("clip_vision_model", "siglip_vision_model"),
)
"""Models whose table is for patches, row by row, after rows for other tokens."""

_BUCKETS = {
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers"),
        "{part}.block.{layer}.layer.0.{own}",
    ),
    "mpnet": "encoder",
}

_Names = Callable[[str, Any], Iterator[Held]]
_LAYERS: dict[str, tuple[str, type | tuple[type, ...], _Names]] = {
    "xlnet": ("layer.{layer}.rel_attn", TransformerXLBias, _xlnet),
    "wav2vec2-conformer": ("encoder.layers.{layer}.self_attn", TransformerXLBias, _conformer),
    "wav2vec2-bert": (
        "encoder.layers.{layer}.self_attn",
        (TransformerXLBias, ShawBias),
        _conformer_bert,
    ),
    "vits": ("text_encoder.encoder.layers.{layer}.attention", ShawBias, _vits),
    "deberta": ("encoder.layer.{layer}.attention.self", DisentangledBias, _deberta),
    "deberta-v2": ("encoder.layer.{layer}.attention.self", DisentangledBias, _deberta_v2),
}
