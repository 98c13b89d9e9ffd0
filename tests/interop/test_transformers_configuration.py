"""Configurations to encodings and back, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import mmpos
from mmpos import frequencies
from mmpos.interop.transformers import (
    compare,
    config_entries,
    encodings,
    rope_parameters,
    rotary_encoding,
)

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
SMALL |= {"num_hidden_layers": 2}
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, not rounded": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
    "longrope, factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        **LONG,
        "factor": 32.0,
    },
    "llama3": {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    "llama3, a step": {
        "rope_type": "llama3",
        "original_max_position_embeddings": 64,
        **LLAMA3,
        "high_freq_factor": 1.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
}


def llama(parameters, **options):
    parameters = {"rope_theta": 5e5, **parameters}
    return LlamaConfig(
        **{"max_position_embeddings": 256, **SMALL, **options}, rope_parameters=parameters
    )


def turned(config, length):
    """q and k of a sequence, turned by Llama's own code."""
    q, k = torch.randn(2, 2, 3, length, 16, generator=torch.Generator().manual_seed(2)).unbind(0)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(length).unsqueeze(0))
    return (q, k), apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("name", TYPES)
def test_every_type_and_back(name, length):
    config = llama(TYPES[name])
    rotary = encodings(config).rotary
    given, expected = turned(config, length)
    rotation = rotary(
        mmpos.positions.sequence(length), length=length if rotary.needs_length else None
    )
    for x, own in zip(given, expected, strict=True):
        torch.testing.assert_close(mmpos.rotate(x, rotation), own, atol=1e-4, rtol=0)
    again = llama(rope_parameters(rotary))
    for own, mine in zip(turned(again, length)[1], expected, strict=True):
        torch.testing.assert_close(own, mine, atol=1e-6, rtol=0)
    assert encodings(again).rotary.spec() == rotary.spec() or "longrope" in name


@pytest.mark.parametrize("kind", ["ministral3", "qwen2_vl_text", "qwen3_vl_text", "gemma3_text"])
def test_entries_make_the_same_configuration(kind):
    config = AutoConfig.for_model(kind)
    found = encodings(config)
    entries = config_entries(found, config)
    again = encodings(AutoConfig.for_model(kind, **entries))
    assert str(again) == str(found)
    assert [own.spec() for own, _ in again.each("rotary")] == [
        own.spec() for own, _ in found.each("rotary")
    ]


def test_older_names():
    new = encodings(llama({"rope_type": "linear", "factor": 4.0})).rotary
    old = LlamaConfig(**SMALL, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    assert encodings(old).rotary.spec() == new.spec()
    assert rotary_encoding({"type": "linear", "factor": 4}, 16, base=5e5).spec() == new.spec()
    data = {"model_type": "llama", **SMALL, "rope_theta": 5e5}
    data["rope_scaling"] = {"type": "linear", "factor": 4.0}
    assert encodings(data).rotary.spec() == new.spec()


def test_a_folder_and_a_file_of_weights(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_embd=12, n_head=2, n_layer=1, n_positions=9, vocab_size=7))
    model.save_pretrained(tmp_path)
    assert encodings(tmp_path).additive.grid == encodings(str(tmp_path)).additive.grid == (9,)
    assert compare(tmp_path, tmp_path / "model.safetensors") == []
    with pytest.raises(ValueError, match="no folder or file"):
        encodings(tmp_path / "nothing")


def test_a_static_ntk_is_a_larger_base():
    longer = mmpos.RotaryEncoding(16, extension=frequencies.NTKAware(factor=8.0), layout="half")
    again = rotary_encoding(rope_parameters(longer), 16)
    assert again.base == pytest.approx(1e4 * 8 ** (8 / 7))
    cpu = torch.device("cpu")
    torch.testing.assert_close(
        again.frequencies(torch.float64, cpu), longer.frequencies(torch.float64, cpu)
    )


def test_interleaved_sections_are_limits_of_the_spectrum():
    given = {"rope_theta": 1e4, "mrope_section": [8, 12, 12], "mrope_interleaved": True}
    assert rotary_encoding(given, 64).sections == (11, 11, 10)
    given["mrope_interleaved"] = False
    assert rotary_encoding(given, 64).sections == (8, 12, 12)


