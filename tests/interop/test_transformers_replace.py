"""Rotations of mmpos within transformers models: equal ones give transformers' own output."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

import mmpos
from mmpos.frequencies import (
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Proportional,
    YaRN,
)
from mmpos.interop.transformers.replace import replace, restore
from mmpos.interop.transformers.rotations import Turns

hf: Any = transformers
pytestmark = pytest.mark.peer("transformers")

ROPE = mmpos.RotaryEncoding
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def made(config: Any, cls: Any = None) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config) if cls is None else cls(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(1))


def out(model: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **given)[0]


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol * scale)


def llama(**rope: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 500.0} | rope
    return made(hf.LlamaConfig(**GROUPED | {"rope_parameters": rope}))


half = partial(ROPE, layout="half", base=500.0)
LONG: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0, 9.0]}
EXTENSIONS: dict[str, Any] = {
    "default": ({}, None),
    "linear": ({"rope_type": "linear", "factor": 3.0}, PositionInterpolation(factor=3.0)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        YaRN(factor=4.0, original_length=128),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        Llama3(factor=8.0, original_length=64, low_frequency_factor=1.0, high_frequency_factor=4.0),
    ),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_llama_with_an_extension(name):
    rope, extension = EXTENSIONS[name]
    model, tokens = llama(**rope), ids(2, 300)
    expected = out(model, tokens)
    weights = {key: id(value) for key, value in model.named_parameters()}
    replace(model, rotary=partial(half, extension=extension))
    assert isinstance(model.rotary_emb, Turns)
    close(out(model, tokens), expected)
    assert {key: id(value) for key, value in model.named_parameters()} == weights
    restore(model)
    assert torch.equal(out(model, tokens), expected)


def test_dynamic_frequencies_beyond_the_original_length():
    model = made(
        hf.LlamaConfig(
            **GROUPED
            | {
                "max_position_embeddings": 128,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
            }
        )
    )
    short, long = ids(2, 100), ids(2, 300)
    within, beyond = out(model, short), out(model, long)
    replace(model, rotary=half(8, extension=DynamicNTK(original_length=128, factor=2.0)))
    close(out(model, short), within)
    close(out(model, long), beyond)
    close(out(model, short), within)  # nothing is remembered
    extended = partial(half, extension=DynamicNTK(original_length=128, factor=2.0))
    replace(model, rotary=extended, per_layer=["rotary"])
    assert model.mmpos.in_attention
    close(out(model, long), beyond)


def test_each_sequence_has_its_own_length_unless_it_is_frozen():
    rotary = half(8, extension=DynamicNTK(original_length=64))
    model = llama()
    replace(model, rotary=rotary)
    tokens = ids(1, 200)
    alone = out(model, tokens)
    where = torch.stack((torch.arange(200), torch.arange(200) // 4))
    both = out(model, tokens.expand(2, -1), position_ids=where)
    close(both[:1], alone)
    replace(model, rotary=rotary, length=200)
    frozen = out(model, tokens)
    close(frozen, alone)
    close(out(model, tokens[:, :50]), frozen[:, :50])
    replace(model, additive=None)
    close(out(model, tokens[:, :50]), frozen[:, :50])
    with pytest.raises(ValueError, match="length=7 is for frequencies that depend on it"):
        replace(model, rotary=half, length=7)
    close(out(model, tokens[:, :50]), frozen[:, :50])


def test_phi3_with_longrope_and_a_part_of_the_features():
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, **LONG}
    rope["original_max_position_embeddings"] = 128
    config = SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": rope}
    model = made(hf.Phi3Config(**config, original_max_position_embeddings=128))
    short, long = ids(2, 100), ids(2, 300)
    within, beyond = out(model, short), out(model, long)
    extension = LongRoPE(**LONG, original_length=128, max_length=512)
    replace(model, rotary=half(16, rotary_dim=8, extension=extension))
    close(out(model, short), within)
    close(out(model, long), beyond)


DEEPSEEK: dict[str, Any] = SMALL | {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPTJ: dict[str, Any] = {"n_embd": 48, "n_head": 3, "n_layer": 2, "rotary_dim": 8, "vocab_size": 50}
GLM: dict[str, Any] = {
    "head_dim": 8,
    "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
}
FORMS: dict[str, Any] = {
    "a part, half": (
        hf.GPTNeoXConfig(
            **SMALL,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        partial(half, rotary_dim=4),
    ),
    "a part, interleaved, sines first": (
        hf.GPTJConfig(**GPTJ, n_positions=512),
        partial(ROPE, rotary_dim=8),
    ),
    "interleaved": (hf.GlmConfig(**GROUPED | GLM), partial(ROPE, rotary_dim=4, base=500.0)),
    "norms before": (
        hf.Qwen3Config(**GROUPED, head_dim=10, rope_parameters={"rope_theta": 500.0}),
        half,
    ),
    "off the interface": (hf.FalconConfig(**SMALL), partial(half, base=10000.0)),
    "the last, reordered": (
        hf.DeepseekV3Config(**DEEPSEEK),
        partial(ROPE, rotary_dim=8, trailing=True),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms(name):
    config, rotary = FORMS[name]
    model, tokens = made(config), ids(2, 300)
    expected = out(model, tokens)
    replace(model, rotary=None)
    bare = out(model, tokens)
    assert (bare - expected).abs().max() > 1e-2
    replace(model, rotary=rotary)
    close(out(model, tokens), expected)
    if name != "off the interface":
        replace(model, rotary=rotary, per_layer=["rotary"])
        assert model.mmpos.in_attention
        close(out(model, tokens), expected)
    restore(model)
    assert torch.equal(out(model, tokens), expected)


def test_cosines_stay_float32_where_the_model_has_them_so():
    model, tokens = made(hf.OlmoConfig(**SMALL)).to(torch.bfloat16), ids(2, 300)
    model.rotary_emb = type(model.rotary_emb)(model.config)  # the cast rounded its frequencies
    expected = out(model, tokens)
    replace(model, rotary=ROPE(8, layout="half"))
    cos, _ = model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), torch.arange(3)[None])
    assert cos.dtype == torch.float32
    assert (out(model, tokens) - expected).abs().float().mean() < 1e-3


def test_an_encoding_for_each_type_of_layer():
    config = {**GROUPED, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 16}
    model = made(hf.Gemma3TextConfig(**config, layer_types=MIXED))
    tokens = ids(2, 80)
    expected = out(model, tokens)
    near, far = ROPE(8, layout="half"), ROPE(8, layout="half", base=1e6)
    replace(model, rotary=[near, far, near])
    assert not model.mmpos.in_attention
    close(out(model, tokens), expected)
    replace(model, rotary=[near, far, ROPE(8, layout="half")])
    assert model.mmpos.in_attention
    close(out(model, tokens), expected)
    replace(model, rotary=[near, torch.nn.Identity(), near])
    assert not model.mmpos.in_attention
    assert (out(model, tokens) - expected).abs().max() > 1e-2


def test_layers_with_heads_of_different_sizes():
    config = {**GROUPED, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 16}
    model = made(
        hf.Gemma4TextConfig(
            **config,
            global_head_dim=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=50,
            num_kv_shared_layers=0,
        )
    )
    tokens = ids(2, 80)
    expected = out(model, tokens)
    near = ROPE(8, layout="half")
    far = ROPE(16, layout="half", base=1e6, extension=Proportional(fraction=0.25))
    with pytest.raises(ValueError, match=r"heads of \[8, 16\] features: give a list"):
        replace(model, rotary=ROPE)
    with pytest.raises(ValueError, match="heads of 8 features got an encoding for 16"):
        replace(model, rotary=[far, far, far])
    replace(model, rotary=[near, near, far])
    close(out(model, tokens), expected)


def test_modernbert_looks_both_ways():
    model = made(hf.ModernBertConfig(**SMALL | {"num_hidden_layers": 3}, local_attention=8))
    tokens = ids(2, 60)
    expected = out(model, tokens)
    bases = [model.config.rope_parameters[kind]["rope_theta"] for kind in model.config.layer_types]
    kinds = {base: ROPE(8, layout="half", base=base) for base in bases}
    replace(model, rotary=[kinds[base] for base in bases])
    close(out(model, tokens), expected)


def test_positions_on_three_axes():
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 1]}
    model = made(hf.Qwen2VLTextConfig(**GROUPED, rope_parameters=rope), Qwen2VLTextModel)
    tokens = ids(2, 40)
    where = torch.randint(0, 300, (3, 2, 40), generator=torch.Generator().manual_seed(0))
    expected, text = out(model, tokens, position_ids=where), out(model, tokens)
    rotary = partial(mmpos.MRoPE, sections=(1, 2, 1), interleaved=False, layout="half", base=500.0)
    with pytest.raises(ValueError, match="was made for 1 axes, the transformer has 3"):
        replace(model, rotary=half(8))
    replace(model, rotary=rotary)
    close(out(model, tokens, position_ids=where), expected)
    close(out(model, tokens), text)
    four = torch.cat((torch.arange(40).expand(1, 2, -1), where))
    close(out(model, tokens, position_ids=four), expected)
    replace(model, rotary=rotary, per_layer=["rotary"])
    assert model.mmpos.in_attention
    close(out(model, tokens, position_ids=where), expected)
    close(out(model, tokens, position_ids=four), expected)
    with pytest.raises(ValueError, match="on 3 axes, which it does not hold: pass use_cache=False"):
        model(tokens, cache=model(tokens, use_cache=True).cache)


@pytest.mark.parametrize("in_attention", [False, True])
def test_generation_is_that_of_transformers(in_attention):
    torch.manual_seed(0)
    model = made(
        hf.LlamaConfig(**GROUPED, rope_parameters={"rope_theta": 500.0}), hf.LlamaForCausalLM
    )
    tokens, mask = ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    ask = partial(model.generate, tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    expected = ask()
    replace(model, rotary=half, per_layer=["rotary"] if in_attention else ())
    assert model.model.mmpos.in_attention == in_attention
    assert torch.equal(ask(), expected)
    assert torch.equal(ask(use_cache=False), expected)
    real = model.generate(tokens[:1, 5:], max_new_tokens=8, do_sample=False)
    assert torch.equal(ask()[0, 5:], real[0])
    if in_attention:
        with pytest.raises(ValueError, match=r"a StaticCache holds empty places.*DynamicCache"):
            ask(cache_implementation="static")
    else:
        assert torch.equal(ask(cache_implementation="static", disable_compile=True), expected)


def test_what_the_model_cannot_say_goes_through_attention():
    tokens = ids(2, 60)
    model = made(hf.LlamaConfig(**SMALL, num_key_value_heads=6))
    for rotary in (
        partial(mmpos.XPosEncoding, layout="half"),
        partial(ROPE, layout="half", temperature=mmpos.LogTemperature(length=20)),
        partial(mmpos.MixedRotaryEncoding, heads=6, base=10000.0, layout="half"),
    ):
        replace(model, rotary=rotary)
        assert model.mmpos.in_attention
        with torch.no_grad():
            part = model(tokens[:, :50], use_cache=True)
        rest = out(model, tokens[:, 50:], cache=part.cache)
        close(rest, out(model, tokens)[:, 50:])
    replace(model, rotary=partial(mmpos.XPosEncoding, layout="half", scale_base=64.0))
    where = torch.arange(60)[None]
    shifted = out(model, tokens, position_ids=where + 40)
    close(shifted, out(model, tokens, position_ids=where))
    grouped = made(hf.LlamaConfig(**GROUPED))
    with pytest.raises(ValueError, match="turns each of 6 heads, the model has 6, which share"):
        replace(
            grouped, rotary=partial(mmpos.MixedRotaryEncoding, heads=6, base=10000.0, layout="half")
        )
