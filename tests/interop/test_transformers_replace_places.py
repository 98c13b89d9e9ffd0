"""Tables and biases of mmpos within transformers models, and each in models that have others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers

import mmpos
from mmpos.interop.transformers.replace import replace, restore

hf: Any = transformers
pytestmark = pytest.mark.peer("transformers")

HEADS, WIDTH = 3, 48
BERT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 340,
}
OPT: dict[str, Any] = {"ffn_dim": 32, "word_embed_proj_dim": WIDTH}
STACKS: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
WHISPER: dict[str, Any] = {
    "max_source_positions": 20,
    "max_target_positions": 64,
    "num_mel_bins": 8,
}
TOKENS: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}


def made(config: Any, cls: Any = None) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config) if cls is None else cls(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def gpt2(cls: Any = None, **own: Any) -> Any:
    config = hf.GPT2Config(
        n_embd=WIDTH, n_head=HEADS, n_layer=2, n_inner=32, vocab_size=50, n_positions=340, **own
    )
    return made(config, cls)


MODELS: dict[str, Any] = {
    "gpt2": gpt2,
    "bert": lambda: made(hf.BertConfig(**BERT)),
    "roberta": lambda: made(hf.RobertaConfig(**BERT)),
    "electra": lambda: made(hf.ElectraConfig(**BERT, embedding_size=24)),
    "distilbert": lambda: made(
        hf.DistilBertConfig(
            dim=WIDTH,
            n_heads=HEADS,
            n_layers=2,
            hidden_dim=32,
            vocab_size=50,
            max_position_embeddings=340,
        )
    ),
    "opt": lambda: made(hf.OPTConfig(**BERT | OPT)),
}
FIRST = {"roberta": 2, "opt": 2}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(1))


def out(model: Any, *tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*tokens, **given)[0]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


def table_of(model: Any) -> Any:
    names = ("wpe", "position_embeddings", "embed_positions")
    return next(m for name, m in model.named_modules() if name.split(".")[-1] in names)


def learned(table: Any, first: int) -> mmpos.LearnedEncoding:
    rows = table.weight.data[first:]
    encoding = mmpos.LearnedEncoding(rows.shape[1], (len(rows),))
    encoding.table.data = rows.clone()
    return encoding


def slopes_bias(length: int) -> torch.Tensor:
    """ALiBi of three heads by its formula, for all pairs."""
    where = torch.arange(length)
    distance = (where[:, None] - where).abs().float()
    return -torch.tensor([2**-4.0, 2**-8.0, 2**-2.0])[:, None, None] * distance


@pytest.mark.parametrize("name", MODELS)
def test_a_table_with_the_models_rows(name):
    model, tokens = MODELS[name](), ids(2, 300)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, 280:] = 0
    tokens[0, 280:] = 1  # RoBERTa's padding
    expected = out(model, tokens, attention_mask=mask)
    table = table_of(model)
    replace(model, additive=learned(table, FIRST.get(name, 0)))
    given = out(model, tokens, attention_mask=mask)
    assert torch.equal(given[1], expected[1]) and torch.equal(given[0, :280], expected[0, :280])
    assert table_of(model) is not table
    assert [key for key in model.state_dict() if "mmpos" in key] in (
        ["mmpos.additive.table"],
        ["decoder.mmpos.additive.table"],
    )
    replace(model, additive=learned(table, 0))  # with the rows that no token gets
    assert torch.equal(out(model, tokens, attention_mask=mask), expected)
    replace(model, additive=mmpos.LearnedEncoding)
    rows = next(value for key, value in model.named_parameters() if "mmpos" in key)
    assert len(rows) == table.num_embeddings - FIRST.get(name, 0)
    replace(model, additive=None)
    bare = out(model, tokens, attention_mask=mask)
    restore(model)
    assert torch.equal(out(model, tokens, attention_mask=mask), expected)
    table.weight.data.zero_()
    close(bare[1], out(model, tokens, attention_mask=mask)[1])


def test_sinusoids_in_gpt2_begin_at_the_first_token():
    model, tokens = gpt2(), ids(2, 310)
    replace(model, additive=mmpos.SinusoidalEncoding)
    given = out(model, tokens)
    restore(model)
    model.wpe.weight.data[:340] = mmpos.SinusoidalEncoding(WIDTH)(mmpos.positions.sequence(340))
    close(given, out(model, tokens))


def test_a_table_in_a_model_without_one_is_added_before_the_first_layer():
    config = hf.LlamaConfig(**BERT)
    model, tokens = made(config), ids(2, 30)
    encoding = mmpos.SinusoidalEncoding(WIDTH)
    with torch.no_grad():
        embedded = model.embed_tokens(tokens) + encoding(mmpos.positions.sequence(30))
    expected = out(model, inputs_embeds=embedded)
    replace(model, additive=encoding)
    close(out(model, tokens), expected)
    with torch.no_grad():
        part = model(tokens[:, :20], use_cache=True)
    close(out(model, tokens[:, 20:], cache=part.cache), expected[:, 20:])
    restore(model)
    close(out(model, inputs_embeds=embedded), expected)


@pytest.mark.parametrize("kind", ["bart", "whisper"])
def test_stacks_of_an_encoder_and_a_decoder(kind):
    own = STACKS | {"vocab_size": 50} | TOKENS
    if kind == "bart":
        model, source = made(hf.BartConfig(**own, max_position_embeddings=64)), ids(2, 40)
    else:
        model = made(hf.WhisperConfig(**own, **WHISPER))
        source = torch.randn(2, 8, 40)
    ask = partial(out, model, source, decoder_input_ids=ids(2, 30))
    expected = ask()
    with pytest.raises(ValueError, match=r"2 networks.*give one of them, \.encoder or"):
        replace(model, additive=None)
    for stack in (model.encoder, model.decoder):
        first = 2 if kind == "bart" else 0
        replace(stack, additive=learned(stack.embed_positions, first))
        assert torch.equal(ask(), expected)
    outputs = [expected]
    for stack in (model.decoder, model.encoder):
        replace(stack, additive=None, rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi)
        outputs.append(ask())
        assert (outputs[-1] - outputs[-2]).abs().max() > 1e-3
    restore(model.encoder)  # the decoder's attention, of the same configuration, still asks
    assert torch.equal(ask(), outputs[1])
    restore(model.decoder)
    assert torch.equal(ask(), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "opt"])
def test_alibi_in_models_with_tables(name, attention):
    model, tokens = MODELS[name](), ids(2, 300)
    model.set_attn_implementation(attention)
    bias = slopes_bias(300)
    if name != "bert":
        bias = bias.masked_fill(torch.ones(300, 300).triu(1).bool(), torch.finfo().min)
    given = {"attention_mask": bias[None].expand(2, -1, -1, -1)}
    if name == "opt":  # it would count positions in the mask
        given["position_ids"] = torch.arange(300)[None]
    kept = out(model, tokens, **given)
    replace(model, bias=mmpos.ALiBi)
    close(out(model, tokens), kept)
    restore(model)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_alibi_and_no_rotation_in_llama(attention):
    config = hf.LlamaConfig(**BERT | {"num_key_value_heads": 1}, attn_implementation=attention)
    model = made(config, hf.LlamaForCausalLM)
    tokens, mask = ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    replace(model, rotary=None, bias=mmpos.ALiBi)
    whole = out(model, tokens, attention_mask=mask)
    close(whole[:1, 5:], out(model, tokens[:1, 5:]))
    close(whole[1:], out(model, tokens[1:]))
    ask = partial(model.generate, tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    given = ask()
    assert torch.equal(given, ask(use_cache=False))
    alone = model.generate(tokens[:1, 5:], max_new_tokens=8, do_sample=False)
    assert torch.equal(given[0, 5:], alone[0])
    restore(model)
    turns_nothing = torch.ones(1, 12, 16), torch.zeros(1, 12, 16)
    model.model.rotary_emb.register_forward_hook(lambda *_: turns_nothing)
    bias = slopes_bias(12).masked_fill(torch.ones(12, 12).triu(1).bool(), torch.finfo().min)
    close(whole[1:], out(model, tokens[1:], attention_mask=bias[None]))


def test_a_window_of_a_cache_has_the_last_keys():
    window = BERT | {"sliding_window": 6, "num_key_value_heads": 1}
    model = made(hf.MistralConfig(**window), hf.MistralForCausalLM)
    bias = partial(mmpos.T5Bias, buckets=64, std=2.0)
    replace(model, bias=bias, rotary=partial(mmpos.XPosEncoding, layout="half"))
    ask = partial(model.generate, ids(2, 9), max_new_tokens=12, do_sample=False)
    mask = torch.ones(2, 9, dtype=torch.long)
    assert torch.equal(ask(attention_mask=mask), ask(attention_mask=mask, use_cache=False))


def test_padding_in_the_middle_is_no_place():
    model, tokens = gpt2(), ids(1, 14)
    replace(model, additive=None, rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi)
    mask = torch.ones(1, 14, dtype=torch.long)
    mask[0, 4:7] = 0
    expected = out(model, torch.cat((tokens[:, :4], tokens[:, 7:]), 1))
    close(out(model, tokens, attention_mask=mask)[:, 7:], expected[:, 4:])
    with torch.no_grad():
        part = model(tokens[:, :10], attention_mask=mask[:, :10], use_cache=True)
    rest = out(model, tokens[:, 10:], attention_mask=mask, cache=part.cache)
    close(rest, expected[:, 7:])


def t5(kind: str = "T5") -> Any:
    config = getattr(hf, f"{kind}Config")(
        d_model=WIDTH, d_kv=10, num_heads=HEADS, num_layers=2, d_ff=32, vocab_size=50, **TOKENS
    )
    return made(config, getattr(hf, f"{kind}Model"))


def test_the_bias_of_t5_in_both_stacks():
    model, tokens = t5(), ids(2, 300)
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[0, 250:] = 0
    ask = partial(out, model, tokens, attention_mask=mask, decoder_input_ids=ids(2, 200))
    expected, own = ask(), []
    for stack, both in ((model.encoder, True), (model.decoder, False)):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias
        bias = mmpos.T5Bias(HEADS, bidirectional=both)
        bias.table.data = table.weight.data.clone()
        own.append(table.weight)
        replace(stack, bias=bias)
        close(ask(), expected)
    assert not any("relative" in key for key in model.state_dict())
    with torch.no_grad():
        hidden = model.encoder(tokens)[0]
        part = model.decoder(ids(2, 50)[:, :40], encoder_hidden_states=hidden, use_cache=True)
    rest = model.decoder(ids(2, 50)[:, 40:], encoder_hidden_states=hidden, cache=part.cache)[0]
    whole = model.decoder(ids(2, 50), encoder_hidden_states=hidden)[0]
    close(rest.detach(), whole[:, 40:].detach())
    replace(model.encoder, bias=None, rotary=mmpos.RotaryEncoding)
    assert (ask() - expected).abs().max() > 1e-3
    restore(model.encoder)
    restore(model.decoder)
    assert torch.equal(ask(), expected)
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.relative_attention_bias.weight is own[0]


def test_each_layer_of_umt5_has_a_bias_of_its_own():
    model, tokens = t5("UMT5"), ids(2, 40)
    ask = partial(out, model, tokens, decoder_input_ids=tokens)
    expected, biases = ask(), []
    for block in model.encoder.block:
        bias = mmpos.T5Bias(HEADS)
        bias.table.data = block.layer[0].SelfAttention.relative_attention_bias.weight.data.clone()
        biases.append(bias)
    replace(model.encoder, bias=biases)
    close(ask(), expected)
    replace(model.encoder, bias=None)
    assert (ask() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_of_models_off_the_interface(kind):
    if kind == "bloom":
        config = hf.BloomConfig(hidden_size=WIDTH, n_head=HEADS, n_layer=2, vocab_size=50)
        model = made(config, hf.BloomForCausalLM)
    else:
        config = hf.MptConfig(d_model=WIDTH, n_heads=4, n_layers=2, vocab_size=50, max_seq_len=340)
        model = made(config, hf.MptForCausalLM)
    tokens, mask = ids(2, 300), torch.ones(2, 300, dtype=torch.long)
    mask[0, :7] = 0
    plain, padded = out(model, tokens), out(model, tokens, attention_mask=mask)
    ask = partial(
        model.generate,
        tokens[:, :12],
        attention_mask=mask[:, :12],
        max_new_tokens=6,
        do_sample=False,
    )
    expected = ask()
    replace(model, bias=mmpos.ALiBi)
    close(out(model, tokens), plain)
    close(out(model, tokens, attention_mask=mask)[0, 7:], padded[0, 7:])
    assert torch.equal(ask(), expected) and torch.equal(ask(use_cache=False), expected)
    replace(model, bias=[mmpos.T5Bias, torch.nn.Identity()])
    assert (out(model, tokens) - plain).abs().max() > 1e-3
    assert torch.equal(ask(), ask(use_cache=False))
    replace(model, bias=None)
    assert (out(model, tokens) - plain).abs().max() > 1e-3
    restore(model)
    assert torch.equal(out(model, tokens), plain)


def test_documents_packed_into_a_row():
    tokens = ids(1, 20)
    where = torch.cat((torch.arange(8), torch.arange(12)))[None]
    for model in (made(hf.LlamaConfig(**BERT)), gpt2()):
        replace(model, rotary=partial(mmpos.XPosEncoding, layout="half"), bias=mmpos.ALiBi)
        packed = out(model, tokens, position_ids=where, use_cache=False)
        close(packed[:, :8], out(model, tokens[:, :8]))
        close(packed[:, 8:], out(model, tokens[:, 8:]))