def test_layers_that_do_not_turn():
    smol = encodings(AutoConfig.for_model("smollm3", num_hidden_layers=8))
    assert [own is None for own in smol.rotary] == [False, False, False, True] * 2
    four = encodings(AutoConfig.for_model("llama4_text", num_hidden_layers=4))
    resting = four.rotary[3]
    assert resting.rotary_dim == 0 and resting.temperature.length == 8192
    cohere = encodings(AutoConfig.for_model("cohere2", num_hidden_layers=4))
    assert [own is None for own in cohere.rotary] == [False, False, False, True]


def test_each_kind_of_layer_has_its_own():
    found = encodings(AutoConfig.for_model("gemma3_text", num_hidden_layers=12))
    assert [(own.base, layers) for own, layers in found.each("rotary")] == [
        (1e4, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
        (1e6, [5, 11]),
    ]
    assert found.scale == 256**-0.5
    four = encodings(AutoConfig.for_model("gemma4_text", num_hidden_layers=6))
    assert [own.head_dim for own, _ in four.each("rotary")] == [256, 512]
    assert four.rotary[5].extension == frequencies.Proportional(fraction=0.25)


def test_scores_of_deepseek_grow_with_yarn():
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    found = encodings(AutoConfig.for_model("deepseek_v3", rope_parameters=yarn))
    assert found.rotary.extension.magnitude == 1
    assert found.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert (found.rotary.head_dim, found.rotary.rotary_dim, found.rotary.trailing) == (
        192,
        64,
        True,
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yarm", "factor": 2}, "did you mean yarn"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, "read by yarn"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2}, "are two"),
        ({"rope_type": "default", "factr": 2}, "does not read factr=2"),
        ({"rope_type": "yarn", "factor": 2}, "needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "pass it"),
        ({"rope_type": "dynamic", "factor": 2}, "max_position_embeddings"),
        ({"rope_type": "longrope", **LONG}, "needs original"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "which are no pairs"),
        ({"rope_type": "default", "mrope_interleaved": True}, "pass mrope_section"),
    ],
)
def test_parameters_that_are_refused(parameters, message):
    with pytest.raises(ValueError, match=message) as caught:
        rotary_encoding({"rope_theta": 1e4, **parameters}, 20)
    assert "\n" not in str(caught.value)


def test_a_base_is_needed_once():
    with pytest.raises(ValueError, match="pass base=10000"):
        rotary_encoding({"rope_type": "default"}, 16)
    with pytest.raises(ValueError, match="are two"):
        rotary_encoding({"rope_theta": 1e4}, 16, base=2e4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama", "alibi": True}, "llama does not read alibi=True"),
        ({"model_type": "llama", "rotary_pct": 0.5}, "does not read rotary_pct"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "turns whole heads"),
        ({"model_type": "qwen2_vl"}, "pass part= one of vision, text"),
        ({"model_type": "resnet"}, "model_type 'resnet' is not known"),
        ({"model_type": "nothing"}, "transformers refuses"),
        ({"hidden_size": 3}, "names its model_type"),
        ({"model_type": "llama", "rope_scaling": {"type": "yarm", "factor": 2.0}}, "yarn"),
        ({"model_type": "gemma4_vision"}, "channel_plan"),
        ({"model_type": "roformer", "rotary_value": True}, "turns values"),
    ],
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        encodings(config)
    assert "\n" not in str(caught.value)


def test_an_unknown_family_needs_its_layout():
    class Own(LlamaConfig):
        model_type = "own"

    config = Own(**SMALL)
    with pytest.raises(ValueError, match="pass the layout"):
        encodings(config)
    assert encodings(config, layout="interleaved").rotary.layout == "interleaved"
    with pytest.raises(ValueError, match="another layout"):
        encodings(LlamaConfig(**SMALL), layout="interleaved")
    with pytest.raises(TypeError, match="got int"):
        encodings(3)


@pytest.mark.parametrize(
    ("rotary", "message"),
    [
        (mmpos.RotaryEncoding(16, 2), "one spectrum"),
        (mmpos.XPosEncoding(16), "one spectrum"),
        (mmpos.RotaryEncoding(16, coordinates=mmpos.coordinates.OneBased()), "OneBased"),
        (mmpos.RotaryEncoding(16, temperature=mmpos.LogTemperature(length=8)), "another"),
    ],
)
def test_rotations_that_no_parameters_say(rotary, message):
    with pytest.raises(ValueError, match=message):
        rope_parameters(rotary)
