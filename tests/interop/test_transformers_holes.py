"""Options that few models set, each with the number that it changes, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig

import mmpos
from mmpos import LogTemperature, RotaryEncoding, frequencies
from mmpos.interop import transformers as interop
from mmpos.interop.transformers import compare, encodings, rope_parameters, rotary_encoding
from mmpos.interop.transformers.families import FAMILIES

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
SMALL |= {"num_hidden_layers": 2}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 256}
LENGTH = {"original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
YARN = {"rope_type": "yarn", "factor": 4.0, **LENGTH}
SCALED = ("gemma2", "gemma3_text", "gemma4_text", "vaultgemma")
SCALED += ("granite", "granitemoe", "granitemoeshared", "deepseek_v2", "deepseek_v3")


def rope(**parameters):
    return {**LLAMA, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **parameters}}


def read(kind, **options):
    return encodings(AutoConfig.for_model(kind, **options))


def rotary(**parameters):
    return rotary_encoding({"rope_theta": 1e4, **parameters}, 16)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("kind", ["llama", *SCALED])
def test_scores_are_multiplied_by_what_attention_has(kind):
    options = {"attention_multiplier": 0.7, "query_pre_attn_scalar": 20, **SMALL}
    if FAMILIES[kind].latent:
        options |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 24}
        options["rope_parameters"] = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}
        options.pop("head_dim")
    known = {*CONFIG_MAPPING[kind].__dataclass_fields__, "rope_parameters"}
    config = AutoConfig.for_model(kind, **{k: own for k, own in options.items() if k in known})
    path = type(config).__module__.replace("configuration_", "modeling_")
    named = vars(importlib.import_module(path)).items()
    made = [own for name, own in named if name.endswith("TextAttention")]
    made += [own for name, own in named if name.endswith("Attention")]
    with torch.device("meta"):
        expected = made[0](config, layer_idx=0).scaling
    found = encodings(config)
    mine = found.scale or found.by_layer("rotary")[0].head_dim ** -0.5
    assert mine == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, [True, False, True]),
        ("cohere2", {"sliding_window": None}, [True, True, True, True]),
        ("exaone4", {"layer_types": ["sliding_attention", "full_attention"]}, [True, False]),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, [False, True]),
        ("llama4_text", {"attn_temperature_tuning": False}, [True, True, True, False]),
    ],
)
def test_which_layers_turn(kind, options, expected):
    found = read(kind, **options, num_hidden_layers=len(expected)).by_layer("rotary")
    assert [own is not None for own in found] == expected


def test_options_that_are_read():
    grown = read("llama4_text", num_hidden_layers=4, floor_scale=64, attn_scale=0.3).rotary[3]
    assert (grown.temperature.length, grown.temperature.beta) == (64, 0.3)
    assert read("deepseek_v3", rope_interleave=False).rotary.layout == "half"
    sections = {"rope_theta": 1e4, "mrope_section": [16, 24, 24], "mrope_interleaved": True}
    assert not read("qwen2_vl_text", rope_parameters=sections).rotary.interleaved
    assert not rotary(mrope_section=[3, 3, 2]).interleaved
    llama3 = rotary(rope_type="llama3", factor=8.0, low_freq_factor=2, high_freq_factor=3, **LENGTH)
    assert llama3.extension.low_frequency_factor == 2
    new = {**LONG, **LENGTH, "factor": 4.0}
    assert rotary(type="su", **new).spec() == rotary(rope_type="longrope", **new).spec()
    assert rotary(type="mrope", mrope_section=[3, 3, 2]).extension is None
    assert rotary(rope_type="proportional", factor=3.0).extension.factor == 3
    alone = rotary(**YARN, mscale=0.7, mscale_all_dim=0).extension
    assert rotary(**YARN, mscale=0.7).extension == rotary(**YARN).extension
    assert alone.magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert rotary(rope_type="linear", factor=2.0, attention_factor=None).extension.factor == 2
    near = rotary_encoding(
        {"rope_theta": 1e4, "rope_type": "longrope", **LENGTH, **LONG}, 16, max_length=32
    )
    assert near.extension.magnitude == 1
    own = {"pos_embed_shift": 0.2, "pos_embed_jitter": 1.5, "pos_embed_rescale": 3.0}
    reading = read("dinov3_vit", **own).rotary.coordinates
    assert (reading.shift, reading.jitter, reading.rescale) == (0.2, 1.5, 3.0)
    for kind, rows in (("deit", 2), ("dinov2_with_registers", 1)):
        assert read(kind).additive.prefix_rows == rows

    class Own(LlamaConfig):
        model_type = "own"

    alpha = {"rope_type": "dynamic", "factor": 1.0, "alpha": 9.0, "rope_theta": 1e4}
    longer = read("hunyuan_v1_dense", rope_parameters=alpha).rotary.extension
    assert longer == frequencies.NTKAware(factor=9.0)
    assert read("gemma3n_text").scale == 1
    assert read("stablelm").rotary.rotary_dim == 20
    assert read("falcon", alibi=True).rotary is None
    assert read("gptj", rotary=True).rotary.rotary_dim == 64  # as published
    assert read("bloom", offset_alibi=100).bias is not None
    assert encodings({**LLAMA, "alibi": False, "position_embedding_type": "absolute"}).layers == 2
    partial = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert encodings(Own(**SMALL, rope_parameters=partial), layout="half").rotary.rotary_dim == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (rope(rope_type="dynamic", factor=1.0, alpha=3.0), "does not read alpha=3.0"),
        (rope(**YARN, llama_4_scaling_beta=0.1), "does not read llama_4_scaling_beta=0.1"),
        (rope(mrope_section=[3, 3, 2]), "has one axis"),
        (rope(max_position_embeddings=64), "does not read max_position_embeddings=64"),
        ({**LLAMA, "local_theta": 5.0}, "does not read local_theta"),
        ({"model_type": "qwen2_audio"}, "pass part= one of text$"),
        ({"model_type": "xglm", "pad_token_id": 2}, "which token 0 reads"),
    ],
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        encodings(config)


def test_turns_that_llama3_refuses():
    for turns in ({"high_frequency_factor": math.inf}, {"low_frequency_factor": 0.0}):
        with pytest.raises(ValueError, match="expected 0 < low"):
            frequencies.Llama3(factor=2.0, original_length=64, **turns)


def test_entries_of_encodings_that_were_changed():
    def entries(config, **options):
        found = encodings(config)
        changed = RotaryEncoding(**{**found.rotary.spec()["init_args"], **options})
        return interop.config_entries(dataclasses.replace(found, rotary=changed), config)

    longer = frequencies.DynamicNTK(factor=2.0, original_length=64)
    assert entries(LLAMA, extension=longer)["max_position_embeddings"] == 64
    with pytest.raises(ValueError, match=r"no configuration of llama says that: .*layout"):
        entries(LLAMA, layout="interleaved")
    with pytest.raises(ValueError, match="are of llama, the configuration of mistral"):
        interop.config_entries(encodings(LLAMA), {**LLAMA, "model_type": "mistral"})
    assert entries({"model_type": "gptj"}, rotary_dim=12) == {"rotary_dim": 12}
    four = AutoConfig.for_model("llama4_text", num_hidden_layers=4, no_rope_layers=[0, 1, 1, 1])
    assert interop.config_entries(encodings(four), four)["rope_parameters"]["rope_theta"] == 5e5
    opt = {"model_type": "opt", "max_position_embeddings": 30}
    found = encodings(opt)
    assert interop.config_entries(found, opt) == {}
    found.additive.resize((42,))
    assert interop.config_entries(found, opt) == {"max_position_embeddings": 40}
    t5 = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 24}
    found = encodings({"model_type": "t5", **t5}, "encoder")
    assert interop.config_entries(found, {"model_type": "t5"}) == t5


def test_parameters_of_extensions():
    def said(**own):
        return rope_parameters(RotaryEncoding(16, **own))

    far = frequencies.LongRoPE(**LONG, original_length=64, max_length=256)
    assert said(extension=far)["factor"] == 4
    far = frequencies.LongRoPE(**LONG, original_length=64, factor=4, attention_factor=1.5)
    assert said(extension=far)["attention_factor"] == 1.5
    assert said(extension=frequencies.Proportional(fraction=0.5, factor=3.0))["factor"] == 3
    odd = rope_parameters(RotaryEncoding(44, rotary_dim=30))  # 44 · (30 / 44) is below 30
    assert rotary_encoding(odd, 44).rotary_dim == 30
    yarn = frequencies.YaRN(factor=4.0, original_length=64)
    for own in ({"length": 32}, {"offset": 1.0}, {"steps": False}):
        grown = LogTemperature(**{"length": 64, "offset": 0.0, **own})
        with pytest.raises(ValueError, match="another"):
            said(extension=yarn, temperature=grown)


def test_differences_of_encodings():
    def names(first, second):
        return [own.name for own in compare(first, second)]

    assert "first position of the table" in names({"model_type": "roberta"}, {"model_type": "bert"})
    gpt, pixtral = {"model_type": "gpt2"}, {"model_type": "pixtral"}
    assert names(gpt, {**gpt, "scale_attn_weights": False}) == ["scale of scores"]
    assert "extension" in names(pixtral, {**pixtral, "rope_theta": 5e4})
    far = [rope(rope_type="longrope", **LENGTH, **{**LONG, "long_factor": [x] * 8}) for x in (2, 3)]
    assert names(*far) == ["long_factor", "angles"]
    llama = encodings(LLAMA)
    for options in ({"trailing": True}, {"temperature": LogTemperature(length=8)}):
        both = (RotaryEncoding(16, rotary_dim=8, **own) for own in ({}, options))
        assert names(*(dataclasses.replace(llama, rotary=own) for own in both)) == list(options)


def test_differences_of_weights():
    name, plain = "model.rotary_emb.inv_freq", 1e4 ** (-torch.arange(8) / 8)
    assert compare(LLAMA, {name: plain * 1.01})
    smol = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [0, 1], "rope_theta": 1e4}
    assert compare(smol, {name: plain}) == []
    assert compare(rope(rope_type="dynamic", factor=2.0), {name: plain}) == []
    short = plain / torch.tensor(LONG["short_factor"])
    assert compare(rope(rope_type="longrope", **LENGTH, **LONG), {name: short}) == []
    for end, shape in (("q_proj", (100, 96)), ("k_proj", (20, 96)), ("k_norm", (20,))):
        state = {f"layers.1.self_attn.{end}.weight": torch.zeros(shape)}
        assert "head" in compare(LLAMA, state)[0].name
    gpt = encodings({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_positions": 6})
    assert compare(gpt, {"wpe.weight": torch.zeros(6, 8)}) == []
    assert gpt.additive.table.abs().sum() > 0  # weights are compared, not taken


def test_names_of_what_layers_share():
    found = encodings({"model_type": "umt5", "num_heads": 2, "num_layers": 2}, "encoder")
    assert len(interop.give_weights(dataclasses.replace(found, bias=found.bias[1]))) == 2
    state = {name: own + 1 for name, own in interop.give_weights(found).items()}
    interop.take_weights(found, {**state, f"other.{next(iter(state))}": torch.zeros(1)})
    assert all(map(torch.equal, interop.give_weights(found).values(), state.values()))
    bert = read("wav2vec2-bert", num_hidden_layers=1)
    more = mmpos.bias.ShawBias(2, head_dim=4, distance=3, values=True)
    with pytest.raises(ValueError, match="no name for value_table"):
        interop.give_weights(dataclasses.replace(bert, bias=more))
    assert "begin at 2" in str(read("roberta"))
