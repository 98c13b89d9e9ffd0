"""What published configurations say and people do, each once gone wrong."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PretrainedConfig

import mmpos
from mmpos.frequencies import LongRoPE, NTKAware, YaRN
from mmpos.interop.transformers import (
    compare,
    config_entries,
    encodings,
    permute_model,
    preset,
    replace,
    restore,
    rotary_encoding,
    take_weights,
)

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
SMALL |= {"num_hidden_layers": 2, "max_position_embeddings": 256}
LLAMA = LlamaConfig(**SMALL, intermediate_size=32, vocab_size=50)
TOKENS = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(1))


def llama(config=LLAMA) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(config)).eval()


def tiny(kind: str, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 50}
    config = AutoConfig.for_model(kind, intermediate_size=16, **{**sizes, **options})
    return transformers.AutoModel.from_config(config).eval()


def test_what_is_given_is_not_written_into() -> None:
    given = {"model_type": "llama", **SMALL, "rope_theta": 5e5}
    given["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    before = copy.deepcopy(given)
    assert {own.name for own in compare(given, {**given, "rope_theta": 1e6})} == {"base", "angles"}
    assert given == before


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "deberta-v2", "pos_att_type": "p2c|c2p", "position_buckets": 256},
        {"model_type": "t5", "n_positions": 512},
        {"model_type": "marian", "static_position_embeddings": True},
        {"model_type": "bart", "extra_pos_embeddings": 2},
        {"model_type": "cohere2", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
        {"model_type": "bert", "position_embedding_type": "absolute"},
        {"model_type": "gptj", "rotary": True},
        {"model_type": "bloom", "offset_alibi": 100},
    ],
)
def test_what_published_configurations_say_passes(config) -> None:
    part = {"t5": "encoder", "marian": "decoder", "bart": "encoder"}.get(config["model_type"], "")
    if config["model_type"] == "deberta-v2":
        config = {**config, "relative_attention": True, "max_relative_positions": -1}
    encodings(config, part)


def test_minimax_says_its_width_in_its_own_way() -> None:
    config = {"model_type": "minimax_m2", "head_dim": 128, "rotary_dim": 64, "rope_theta": 5e6}
    assert 2 * sum(encodings(config).rotary.pairs) == 64


def test_rope_parameters_of_hunyuan_phi_and_kimi() -> None:
    hunyuan = {"alpha": 100.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "factor": 1.0}
    hunyuan |= {"mscale_all_dim": 1.0, "rope_type": "dynamic"}
    assert rotary_encoding(hunyuan, 16, base=1e4).extension == NTKAware(factor=100.0)
    phi = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi |= {"original_max_position_embeddings": 64, "factor": 4.0, "rope_theta": 1e4}
    phi |= {"short_mscale": 1.25, "long_mscale": 1.25}
    assert rotary_encoding(phi, 16).extension.magnitude == 1.25
    with pytest.raises(ValueError, match="are two"):
        rotary_encoding({**phi, "long_mscale": 1.5}, 16)
    kimi = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    kimi |= {"beta_fast": 1.0, "beta_slow": 1.0, "rope_theta": 5e4}
    assert rotary_encoding(kimi, 64).extension.beta_fast == 1
    assert rotary_encoding(None, 64, base=1e4).extension is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gptj", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("bert", {"rope_theta": 5e5}),
        ("pixtral", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_what_is_read_elsewhere_is_refused(kind, options) -> None:
    with pytest.raises(ValueError, match=r"does not read|refuses"):
        encodings({"model_type": kind, **options})


def test_unknown_types() -> None:
    class Own(PretrainedConfig):
        model_type = "own"

    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2}
    found = encodings(Own(**sizes, rope_theta=1e4, max_position_embeddings=64), layout="half")
    assert found.rotary.base == 1e4 and found.max_length == 64
    with pytest.raises(ValueError, match="no rope parameters"):
        encodings(Own(**sizes), layout="half")
    for more in ({"qk_rope_head_dim": 16}, {"position_embedding_type": "nope"}, {"alibi": True}):
        with pytest.raises(ValueError, match="which Llama's code does not"):
            encodings(Own(**sizes, rope_theta=1e4, **more), layout="half")
    mixed = Own(**sizes, rope_theta=1e4, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="layer_types"):
        encodings(mixed, layout="half")
    with pytest.raises(ValueError, match="no rope parameters"):
        encodings({"model_type": "jamba"}, layout="half")
    with pytest.raises(ValueError, match="is one network: leave part='text' out"):
        encodings({"model_type": "llama"}, "text")


def test_a_model_gives_its_own_numbers_and_mode() -> None:
    bert = tiny("bert")
    before = bert(TOKENS).last_hidden_state
    replace(bert, additive=encodings(bert).additive)
    assert torch.equal(bert(TOKENS).last_hidden_state, before)
    with pytest.raises(ValueError, match="encodings of this model were replaced"):
        encodings(bert)
    with pytest.raises(ValueError, match="encodings of this model were replaced"):
        compare(bert, bert.config)
    with pytest.raises(ValueError, match="restore the model first"):
        take_weights(encodings(bert.config), bert.state_dict())
    config = AutoConfig.for_model("dinov3_vit")
    assert not encodings(config).rotary.training


def test_a_stack_is_its_part() -> None:
    config = AutoConfig.for_model(
        "t5", d_model=24, d_kv=8, num_heads=3, num_layers=1, d_ff=16, vocab_size=50
    )
    model = transformers.T5Model(config)
    for part in ("encoder", "decoder"):
        own = encodings(getattr(model, part))
        whole = encodings(model, part)
        assert own.part == part and own.bias.bidirectional == (part == "encoder")
        assert torch.equal(own.bias.table, whole.bias.table)
    replace(model.encoder, bias=whole.bias if whole.part == "encoder" else mmpos.T5Bias)
    assert encodings(model, "decoder").part == "decoder", "which was not replaced"
    with pytest.raises(ValueError, match="encodings of this model were replaced"):
        encodings(model, "encoder")


@pytest.mark.parametrize("kind", ["roberta", "opt"])
def test_a_table_with_rows_before_the_first_token_grows(kind) -> None:
    options = {"max_position_embeddings": 66, "pad_token_id": 1}
    options |= {"ffn_dim": 16, "word_embed_proj_dim": 24} if kind == "opt" else {}
    model = tiny(kind, **options)
    tokens = TOKENS.clamp(min=3)
    before = model(tokens).last_hidden_state
    found = encodings(model)
    rows = found.additive.grid[0]
    found.additive.resize((rows + 64,))
    assert config_entries(found, model.config)["max_position_embeddings"] == 130
    replace(model, additive=found.additive)
    assert torch.equal(model(tokens).last_hidden_state, before)


def test_permuted_weights_take_their_layout() -> None:
    model = llama()
    before = model(TOKENS).logits
    permute_model(model, to="interleaved")
    with pytest.raises(ValueError, match="pass layout='interleaved' to replace"):
        replace(model, rotary=mmpos.RotaryEncoding(16))
    places = replace(model, rotary=mmpos.RotaryEncoding(16), layout="interleaved")
    assert places is model.model.mmpos
    torch.testing.assert_close(model(TOKENS).logits, before, atol=1e-5, rtol=0)
    cached = model.generate(TOKENS, max_new_tokens=6, do_sample=False)
    whole = model.generate(TOKENS, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(cached, whole)
    replace(model, bias=mmpos.ALiBi)  # and the layout stays
    replace(model, bias=None)
    torch.testing.assert_close(model(TOKENS).logits, before, atol=1e-5, rtol=0)
    restore(model)
    permute_model(model, to="half")
    torch.testing.assert_close(model(TOKENS).logits, before, atol=0, rtol=0)
    with pytest.raises(ValueError, match="pass rotary too"):
        replace(model, bias=mmpos.ALiBi, layout="half")


@pytest.mark.parametrize(
    "extension",
    [NTKAware(factor=4.0), YaRN(factor=4.0, original_length=64), None],
)
def test_entries_go_by_what_is_done(extension) -> None:
    found = encodings(LLAMA)
    found.rotary.extend(extension)
    entries = config_entries(dataclasses.replace(found, max_length=1024), LLAMA)
    assert entries["max_position_embeddings"] == 1024
    config = copy.deepcopy(LLAMA)
    for name, value in entries.items():
        setattr(config, name, value)
    model = llama()
    replace(model, rotary=found.rotary)
    torch.testing.assert_close(
        llama(config)(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0
    )


def test_longrope_in_other_words() -> None:
    lists = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = AutoConfig.for_model(
        "phi3", **{**SMALL, "max_position_embeddings": 512}, pad_token_id=0,
        original_max_position_embeddings=128,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **lists},
    )  # fmt: skip
    found = encodings(config)
    found.rotary.extend(LongRoPE(**lists, original_length=128, max_length=512))
    assert compare(found, config) == []
    assert config_entries(found, config)["rope_parameters"]["factor"] == 4
    found.rotary.extend(LongRoPE(**lists, original_length=64, max_length=512))
    assert config_entries(found, config)["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    "name", ["deepseek-v2", "deepseek-v3", "dinov3-vits16", "vjepa2-vitl", "gpt-j-6b", "gemma-3-4b"]
)
def test_unchanged_encodings_are_written(name) -> None:
    found = encodings(preset(name))
    config_entries(found, preset(name))
    assert compare(preset(name), preset(name)) == []


def test_entries_of_a_network_within_another() -> None:
    config = AutoConfig.for_model("qwen2_vl")
    found = encodings(config, "text")
    assert config_entries(found, config)["rope_parameters"]["mrope_section"] == [16, 24, 24]
    assert compare(found, config, "text") == []
    assert compare(preset("qwen2-vl-7b"), config, "text") != []
    with pytest.raises(ValueError, match="the encodings are of qwen2_vl_text"):
        config_entries(found, LLAMA)


def test_weights_that_do_not_fit() -> None:
    model = llama()
    assert compare(LLAMA, model.state_dict()) == []
    deeper = llama(LlamaConfig(**{**SMALL, "num_hidden_layers": 4}, vocab_size=50))
    (layers,) = compare(LLAMA, deeper.state_dict())
    assert str(layers) == "layers: 2 and 4"
    keys = llama(LlamaConfig(**{**SMALL, "num_key_value_heads": 1}, vocab_size=50))
    assert {own.name for own in compare(LLAMA, keys.state_dict())} == {"key heads"}
    qwen = {"model_type": "qwen3", **SMALL}
    norm = {"layers.0.self_attn.q_norm.weight": torch.zeros(32)}
    assert [own.name for own in compare(qwen, norm)] == ["head size"]
    for strange in ({"foo": torch.zeros(3)}, tiny("bert").state_dict()):
        with pytest.raises(ValueError, match="nothing to compare"):
            compare(LLAMA, strange)


def test_files_that_are_no_weights(tmp_path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"read from .safetensors"):
        compare(LLAMA, path)
    with pytest.raises(ValueError, match="there is no file"):
        compare(LLAMA, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="no folder or file"):
        encodings("/no/folder")


def test_models_that_grow_their_queries_themselves() -> None:
    four = AutoConfig.for_model(
        "llama4_text", **{**SMALL, "num_hidden_layers": 4}, intermediate_size=32,
        intermediate_size_mlp=32, num_local_experts=2, vocab_size=50, floor_scale=8,
        pad_token_id=0,
    )  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    yarn["original_max_position_embeddings"] = 8
    three = AutoConfig.for_model(
        "ministral3", **SMALL, intermediate_size=32, vocab_size=50, rope_parameters=yarn
    )
    for config in (four, three):
        model = transformers.AutoModel.from_config(config).eval()
        torch.manual_seed(0)
        before = model(TOKENS).last_hidden_state
        found = encodings(model)
        said = str(found), [own.temperature for own, _ in found.each("rotary")]
        replace(model, rotary=found.rotary)
        torch.testing.assert_close(model(TOKENS).last_hidden_state, before, atol=2e-5, rtol=0)
        assert (str(found), [own.temperature for own, _ in found.each("rotary")]) == said
    resting = [own for own, _ in encodings(four).each("rotary") if own.rotary_dim == 0]
    assert len(resting) == 1, "all layers at rest share one"


def test_bad_calls(unchecked) -> None:
    with pytest.raises(ValueError, match="nothing is given to replace"):
        replace(llama(), length=100)
    with pytest.raises(ValueError, match="per_layer names rotary or bias"):
        replace(llama(), bias=mmpos.ALiBi, per_layer=["x"])
    with pytest.raises(TypeError, match=r"a size for each axis, \(9,\)"):
        encodings(tiny("bert")).additive.resize(9)
    with pytest.raises(TypeError, match="a state dict is needed, got str"):
        take_weights(encodings({"model_type": "gpt2"}), "folder")


def test_weights_beside_those_that_are_meant() -> None:
    tower = {"model_type": "qwen2_vl_vision"}
    frequencies = {"visual.rotary_pos_emb.inv_freq": 1e4 ** (-torch.arange(20.0) / 20)}
    assert compare(tower, frequencies) == []
    assert compare(tower, {"x.inv_freq": 1e3 ** (-torch.arange(20.0) / 20)})[0].name == "base"
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    for base, said in ((1e6, []), (1e4, []), (1e5, ["base"])):
        own = {"rotary_emb.full_attention_inv_freq": base ** (-torch.arange(128.0) / 128)}
        assert [each.name for each in compare(gemma, own)] == said
    model = llama().state_dict()
    beside = {"vision_tower.layers.9.self_attn.q_proj.weight": torch.zeros(20, 20)}
    assert compare(LLAMA, {**model, **beside}) == []


def test_options_that_are_read_or_not() -> None:
    for kind in ("esm", "roberta", "m2m_100"):
        with pytest.raises(ValueError, match="it is None: set it"):
            encodings(
                {"model_type": kind, "pad_token_id": None}, "encoder" if "m2m" in kind else ""
            )
    two = AutoConfig.for_model("deepseek_v2")
    two.rope_interleave = False
    assert encodings(two).rotary.layout == "interleaved"
    three = AutoConfig.for_model("deepseek_v3", rope_interleave=False)
    assert encodings(three).rotary.layout == "half"
    with pytest.raises(ValueError, match="is one network"):
        encodings(LLAMA, "vision", layout="half")
    rotary = encodings({"model_type": "wav2vec2-bert", "position_embeddings_type": "rotary"}).rotary
    assert (rotary.layout, rotary.base) == ("half", 1e4)
