"""What models of transformers add to tokens, against what their own modules give."""

import dataclasses

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel

import mmpos
from mmpos.interop.transformers import absolute, relative
from mmpos.interop.transformers.encodings import Encodings
from mmpos.interop.transformers.weights import give_weights, take_weights
from mmpos.positions import sequence

READERS = absolute.READERS | relative.READERS
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
TWO = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 50,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MORE: dict[str, dict] = {
    "gpt2": {"n_inner": 24},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "attention_types": [[["global", "local"], 1]],
    },
    "gpt_bigcode": {"n_inner": 24},
    "openai-gpt": {"n_positions": 300},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 4, "token_dropout": False},
    "big_bird": {"attention_type": "original_full"},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "albert": {"embedding_size": 12},
    "convbert": {"embedding_size": 12},
    "electra": {"embedding_size": 12},
    "squeezebert": {
        "embedding_size": 32,
        **{f"{part}_groups": 1 for part in ("q", "k", "v", "post_attention", "intermediate")},
        "output_groups": 1,
    },
    "rembert": {"input_embedding_size": 12, "output_embedding_size": 12},
    "distilbert": {"hidden_dim": 24},
    "longformer": {"attention_window": 8},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 32},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "led": {
        "max_encoder_position_embeddings": 300,
        "max_decoder_position_embeddings": 280,
        "attention_window": 8,
    },
    "xglm": {"d_model": 32, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "nllb-moe": {"num_experts": 2, "encoder_sparse_step": 0, "decoder_sparse_step": 0},
    "whisper": {
        "num_mel_bins": 8,
        "max_source_positions": 290,
        "max_target_positions": 300,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "deberta": {"position_biased_input": True},
    "deberta-v2": {"position_biased_input": True},
}
TABLES = {
    "gpt2": "wpe",
    "gpt_neo": "wpe",
    "gpt_bigcode": "wpe",
    "openai-gpt": "positions_embed",
    "opt": "decoder.embed_positions",
    "biogpt": "embed_positions",
    "xglm": "embed_positions",
    "clip_text_model": "embeddings.position_embedding",
    "siglip_text_model": "embeddings.position_embedding",
}
ABSOLUTE = [*absolute.READERS, ("mpnet", ""), ("deberta", ""), ("deberta-v2", "")]
AFTER_PADDING = ("mpnet", *(own for own, _ in absolute.READERS if "roberta" in own))
AFTER_PADDING += ("camembert", "data2vec-text", "esm", "longformer", "xmod")
NARROW = ("albert", "convbert", "electra", "rembert")


def configure(name, part="", **more):
    own = TWO if part else TINY
    given = {**own, **MORE.get(name, {}), **more}
    return AutoConfig.for_model(name, **{k: v for k, v in given.items() if v is not None})


def build(config):
    if config.model_type == "siglip_text_model":
        model = transformers.SiglipTextModel._from_config(config).eval()
    else:
        model = AutoModel.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return model


def module_of(model, name, part) -> nn.Module:
    path = TABLES.get(name, f"{part}.embed_positions" if part else "embeddings.position_embeddings")
    return model.get_submodule(path)


def captured(model, module, length, name, part):
    """What a model gets from its table for ``length`` tokens, in a forward pass."""
    kept = []
    hook = module.register_forward_hook(lambda module, args, out: kept.append(out))
    tokens = torch.arange(2 * length).view(2, length) % 40 + 5
    try:
        with torch.no_grad():
            if name == "whisper":
                frames = torch.randn(1, 8, 2 * 290)
                model(frames, decoder_input_ids=tokens[:1])
            elif part:
                model(input_ids=tokens, decoder_input_ids=tokens)
            else:
                model(input_ids=tokens)
    finally:
        hook.remove()
    return kept[0]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("name", "part"), ABSOLUTE, ids=lambda word: word or "whole")
def test_a_token_gets_what_the_model_adds(name, part):
    config = configure(name, part)
    model = build(config)
    found = READERS[name, part](config)
    take_weights(found, model.state_dict())
    assert (found.model_type, found.part) == (name, part)
    assert found.additive is not None
    length = 290 if (name, part) == ("whisper", "encoder") else 277
    expected = captured(model, module_of(model, name, part), length, name, part)
    if expected.ndim == 3:
        assert torch.equal(expected, expected[:1].expand_as(expected))
        expected = expected[0]
    if name in ("longformer", "led") and part != "decoder":  # they fill up their last window
        expected = expected[:length]
    got = found.additive(sequence(length) + found.position_offset)
    if isinstance(found.additive, mmpos.LearnedEncoding):
        assert torch.equal(got, expected)
    else:
        close(got, expected)
    rows = {("led", "decoder"): 280, ("whisper", "encoder"): 290}.get((name, part), 300)
    after = found.position_offset if name in AFTER_PADDING else 0
    assert found.max_length == rows - after
    assert found.layers == (3 if part == "decoder" else 2)
    assert ("features" in found.note) == (name in NARROW)


