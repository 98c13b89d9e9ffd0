"""The ways to turn a part of a head, and models that do."""

import pytest
import torch
from transformers import DeepseekV2Config, GPTNeoXConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.gpt_neox import modeling_gpt_neox

import mmpos
from mmpos import RotaryEncoding
from mmpos.frequencies import Proportional, YaRN
from mmpos.positions import sequence


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def heads(length, width=64):
    return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, width), dim=-1)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_part_is_turned_as_a_head_of_its_width(layout, axes):
    """At the beginning or the end of the head, with an exponent that counts the part alone."""
    positions = torch.rand(9, axes) * 600 - 100
    x = torch.randn(2, 3, 9, 30)
    alone = RotaryEncoding(12, axes, layout=layout)(positions)
    for trailing, part in ((False, slice(0, 12)), (True, slice(18, 30))):
        encoding = RotaryEncoding(30, axes, rotary_dim=12, trailing=trailing, layout=layout)
        out = mmpos.rotate(x, encoding(positions))
        close(out[..., part], mmpos.rotate(x[..., part], alone), 1e-6)
        rest = [i for i in range(30) if not part.start <= i < part.stop]
        assert torch.equal(out[..., rest], x[..., rest])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_proportional_turns_other_features_by_other_frequencies(layout):
    positions, x = sequence(9, start=300), torch.randn(2, 3, 9, 32)
    encoding = RotaryEncoding(32, layout=layout, extension=Proportional(fraction=0.25))
    out, whole = (
        mmpos.rotate(x, e(positions)) for e in (encoding, RotaryEncoding(32, layout=layout))
    )
    moving = [0, 1, 2, 3, 4, 5, 6, 7] if layout == "interleaved" else [0, 1, 2, 3, 16, 17, 18, 19]
    still = [i for i in range(32) if i not in moving]
    close(out[..., moving], whole[..., moving], 1e-6)
    assert torch.equal(out[..., still], x[..., still])


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_gpt_neox(part):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    old = {"hidden_size": 192, "num_attention_heads": 3, "rotary_pct": part}
    config = GPTNeoXConfig(**old, rope_parameters=rope)
    positions = torch.arange(500).expand(2, -1)
    q, k = heads(500)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    expected = modeling_gpt_neox.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = RotaryEncoding(64, rotary_dim=int(64 * part), layout="half")
    rotation = encoding(positions.unsqueeze(-1))
    for x, turned in zip((q, k), expected, strict=True):
        close(mmpos.rotate(x, rotation), turned)
        width = int(64 * part)
        assert torch.equal(mmpos.rotate(x, rotation)[..., width:], x[..., width:])


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("mscale", "softmax"), [((0.707, 0.707), 1), ((1.0, 0.5), 1.2)])
def test_deepseek_turns_the_last_features(mscale, softmax):
    """Its latent attention joins features without and with a position, the latter last."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale[0],
        "mscale_all_dim": mscale[1],
    }
    config = DeepseekV2Config(
        hidden_size=96, num_attention_heads=3, qk_rope_head_dim=32, rope_parameters=rope
    )
    config.head_dim = 32
    x, y = heads(270, 96)
    peer = modeling_deepseek_v2.DeepseekV2RotaryEmbedding(config)
    turns = peer(x, torch.arange(270)[None])
    expected = modeling_deepseek_v2.apply_rotary_emb(x[..., 64:], y[..., 64:], turns)
    extension = YaRN(factor=40, original_length=256, mscale=mscale[0], mscale_all_dim=mscale[1])
    assert extension.magnitude == pytest.approx(peer.attention_scaling)
    rotation = RotaryEncoding(96, rotary_dim=32, trailing=True, extension=extension)(sequence(270))
    for given, turned in zip((x, y), expected, strict=True):
        out = mmpos.rotate(given, rotation)
        close(out[..., 64:], turned)
        assert torch.equal(out[..., :64], given[..., :64])


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(("fraction", "width"), [(0.25, 512), (0.5, 64)])
def test_gemma4(fraction, width):
    module = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    configs = pytest.importorskip("transformers.models.gemma4.configuration_gemma4")
    config = configs.Gemma4TextConfig(
        num_hidden_layers=2,
        head_dim=width,
        global_head_dim=width,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": fraction,
            },
        },
    )
    rotary = module.Gemma4TextRotaryEmbedding(config)
    x = heads(400, width)[0]
    for kind, base, extension in (
        ("full_attention", 1e6, Proportional(fraction=fraction)),
        ("sliding_attention", 1e4, None),
    ):
        cos, sin = rotary(x, torch.arange(400)[None], layer_type=kind)
        expected = module.apply_rotary_pos_emb(x, cos, sin)
        encoding = RotaryEncoding(width, base=base, layout="half", extension=extension)
        close(mmpos.rotate(x, encoding(sequence(400))), expected)
