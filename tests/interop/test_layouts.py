"""Permuted weights: there and back, and the same output of transformers' own models."""

from importlib import import_module

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import mmpos
from mmpos import Rotation
from mmpos.interop.transformers.layouts import permute, permute_model
from mmpos.interop.transformers.plan import ChannelPlan

SIZES = {
    "hidden_size": 40,
    "num_attention_heads": 5,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PARTIAL = {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}
MODELS = {
    "llama": {"num_key_value_heads": 1, "attention_bias": True},
    "qwen2": {"num_key_value_heads": 5},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 12, "attention_bias": True},
    "olmo2": {"num_key_value_heads": 1},
    "gpt_neox": {**PARTIAL, "attention_bias": True},
    "phi3": {"num_key_value_heads": 1, **PARTIAL},
    "phi": {"num_key_value_heads": 5, "qk_layernorm": True, **PARTIAL},
    "stablelm": {"num_key_value_heads": 1, "qk_layernorm": True, **PARTIAL},
    "persimmon": {"qk_layernorm": True, **PARTIAL},
    "falcon": {"bias": True, "multi_query": True, "alibi": False},
    "falcon-new": {"new_decoder_architecture": True, "num_kv_heads": 1, "alibi": False},
    "falcon-all": {"multi_query": False, "alibi": False},
    "glm": {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, **PARTIAL},
    "qwen3_next": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["full_attention", "linear_attention"],
        "mlp_only_layers": [0, 1],
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 5,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        **PARTIAL,
    },
    "olmo_hybrid": {
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 5,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "rope_parameters": ROPE,
    },
    "gptj": {"n_embd": 40, "n_head": 5, "n_layer": 2, "n_positions": 999, "rotary_dim": 4},
    "cohere": {"num_key_value_heads": 1, "use_qk_norm": True},
}
INTERLEAVED = {"glm", "cohere", "gptj"}


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def make(name, **more):
    """A small model, none of whose parameters is zero or one."""
    torch.manual_seed(0)
    kind = name.split("-")[0]
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS.get(name, {}), **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    return model


def logits(model):
    ids = torch.arange(1, 19).view(2, 9)
    at = torch.stack((torch.arange(9) + 300, torch.arange(9) * 7))
    with torch.no_grad():
        return model(ids, position_ids=at, use_cache=False).logits


def other_rotation(module, layout, halves, monkeypatch):
    """Let a module of transformers rotate in another layout, for the time of a test.

    Its cos and sin have each angle twice, in halves or side by side.
    """

    def apply(q, k, cos, sin, unsqueeze_dim=1, **_):
        pairs = cos.shape[-1] // 2
        cos, sin = ((x[..., :pairs] if halves else x[..., ::2]) for x in (cos, sin))
        rotation = Rotation(cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), layout)
        return mmpos.rotate(q, rotation), mmpos.rotate(k, rotation)

    def apply_to_one(x, sin, cos):
        rotation = Rotation(cos[:, None], sin[:, None], layout)
        return mmpos.rotate(x.transpose(1, 2), rotation).transpose(1, 2)

    own = apply_to_one if "gptj" in module.__name__ else apply
    monkeypatch.setattr(module, "apply_rotary_pos_emb", own)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("name", MODELS)
def test_a_permuted_model_gives_what_it_gave(name, monkeypatch):
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = logits(model)
    there, back = ("half", "interleaved") if name in INTERLEAVED else ("interleaved", "half")
    places = {key: id(parameter) for key, parameter in model.named_parameters()}
    weights = permute_model(before, model.config, to=there)
    assert permute_model(model, to=there) is model
    assert places == {key: id(parameter) for key, parameter in model.named_parameters()}
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    scale = expected.abs().max()
    assert (logits(model) - expected).abs().max() > 1e-4 * scale
    kind = name.split("-")[0]
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    other_rotation(module, there, name != "cohere", monkeypatch)
    close(logits(model) / scale, expected / scale, 2e-6)
    permute_model(model, to=back)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("rank", [None, 12])
def test_mla_in_its_own_other_layout(rank):
    sizes = {"q_lora_rank": rank, "kv_lora_rank": 10, "qk_rope_head_dim": 6, "qk_nope_head_dim": 4}
    model = make(
        "deepseek_v3", num_key_value_heads=5, v_head_dim=8, first_k_dense_replace=2, **sizes
    )
    assert model.config.rope_interleave
    expected, before = logits(model), model.state_dict()
    before = {key: value.clone() for key, value in before.items()}
    permute_model(model, to="half")
    for layer in model.model.layers:
        layer.self_attn.config.rope_interleave = False
    close(logits(model) / expected.abs().max(), expected / expected.abs().max(), 2e-6)
    permute_model(model, to="interleaved")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ValueError, match="MLA's queries and keys have no one order"):
        permute_model(model, to=range(10))


@pytest.mark.peer("transformers")
def test_scores_of_grouped_heads_with_norms():
    model = make("qwen3")
    attention, module = model.model.layers[1].self_attn, transformers.models.qwen3.modeling_qwen3
    x, places = torch.randn(2, 7, 40), torch.arange(7)[None] + 411
    encodings = {kind: mmpos.RotaryEncoding(12, layout=kind) for kind in ("half", "interleaved")}

    def scores(turn):
        q = attention.q_norm(attention.q_proj(x).unflatten(-1, (5, 12))).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(x).unflatten(-1, (1, 12))).transpose(1, 2)
        q, k = turn(q, k)
        return q @ k.transpose(-1, -2)

    cos, sin = model.model.rotary_emb(x, places)
    expected = scores(lambda q, k: module.apply_rotary_pos_emb(q, k, cos, sin))

    def ours(kind):
        rotation = encodings[kind](places.T)
        return scores(lambda q, k: (mmpos.rotate(q, rotation), mmpos.rotate(k, rotation)))

    size = expected.abs().max()
    close(ours("half") / size, expected / size)
    permute_model(model, to="interleaved")
    close(ours("interleaved") / size, expected / size)
    assert (ours("half") - expected).abs().max() > 0.01 * size


@pytest.mark.peer("transformers")
def test_an_order_of_a_plan_permutes_a_tower():
    from mmpos.interop.transformers.towers import channel_plan
    from mmpos.positions import grid

    config = transformers.AutoConfig.for_model(
        "gemma4", vision_config={"hidden_size": 48, "num_attention_heads": 3, "head_dim": 16}
    ).vision_config
    plan = channel_plan(config)
    order = plan.order("half")
    encoding = mmpos.RotaryEncoding(16, 2, base=100, layout="half")
    assert plan.reorder(order).differences(ChannelPlan.of(encoding)) == []
    weights, x = torch.randn(48, 20), torch.randn(15, 20)
    places = grid(3, 5) + torch.tensor([300, 411])

    def made(rows):
        return (x @ rows.T).unflatten(-1, (3, 16)).transpose(0, 1)[None]

    moved = permute(weights, head_dim=16, to=order)
    ours = mmpos.rotate(made(moved), encoding(places))
    close(ours, plan(made(weights), places)[..., list(order)], 1e-4)
    q, k = ours, made(permute(weights + 1, head_dim=16, to=order))
    scores = q @ mmpos.rotate(k, encoding(places)).transpose(-1, -2)
    plain = plan(made(weights), places) @ plan(made(weights + 1), places).transpose(-1, -2)
    close(scores / plain.abs().max(), plain / plain.abs().max())