@pytest.mark.parametrize(("name", "part"), ABSOLUTE, ids=lambda word: word or "whole")
def test_numbers_come_back_bit_for_bit_and_a_model_takes_them(name, part):
    config = configure(name, part)
    model, found = build(config), READERS[name, part](config)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    take_weights(found, state)
    given = give_weights(found)
    for key, value in given.items():
        assert torch.equal(value, state[key])
    for value in given.values():
        value.add_(1)
    with_more = model.base_model.load_state_dict(given, strict=False)
    assert not with_more.unexpected_keys
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key] + 1 if key in given else state[key])


TOWERS = {
    "vit": {"image_size": (12, 20), "patch_size": 4},
    "deit": {"image_size": (12, 20), "patch_size": 4},
    "dinov2": {"image_size": (12, 20), "patch_size": 4},
    "dinov2_with_registers": {"image_size": (12, 20), "patch_size": 4, "num_register_tokens": 2},
    "clip_vision_model": {"image_size": 16, "patch_size": 4},
    "siglip_vision_model": {"image_size": 16, "patch_size": 4},
}


@pytest.mark.parametrize("name", TOWERS)
def test_tables_of_patches_with_rows_for_other_tokens(name):
    config = AutoConfig.for_model(name, **{**TINY, **TOWERS[name]})
    model = build(config)
    key = "embeddings.position_embedding"
    key = f"{key}.weight" if "_model" in name else f"{key}s"
    stored = model.state_dict()[key]
    first = {"siglip_vision_model": 0, "deit": 2}.get(name, 1)
    sides = (4, 4) if "_model" in name else (3, 5)
    table = mmpos.LearnedEncoding(32, sides, prefix_rows=first)
    found = Encodings(name, "", 2, additive=table)
    take_weights(found, model.state_dict())
    rows = stored.reshape(-1, 32)
    where = mmpos.positions.join(mmpos.positions.absent(first, 2), mmpos.positions.grid(*sides))
    assert torch.equal(table(where), rows)
    given = give_weights(found)
    assert list(given) == [key]
    assert torch.equal(given[key], stored)
    refused(found, {key: stored[..., 1:, :]}, "has shape .* resize afterwards")
    table.resize((6, 5))
    assert give_weights(found)[key].shape[-2] == first + 30
    assert torch.equal(give_weights(found)[key].reshape(-1, 32)[:first], rows[:first])


def test_clip_has_two_tables_of_one_name():
    config = transformers.CLIPConfig(
        text_config={**TINY, "projection_dim": 8},
        vision_config={**TINY, "image_size": 16, "patch_size": 4, "projection_dim": 8},
        projection_dim=8,
    )
    state = build(config).state_dict()
    text = READERS["clip_text_model", ""](config.text_config)
    take_weights(text, state)
    name = "embeddings.position_embedding.weight"
    assert torch.equal(text.additive.table, state[f"text_model.{name}"])
    table = mmpos.LearnedEncoding(32, (4, 4), prefix_rows=1)
    take_weights(Encodings("clip_vision_model", "", 2, additive=table), state)
    assert torch.equal(table.table.flatten(0, 1), state[f"vision_model.{name}"][1:])


def test_distilbert_with_sinusoids():
    config = configure("distilbert", sinusoidal_pos_embds=True)
    model = AutoModel.from_config(config).eval()
    found = READERS["distilbert", ""](config)
    assert isinstance(found.additive, mmpos.SinusoidalEncoding)
    close(found.additive(sequence(300)), model.embeddings.position_embeddings.weight.detach())
    assert give_weights(found) == {}


@pytest.mark.parametrize("name", ["roberta", "m2m_100", "opt", "mpnet"])
def test_left_padding_does_not_count(name):
    part = "encoder" if name == "m2m_100" else ""
    config = configure(name, part)
    model, found = build(config), READERS[name, part](config)
    take_weights(found, model.state_dict())
    tokens = torch.arange(5, 12).view(1, 7)
    tokens[:, :3] = 1
    kept = []
    module_of(model, name, part).register_forward_hook(lambda m, a, out: kept.append(out))
    named = {"decoder_input_ids": tokens} if part else {}
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=(tokens != 1).long(), **named)
    close(kept[0][0, 3:], found.additive(sequence(4) + found.position_offset))


