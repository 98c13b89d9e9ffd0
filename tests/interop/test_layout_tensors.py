"""Permuted tensors and state dicts, element by element, and what is refused."""

import pytest
import torch
from torch import nn

from mmpos.interop.transformers.layouts import permute, permute_model

SHAPES = [(24, 5), (24,), (24, 5, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("turned", "trailing"), [(None, False), (4, False), (6, True)])
def test_there_and_back_is_the_same(shape, turned, trailing):
    weights = torch.randn(shape).bfloat16()
    named = {"head_dim": 8, "rotary_dim": turned, "trailing": trailing}
    there = permute(weights, to="interleaved", **named)
    assert torch.equal(permute(there, to="half", **named), weights)
    assert torch.equal(
        permute(permute(weights, to="half", **named), to="interleaved", **named), weights
    )
    assert not torch.equal(there, weights) and there.dtype == torch.bfloat16
    width = turned or 8
    start = 8 - width if trailing else 0
    for head in range(3):
        rows, moved = weights[8 * head : 8 * head + 8], there[8 * head : 8 * head + 8]
        for feature in range(8):
            pair, second = divmod(feature - start, 2)
            inside = 0 <= feature - start < width
            old = start + pair + second * width // 2 if inside else feature
            assert torch.equal(moved[feature], rows[old])


def test_the_last_dimension_and_an_order():
    weights = torch.randn(5, 24)
    expected = permute(weights.T.contiguous(), head_dim=8, to="interleaved").T
    assert torch.equal(permute(weights, head_dim=8, to="interleaved", dim=-1), expected)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    assert torch.equal(permute(weights, head_dim=8, to=order, dim=1), expected)
    grown = weights.clone().requires_grad_()
    permute(grown, head_dim=8, to="half", dim=1).sum().backward()
    assert grown.grad is not None and torch.equal(grown.grad, torch.ones(5, 24))


def numbered(*shape):
    """Rows that are their own index."""
    return (
        torch.arange(shape[0], dtype=torch.float32).view(-1, *[1] * (len(shape) - 1)).expand(shape)
    )


def heads(*numbers):
    """Rows of heads of 4 in the interleaved order."""
    return [4 * head + row for head in numbers for row in (0, 2, 1, 3)]


def test_names_of_a_state_dict():
    state = {
        "a.q_proj.weight": numbered(12, 3),
        "a.q_proj.bias": numbered(12),
        "a.k_proj.base_layer.weight": numbered(4, 3),
        "a.k_proj.lora_A.default.weight": torch.randn(2, 3),
        "a.k_proj.lora_B.default.weight": numbered(4, 2),
        "a.k_proj.lora_magnitude_vector.default.weight": numbered(4),
        "a.v_proj.weight": numbered(4, 3),
        "a.o_proj.weight": numbered(12, 3),
        "b.qkv_proj.weight": numbered(20, 3),
        "b.qkv_proj.lora_B.weight": numbered(20, 2),
        "b.qkv_proj.lora_A.weight": torch.randn(2, 3),
        "c.attn.c_attn.weight": numbered(20, 3).T.contiguous(),
        "c.attn.c_attn.bias": numbered(20),
        "c.query_key_value.bias": numbered(20),
        "d.self_attn.q_norm.weight": numbered(4),
        "d.self_attn.k_layernorm.bias": numbered(4),
        "e.q_norm.weight": numbered(12),
        "e.q_layernorm.norms.1.weight": numbered(4),
        "f.q_norm.weight": numbered(4, 3).T.contiguous(),
        "f.q_proj.linear.input_max": torch.tensor(3.0),
        "query": torch.randn(1, 7),
    }
    kept = {key: value.clone() for key, value in state.items()}
    new = permute_model(state, to="interleaved", head_dim=4, heads=3, key_heads=1)
    assert all(torch.equal(value, kept[key]) for key, value in state.items())
    blocks = heads(0, 1, 2, 3) + list(range(16, 20))
    rows = {
        "a.q_proj.weight": heads(0, 1, 2),
        "a.q_proj.bias": heads(0, 1, 2),
        "a.k_proj.base_layer.weight": heads(0),
        "a.k_proj.lora_B.default.weight": heads(0),
        "a.k_proj.lora_magnitude_vector.default.weight": heads(0),
        "b.qkv_proj.weight": blocks,
        "b.qkv_proj.lora_B.weight": blocks,
        "c.attn.c_attn.bias": blocks,
        "c.query_key_value.bias": blocks,  # one key head: one group
        "d.self_attn.q_norm.weight": heads(0),
        "d.self_attn.k_layernorm.bias": heads(0),
        "e.q_norm.weight": heads(0, 1, 2),
        "e.q_layernorm.norms.1.weight": heads(0),
    }
    for key, value in new.items():
        if key in rows:
            assert value.reshape(len(value), -1)[:, 0].tolist() == rows[key], key
        elif key in ("c.attn.c_attn.weight", "f.q_norm.weight"):
            expected = blocks if key[0] == "c" else heads(0)
            assert value[0].tolist() == expected
        else:
            assert value is state[key], key
    again = permute_model(new, to="half", head_dim=4, heads=3, key_heads=1)
    assert all(torch.equal(value, kept[key]) for key, value in again.items())


def test_groups_of_two_key_heads():
    state = {"query_key_value.weight": numbered(32, 3)}
    new = permute_model(state, to="interleaved", head_dim=4, heads=4, key_heads=2)
    values = [list(range(12, 16)), list(range(28, 32))]
    expected = heads(0, 1, 2) + values[0] + heads(4, 5, 6) + values[1]
    assert new["query_key_value.weight"][:, 0].tolist() == expected


class Network(nn.Module):
    def __init__(self, **kinds):
        super().__init__()
        for name, module in kinds.items():
            self.add_module(name, module)


WRONG = [
    (
        {"q_proj": nn.Linear(6, 10)},
        ValueError,
        r"q_proj.weight has shape \(10, 6\), expected 8 rows",
    ),
    ({"k_proj": nn.Linear(6, 8)}, ValueError, r"k_proj.weight .* expected 4 rows \(1 heads of 4"),
    ({"qkv": nn.Linear(6, 12)}, ValueError, r"expected 16 rows \(2 \+ 2 · 1 heads of 4"),
    ({"k_norm": nn.LayerNorm(6)}, ValueError, r"k_norm.weight has shape \(6,\), expected 4 rows"),
    ({"kv_a_proj_with_mqa": nn.Linear(6, 8)}, ValueError, "pass a configuration, with qk_rope"),
    ({"v_proj": nn.Linear(6, 8)}, ValueError, "nothing is named as queries or keys are"),
]


@pytest.mark.parametrize(("kinds", "error", "said"), WRONG)
def test_unfit_shapes_change_nothing(kinds, error, said):
    model = Network(query=nn.Linear(6, 8), **kinds)
    if "v_proj" in kinds:
        del model.query
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=said):
        permute_model(model, to="half", head_dim=4, heads=2, key_heads=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("key", "dtype"),
    [
        ("q_proj.weight", torch.int8),
        ("q_proj.weight", torch.float8_e4m3fn),
        ("q_proj.qweight", torch.int32),
        ("q_proj.weight_scale_inv", torch.float32),
        ("q_proj.parametrizations.weight.original0", torch.float32),
        ("k_proj.weight.absmax", torch.float32),
    ],
)
def test_quantised_weights_are_refused(key, dtype):
    state = {"k_proj.weight": torch.zeros(8, 4), key: torch.zeros(8, 4).to(dtype)}
    with pytest.raises(TypeError, match="is of a quantised or parametrised"):
        permute_model(state, to="half", head_dim=4)
    model = Network(q_proj=nn.Linear(4, 8), k_proj=nn.Linear(4, 8))
    model.q_proj.register_buffer("scales", torch.ones(8))
    with pytest.raises(TypeError, match=r"q_proj\.scales"):
        permute_model(model, to="half", head_dim=4)


