"""What `compare` finds between configurations, and between these and weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig

import mmpos
from mmpos.interop.transformers import compare, encodings

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16, "num_hidden_layers": 4}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(**parameters):
    return {**LLAMA, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **parameters}}


def names(first, second):
    return {
        own.name: (own.first, own.second) for own in compare(first, second) if own.name != "angles"
    }


@pytest.mark.parametrize("config", [LLAMA, rope(**YARN), {"model_type": "gemma3_text"}])
def test_alike_are_alike(config):
    assert compare(config, config) == []


def test_each_thing_has_its_words():
    assert names(rope(), rope(rope_theta=5e5)) == {"base": ("10000", "500000")}
    longer = rope(**YARN)
    assert names(rope(), longer) == {
        "type": ("default", "yarn"),
        "factor": ("none", "4"),
        "original length": ("none", "64"),
        "attention factor": ("1", "1.13863"),
    }
    assert names(longer, rope(**{**YARN, "factor": 8.0})) == {
        "factor": ("4", "8"),
        "attention factor": ("1.13863", "1.20794"),
    }
    assert names(longer, rope(**YARN, attention_factor=1.0)) == {
        "attention factor": ("1.13863", "1")
    }
    assert names(longer, rope(**YARN, truncate=False)) == {"truncate": ("True", "False")}
    assert names(longer, rope(**{**YARN, "original_max_position_embeddings": 128})) == {
        "original length": ("64", "128")
    }
    assert names(longer, rope(rope_type="linear", factor=4.0)) == {
        "type": ("yarn", "linear"),
        "original length": ("64", "none"),
        "attention factor": ("1.13863", "1"),
    }


def test_layout_fraction_and_sections():
    cohere = {**LLAMA, "model_type": "cohere", "rope_theta": 1e4}
    cohere.pop("head_dim")
    assert names(LLAMA, cohere) == {"layout": ("half", "interleaved")}
    neox = {"model_type": "gpt_neox", "hidden_size": 96, "num_attention_heads": 6}
    neox |= {"num_hidden_layers": 4, "rotary_pct": 0.5, "max_position_embeddings": 256}
    assert names(LLAMA, neox) == {"fraction of the head": ("16 of 16 features", "8 of 16 features")}
    two, three = (AutoConfig.for_model(f"qwen{n}_vl_text", num_hidden_layers=2) for n in (2, 3))
    found = names(two, three)
    assert found["sections"] == ("(16, 24, 24)", "(24, 20, 20)")
    assert found["interleaved"] == ("False", "True")
    assert names(two, AutoConfig.for_model("qwen2", num_hidden_layers=2))["axes"] == (
        "3 (MRoPE)",
        "1 (RotaryEncoding)",
    )


def test_angles_are_counted():
    (angles,) = [
        own for own in compare(rope(), rope(rope_type="linear", factor=2.0)) if own.name == "angles"
    ]
    assert str(angles) == "angles: apart by up to 127.5 radians within 256 positions (pair 0)"


def test_layers_are_named():
    every = AutoConfig.for_model("smollm3", num_hidden_layers=8, no_rope_layers=[1] * 8)
    some = AutoConfig.for_model("smollm3", num_hidden_layers=8)
    (found,) = compare(every, some)
    assert (found.name, found.layers, found.second) == ("rotary", "3, 7", "none")
    local = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    other = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    other.rope_parameters["full_attention"]["rope_theta"] = 5e5
    assert [(own.name, own.layers) for own in compare(local, other)] == [
        ("base", "5"),
        ("angles", "5"),
    ]
    assert names(some, AutoConfig.for_model("smollm3", num_hidden_layers=4)) == {
        "layers": ("8", "4")
    }


def test_other_places():
    assert names({"model_type": "bloom"}, {"model_type": "gpt2"}).keys() >= {"additive", "bias"}
    t5 = {"model_type": "t5", "num_layers": 2}
    one, two = (
        encodings({**t5, "relative_attention_max_distance": far}, "encoder") for far in (128, 256)
    )
    (found,) = compare(one, two)
    assert str(found) == "max_distance: 128 and 256"


def test_frequencies_of_weights():
    config = rope(rope_theta=5e5)
    cpu = torch.device("cpu")

    def stored(base, dtype=torch.float32, **options):
        own = mmpos.RotaryEncoding(16, base=base, **options)
        frequencies = own.frequencies(torch.float64, cpu)[0, 0]
        return {
            f"model.layers.{n}.self_attn.rotary_emb.inv_freq": frequencies.to(dtype) for n in (0, 3)
        }

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert compare(config, stored(5e5, dtype)) == []
    found = compare(config, stored(1e4))
    assert [(own.name, own.layers) for own in found] == [("base", "0"), ("base", "3")]
    assert found[0].second.startswith("10000 ")
    yarn = mmpos.frequencies.YaRN(factor=4.0, original_length=64)
    assert "frequency of pair" in compare(config, stored(5e5, extension=yarn))[0].name
    assert compare(config, stored(5e5, rotary_dim=8))[0].name == "features turned"
    assert compare({"model_type": "gpt2"}, stored(1e4))[0].second == "frequencies of 8 pairs"


def test_sizes_of_weights():
    heads = {"layers.0.self_attn.q_proj.weight": torch.zeros(96, 96)}
    assert compare(LLAMA, heads) == []
    assert compare({**LLAMA, "head_dim": 20}, heads)[0].name == "heads"
    assert (
        compare(LLAMA, {"layers.1.self_attn.q_norm.weight": torch.zeros(20)})[0].name == "head size"
    )
    model = GPT2LMHeadModel(GPT2Config(n_embd=12, n_head=2, n_layer=1, n_positions=9, vocab_size=7))
    assert compare(model, model.state_dict()) == []
    wider = GPT2Config(n_embd=12, n_head=2, n_layer=1, n_positions=10, vocab_size=7)
    assert "9" in str(compare(wider, model.state_dict())[0])


def test_what_is_no_model(unchecked):
    with pytest.raises(TypeError, match="got int"):
        compare(LlamaConfig(**SMALL), 3)