@pytest.mark.parametrize(
    ("name", "first"), [("roberta", 4), ("esm", 4), ("m2m_100", 4), ("mpnet", 2), ("opt", 2)]
)
def test_another_padding_token(name, first):
    part = "encoder" if name == "m2m_100" else ""
    config = configure(name, part, pad_token_id=3)
    model, found = build(config), READERS[name, part](config)
    take_weights(found, model.state_dict())
    assert found.position_offset == first
    expected = captured(model, module_of(model, name, part), 20, name, part)
    close(found.additive(sequence(20) + first), expected[0])


def test_the_last_token_that_a_table_holds():
    found = READERS["roberta", ""](configure("roberta", max_position_embeddings=20))
    assert found.position_offset == 2
    assert "holds 18 tokens" in found.note
    assert found.additive(sequence(18) + 2).shape == (18, 32)
    with pytest.raises(ValueError, match="no cell"):
        found.additive(sequence(19) + 2)
    opt = READERS["opt", ""](configure("opt", max_position_embeddings=20))
    assert opt.additive.grid == (22,)


@pytest.mark.parametrize(
    ("name", "more", "scale"),
    [
        ("gpt2", {}, None),
        ("gpt2", {"scale_attn_weights": False}, 1.0),
        ("gpt_bigcode", {}, None),
        ("gpt_bigcode", {"scale_attn_weights": False, "multi_query": False}, 1.0),
        ("gpt_neo", {}, 1.0),
        ("bert", {}, None),
        ("opt", {}, None),
    ],
)
def test_attention_of_the_first_layer(name, more, scale):
    """Its weights from its own queries and keys, with the scale that the encodings say."""
    config = configure(name, **more)
    model = build(config)
    found = READERS[name, ""](config)
    assert found.scale == scale
    paths = {
        "gpt2": ("h.0.attn.c_attn",),
        "gpt_bigcode": ("h.0.attn.c_attn",),
        "gpt_neo": ("h.0.attn.attention.q_proj", "h.0.attn.attention.k_proj"),
        "bert": ("encoder.layer.0.attention.self.query", "encoder.layer.0.attention.self.key"),
        "opt": ("decoder.layers.0.self_attn.q_proj", "decoder.layers.0.self_attn.k_proj"),
    }
    kept = []
    for path in paths[name]:
        model.get_submodule(path).register_forward_hook(lambda m, a, out: kept.append(out))
    with torch.no_grad():
        out = model(input_ids=torch.arange(9).view(1, 9) + 5, output_attentions=True)
    if name == "gpt_bigcode" and not more:  # one key for all heads
        q, k, _ = kept[0].split((32, 16, 16), -1)
    elif name == "gpt_bigcode":
        q, k = kept[0].unflatten(-1, (2, 48)).split((16, 16, 16), -1)[:2]
        q, k = q.flatten(-2), k.flatten(-2)
    else:
        q, k = kept[0].chunk(3, -1)[:2] if name == "gpt2" else kept
    q, k = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in (q, k))
    eye = torch.eye(9).expand(1, k.shape[1], 9, 9)
    weights = mmpos.attend(q, k, eye, causal=name != "bert", scale=found.scale)
    close(weights, out.attentions[0])


def test_a_table_that_grew_goes_back_to_a_longer_model():
    config = configure("bert", max_position_embeddings=12)
    model, found = build(config), READERS["bert", ""](config)
    take_weights(found, model.state_dict())
    before = found.additive.table.detach().clone()
    found.additive.resize((20,))
    given = give_weights(found)
    (table,) = given.values()
    assert torch.equal(table[:12], before)
    assert torch.equal(table[12:], before[:8])
    longer = AutoModel.from_config(configure("bert", max_position_embeddings=20)).eval()
    state = {k: v for k, v in model.state_dict().items() if k not in given}
    longer.load_state_dict(state | given)
    tokens = torch.arange(2, 14).view(1, 12)
    with torch.no_grad():
        close(longer(tokens).last_hidden_state, model(tokens).last_hidden_state)
        assert longer(torch.arange(20).view(1, 20)).last_hidden_state.isfinite().all()
    found.additive.resize((7,))
    assert torch.equal(give_weights(found)[next(iter(given))], before[:7])


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("bert", transformers.BertForMaskedLM),
        ("gpt2", transformers.GPT2LMHeadModel),
        ("opt", transformers.OPTForCausalLM),
        ("roberta", transformers.RobertaForMaskedLM),
    ],
)
def test_names_behind_a_prefix(name, model):
    config = configure(name)
    whole, found = model(config), READERS[name, ""](config)
    state = whole.state_dict()
    take_weights(found, state)
    (key,) = give_weights(found)
    (theirs,) = [own for own in state if own.endswith(key)]
    assert theirs != key
    assert torch.equal(found.additive.table, state[theirs])
    take_weights(found, {f"_orig_mod.module.{own}": value + 1 for own, value in state.items()})
    assert torch.equal(found.additive.table, state[theirs] + 1)
    missed = whole.base_model.load_state_dict(give_weights(found), strict=False)
    assert not missed.unexpected_keys
    assert torch.equal(whole.state_dict()[theirs], found.additive.table)


