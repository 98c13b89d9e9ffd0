import math

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4
from transformers.models.ministral3 import modeling_ministral3

import mmpos
from mmpos import LogTemperature, RotaryEncoding
from mmpos.positions import absent, join, sequence
from mmpos.rotary import MRoPE


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"length": 8192}, lambda p: 1 + 0.1 * math.log(1 + math.floor((p + 1) / 8192))),
        (
            {"length": 16, "offset": 0, "beta": 0.4},
            lambda p: 1 + 0.4 * math.log(1 + math.floor(p / 16)),
        ),
        (
            {"length": 128, "steps": False},
            lambda p: 1 + 0.1 * math.log(max((p + 1) / 128, 1)),
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_formula(options, rule, dtype):
    places = [0, 1, 15, 16, 127, 128, 8190, 8191, 8192, 81919, 10**6 - 1]
    scale = LogTemperature(**options)(torch.tensor(places, dtype=dtype)[:, None])
    assert scale.shape == (1, len(places), 1)
    assert scale.dtype == torch.float32
    expected = torch.tensor([rule(place) for place in places])
    torch.testing.assert_close(scale.flatten(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("steps", [False, True])
def test_before_the_beginning_and_without_a_place_nothing_is_scaled(steps):
    positions = torch.tensor([[-1.0], [-20.5], [-1e6], [math.nan], [3.0]])
    scale = LogTemperature(length=8, steps=steps)(positions)
    assert torch.equal(scale, torch.ones_like(scale))


def test_queries_grow_and_keys_do_not():
    encoding = RotaryEncoding(16, temperature=LogTemperature(length=8))
    positions = join(absent(1, 1), sequence(60))
    rotation, plain = encoding(positions), RotaryEncoding(16)(positions)
    x = torch.randn(2, 3, 61, 16)
    torch.testing.assert_close(mmpos.rotate(x, rotation.dual), mmpos.rotate(x, plain))
    scale = encoding.temperature(positions)
    torch.testing.assert_close(mmpos.rotate(x, rotation), mmpos.rotate(x, plain) * scale)
    assert scale.max() > 1.2


@pytest.mark.parametrize("axes", [1, 3])
def test_a_temperature_without_any_rotation(axes):
    encoding = RotaryEncoding(64, axes, rotary_dim=0, temperature=LogTemperature(length=8))
    positions = sequence(60).expand(-1, axes)
    rotation = encoding(positions)
    x = torch.randn(2, 3, 60, 64)
    assert torch.equal(mmpos.rotate(x, rotation.dual), x)
    scale = LogTemperature(length=8)(positions)
    assert torch.equal(mmpos.rotate(x, rotation), x * scale)
    for dtype in (torch.bfloat16, torch.float16):
        out = mmpos.rotate(x.to(dtype), rotation)
        assert torch.equal(out, (x.to(dtype).float() * scale).to(dtype))
    assert mmpos.build(encoding.spec()).spec() == encoding.spec()


def test_another_axis_and_another_encoding():
    positions = torch.rand(9, 3) * 300
    for cls in (RotaryEncoding, MRoPE):
        rotation = cls(16, 3, temperature=LogTemperature(length=8, axis=2))(positions)
        assert torch.equal(rotation.scale, LogTemperature(length=8)(positions[:, 2:]))


@pytest.mark.peer("transformers")
def test_ministral3():
    positions = torch.stack((torch.arange(300), torch.arange(400, 700)))
    theirs = modeling_ministral3.get_llama_4_attn_scale(positions, 0.1, 64)
    ours = LogTemperature(length=64, offset=0)(positions.unsqueeze(-1))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.peer("transformers")
def test_llama4_layers_without_rope(monkeypatch):
    """The queries that its attention hands on, of a layer without RoPE and of one with."""
    config = Llama4TextConfig(
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=16,
        num_hidden_layers=2,
        no_rope_layers=[1, 0],
        floor_scale=16,
        attn_temperature_tuning=True,
        use_qk_norm=False,
        attn_implementation="eager",
    )
    seen = {}

    def look(module, query, key, value, *args, **kwargs):
        seen["q"], seen["k"] = query, key
        return torch.zeros(2, 90, 3, 16), None

    monkeypatch.setattr(modeling_llama4, "eager_attention_forward", look)
    x = torch.randn(2, 90, 48)
    layer = modeling_llama4.Llama4TextAttention(config, 1)
    assert not layer.use_rope
    layer(x, position_embeddings=torch.zeros(0), attention_mask=None)
    encoding = RotaryEncoding(
        16, rotary_dim=0, temperature=LogTemperature(length=16, beta=config.attn_scale)
    )
    rotation = encoding(sequence(90))
    q, k = (part(x).unflatten(-1, (3, 16)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj))
    torch.testing.assert_close(mmpos.rotate(q, rotation), seen["q"], rtol=0, atol=1e-6)
    torch.testing.assert_close(mmpos.rotate(k, rotation.dual), seen["k"], rtol=0, atol=1e-6)
    assert rotation.scale.max() > 1.15


@pytest.mark.parametrize("length", [0, -8192])
def test_lengths_that_are_none(length):
    with pytest.raises(ValueError, match=f"length must be above 0 and finite, got {length}"):
        LogTemperature(length=length)


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="temperature reads axis 2, the encoding has 2 axes"):
        RotaryEncoding(16, 2, temperature=LogTemperature(length=8, axis=2))