@pytest.mark.usefixtures("unchecked")
def test_sizes_that_are_refused():
    weights = torch.zeros(24, 3)
    for named, said in [
        ({"head_dim": 8, "to": "neox"}, "to must be one of .* got 'neox'"),
        ({"head_dim": 8, "to": "half", "rotary_dim": 3}, "an even number between 2 and head_dim=8"),
        (
            {"head_dim": 8, "to": "half", "rotary_dim": 10},
            "an even number between 2 and head_dim=8",
        ),
        ({"head_dim": 7, "to": "half"}, "an even number between 2 and head_dim=7, got 7"),
        ({"head_dim": 10, "to": "half"}, "not of whole heads of 10 features along dim 0"),
        ({"head_dim": 0, "to": "half"}, "head_dim must be a whole number"),
        ({"head_dim": 4, "to": (0, 1, 2, 2)}, "names each of 4 features once"),
        ({"head_dim": 4, "to": (0, 1, 2, 3), "rotary_dim": 2}, "pass no rotary_dim"),
    ]:
        with pytest.raises(ValueError, match=said):
            permute(weights, **named)
    with pytest.raises(TypeError, match=r"weights are torch.uint8: permute before"):
        permute(weights.to(torch.uint8), head_dim=8, to="half")
    with pytest.raises(ValueError, match="pass head_dim, or a configuration that says it"):
        permute_model({"q_proj.weight": weights}, to="half")
    with pytest.raises(ValueError, match="pass heads and key_heads"):
        permute_model({"qkv.weight": weights}, to="half", head_dim=4)


def test_configurations_that_are_refused():
    import transformers

    state = {"q_proj.weight": torch.zeros(24, 3)}
    with pytest.raises(ValueError, match="qwen2_vl is of several networks: pass one"):
        permute_model(state, transformers.Qwen2VLConfig(), to="half")
    with pytest.raises(ValueError, match="codegen arranges queries, keys and values in a way"):
        permute_model(state, transformers.CodeGenConfig(), to="half")
    own = transformers.Gemma3TextConfig()
    own.rope_parameters["full_attention"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match=r"layers turn other shares of a head, \[0.5, 1.0\]"):
        permute_model(state, own, to="half")
    own = transformers.AutoConfig.for_model("gemma4_text")
    with pytest.raises(ValueError, match="gemma4_text has layers of other head_dim"):
        permute_model(state, own, to="half")