def test_half_precision_is_taken_and_never_rounded():
    config = configure("bert")
    state = build(config).bfloat16().state_dict()
    found = READERS["bert", ""](config)
    take_weights(found, state)
    assert found.additive.table.dtype == torch.float32
    (key,) = give_weights(found)
    assert torch.equal(give_weights(found)[key].bfloat16(), state[key])
    before = found.additive.table.detach().clone()
    found.additive.half()
    with pytest.raises(ValueError, match=r"bfloat16.*float16 would round: cast"):
        take_weights(found, state)
    assert torch.equal(found.additive.table, before.half())


def test_gradients_stay_with_the_parameters():
    config = configure("gpt2")
    found = READERS["gpt2", ""](config)
    table = found.additive.table
    take_weights(found, build(config).state_dict())
    assert found.additive.table is table
    assert table.requires_grad
    assert not next(iter(give_weights(found).values())).requires_grad


def refused(found, state, message):
    before = {id(own): own.detach().clone() for own in found.additive.parameters()}
    with pytest.raises(ValueError, match=message) as raised:
        take_weights(found, state)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(own, before[id(own)]) for own in found.additive.parameters())


def test_weights_that_do_not_fit(unchecked):
    config = configure("bert")
    state, found = build(config).state_dict(), READERS["bert", ""](config)
    key = "embeddings.position_embeddings.weight"
    table = state[key]
    refused(found, {}, f"no {key}, which bert learns")
    refused(found, {"xembeddings.position_embeddings.weight": table}, "has no")
    refused(found, {key: table[:-1]}, r"has shape \(299, 32\), the encoding \(300, 32\).*resize")
    refused(found, {key: table.long()}, "int64.*would round")
    refused(found, {key: table.to("meta")}, "no numbers on the meta device")
    refused(found, {f"a.{key}": table, key: table}, r"behind '', 'a\.': give that of one")
    refused(READERS["bart", "decoder"](configure("bart", "decoder")), state, r"bart \(decoder\)")


def test_sinusoids_that_were_trained_on(unchecked):
    config = configure("whisper", "encoder")
    model, found = build(config), READERS["whisper", "encoder"](config)
    state = model.state_dict()
    take_weights(found, state)
    take_weights(found, model.half().state_dict())
    take_weights(found, {})
    state["encoder.embed_positions.weight"][250, 3] += 0.1
    with pytest.raises(ValueError, match=r"encoder\.embed_pos.*up to 0\.1 away.*LearnedEncoding"):
        take_weights(found, state)


def test_encodings_that_the_model_has_no_names_for(unchecked):
    found = READERS["bert", ""](configure("bert"))
    other = dataclasses.replace(found, bias=mmpos.KerpleBias(2))
    with pytest.raises(ValueError, match=r"bert has no name for .* of KerpleBias as its bias"):
        give_weights(other)
    prefixed = dataclasses.replace(found, additive=mmpos.LearnedEncoding(32, (9,), prefix_rows=1))
    with pytest.raises(ValueError, match="bert has no name for"):
        take_weights(prefixed, {})


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "type='relative_key'.*'absolute'"),
        ("roberta", {"position_embedding_type": "relative_key_query"}, "relative_key_query"),
        ("distilbert", {"position_embedding_type": "x", "sinusoidal_pos_embds": True}, "'x'"),
        ("mpnet", {"position_embedding_type": "relative_key"}, "mpnet has position_embedding"),
        ("xglm", {"pad_token_id": 3}, "pad_token_id=3: .*row 3 .* token 1 reads.*have 1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "one scale for all"),
        ("roberta", {"max_position_embeddings": 2}, "has 2 rows.*reads row 2.*above it"),
    ],
)
def test_options_that_change_it_are_refused(name, more, message):
    with pytest.raises(ValueError, match=message) as raised:
        READERS[name, ""](configure(name, **more))
    assert "\n" not in str(raised.value)


def test_a_note_of_absolute_positions_is_read():
    config = configure("bert", position_embedding_type="absolute")
    assert "LearnedEncoding" in str(READERS["bert", ""](config))
