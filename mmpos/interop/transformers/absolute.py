"""What models of transformers add to tokens: learned tables and sinusoids."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mmpos.additive import AdditiveEncoding, LearnedEncoding, SinusoidalEncoding
from mmpos.interop.transformers.encodings import Encodings, Part
from mmpos.resample import Resampling

Reader = Callable[[Any], Encodings]
"""From a configuration of transformers to what the model knows of positions."""


def learned_table(rows: int, dim: int) -> LearnedEncoding:
    """A table for tokens of a sequence, whose rows stay what they are where it grows or shrinks.

    >>> table = learned_table(3, 4)
    >>> before = table.table.detach().clone()
    >>> table.resize((5,))
    >>> torch.equal(table.table[:3], before)
    True
    """
    return LearnedEncoding(dim, (rows,), resampling=Resampling(fit="extend"))


def check_absolute(config: Any) -> None:
    """Refuse a configuration whose positions are not added.

    Raises: ValueError for a ``position_embedding_type`` other than ``absolute``.

    >>> from types import SimpleNamespace
    >>> check_absolute(SimpleNamespace(model_type="bert", position_embedding_type="absolute"))
    """
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(
            f"{config.model_type} has position_embedding_type={kind!r}, and transformers reads "
            "'absolute' alone: set it to that, if the weights were trained so"
        )


def _learned(
    config: Any,
    part: Part = "",
    *,
    rows: str = "max_position_embeddings",
    unread: int = 0,
    dim: str = "hidden_size",
    layers: str = "num_hidden_layers",
    scale: float | None = None,
) -> Encodings:
    """A table of ``rows``, and of ``unread`` more before those that tokens get."""
    check_absolute(config)
    width, hidden = getattr(config, dim), getattr(config, "hidden_size", getattr(config, dim))
    return Encodings(
        config.model_type,
        part,
        getattr(config, layers),
        additive=learned_table(getattr(config, rows) + unread, width),
        scale=scale,
        position_offset=unread,
        max_length=getattr(config, rows),
        note="" if width == hidden else f"added before the map from {width} to {hidden} features",
    )


def _after_padding(config: Any) -> Encodings:
    """RoBERTa's table: rows up to that of the padding token are read by no token that is seen."""
    check_absolute(config)
    first = _first_row(config)
    rows = config.max_position_embeddings
    if rows <= first:
        raise ValueError(
            f"{config.model_type} has {rows} rows, and its first token reads row {first}, after "
            f"pad_token_id={config.pad_token_id}: max_position_embeddings must be above it"
        )
    return Encodings(
        config.model_type,
        "",
        config.num_hidden_layers,
        additive=learned_table(rows, config.hidden_size),
        position_offset=first,
        max_length=rows - first,
        note=f"the table holds {rows - first} tokens; padding before a token does not count",
    )


def _gpt2(config: Any) -> Encodings:
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ValueError(
            "scale_attn_by_inverse_layer_idx=True divides scores by the number of the layer, "
            "and encodings have one scale for all: set it to False, if the weights allow"
        )
    return _learned(config, scale=None if config.scale_attn_weights else 1.0)


def _distilbert(config: Any) -> Encodings:
    if not config.sinusoidal_pos_embds:
        return _learned(config)
    check_absolute(config)
    return _fixed(config, additive=SinusoidalEncoding(config.dim))


def _fixed(
    config: Any,
    part: Part = "",
    *,
    additive: AdditiveEncoding,
    layers: str = "num_hidden_layers",
    offset: int = 0,
    length: str = "max_position_embeddings",
    note: str = "",
) -> Encodings:
    """Sinusoids: the code has a number of rows, and the formula any."""
    return Encodings(
        config.model_type,
        part,
        getattr(config, layers),
        additive=additive,
        position_offset=offset,
        max_length=getattr(config, length),
        note=note,
    )


def _marian(config: Any, part: Part) -> Encodings:
    """Sines, then cosines, of Vaswani's frequencies."""
    waves = SinusoidalEncoding(config.d_model, layout="half")
    return _fixed(config, part, additive=waves, layers=f"{part}_layers")


def _tensor2tensor(dim: int) -> SinusoidalEncoding:
    return SinusoidalEncoding(dim, layout="half", endpoint=True)


def _m2m_100(config: Any, part: Part) -> Encodings:
    return _fixed(
        config,
        part,
        additive=_tensor2tensor(config.d_model),
        layers=f"{part}_layers",
        offset=_first_row(config),
        note="padding before a token does not count",
    )


def _xglm(config: Any) -> Encodings:
    padding = config.pad_token_id
    if padding is not None and padding >= 2:
        raise ValueError(
            f"pad_token_id={padding}: transformers leaves row {padding} of XGLM's sinusoids zero, "
            f"which token {padding - 2} reads; published models have 1"
        )
    return _fixed(config, additive=_tensor2tensor(config.d_model), layers="num_layers", offset=2)


def _whisper_encoder(config: Any) -> Encodings:
    return _fixed(
        config,
        "encoder",
        additive=_tensor2tensor(config.d_model),
        layers="encoder_layers",
        length="max_source_positions",
        note=f"sounds are padded to {config.max_source_positions} positions",
    )


def _both(unread: int = 0) -> dict[Part, Callable[[Any], Encodings]]:
    """A table for each of two networks."""
    return {
        part: partial(_learned, part=part, unread=unread, dim="d_model", layers=f"{part}_layers")
        for part in ("encoder", "decoder")
    }


_BERT = ("bert", "bert-generation", "big_bird", "ernie", "megatron-bert", "mobilebert", "splinter")
_NARROW = ("albert", "convbert", "electra", "squeezebert")
_ROBERTA = (
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert"),
    *("data2vec-text", "esm", "longformer", "xmod"),
)
_BART = ("bart", "mbart", "plbart", "mvp")
AS_BERT = (*_BERT, *_NARROW, *_ROBERTA, "distilbert", "rembert")
"""Models whose table has BERT's name."""


def _first_row(config: Any) -> int:
    """The row of the first token, after that of padding.

    Raises: ValueError for a configuration without a padding token.
    """
    if config.pad_token_id is None:
        raise ValueError(
            f"{config.model_type} counts positions from pad_token_id on, and it is None: set it"
        )
    return config.pad_token_id + 1


READERS: dict[tuple[str, Part], Reader] = {
    **{(name, ""): _gpt2 for name in ("gpt2", "gpt_bigcode")},
    ("gpt_neo", ""): partial(_learned, scale=1.0),
    ("openai-gpt", ""): _learned,
    **{(name, ""): _learned for name in _BERT},
    **{(name, ""): partial(_learned, dim="embedding_size") for name in _NARROW},
    ("rembert", ""): partial(_learned, dim="input_embedding_size"),
    ("distilbert", ""): _distilbert,
    **{(name, ""): _after_padding for name in _ROBERTA},
    ("opt", ""): partial(_learned, unread=2),
    ("biogpt", ""): partial(_learned, unread=2),
    **{(name, part): read for name in _BART for part, read in _both(unread=2).items()},
    **{
        (name, part): read
        for name in ("blenderbot", "blenderbot-small", "bigbird_pegasus")
        for part, read in _both().items()
    },
    **{
        ("led", part): partial(
            _learned,
            part=part,
            rows=f"max_{part}_position_embeddings",
            dim="d_model",
            layers=f"{part}_layers",
        )
        for part in ("encoder", "decoder")
    },
    **{
        (name, part): partial(_marian, part=part)
        for name in ("marian", "pegasus")
        for part in ("encoder", "decoder")
    },
    **{
        (name, part): partial(_m2m_100, part=part)
        for name in ("m2m_100", "nllb-moe")
        for part in ("encoder", "decoder")
    },
    ("xglm", ""): _xglm,
    ("whisper", "encoder"): _whisper_encoder,
    ("whisper", "decoder"): partial(
        _learned,
        part="decoder",
        rows="max_target_positions",
        dim="d_model",
        layers="decoder_layers",
    ),
    **{(name, ""): _learned for name in ("clip_text_model", "siglip_text_model")},
}
"""How each network's configuration is read, by the name of the model and the part of it."""
