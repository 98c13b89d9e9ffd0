import math

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingMRope, apply_rot_embed_cat
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

import mmpos
from mmpos import RotaryEncoding
from mmpos.frequencies import DynamicNTK, LongRoPE, NTKAware, PositionInterpolation, YaRN
from mmpos.positions import grid
from mmpos.rotary import MRoPE


def near(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def formula(x, positions, axes_of_pairs, base) -> torch.Tensor:
    """Interleaved pairs, in plain Python."""
    out, pairs = x.double().clone(), len(axes_of_pairs)
    for token, position in enumerate(positions):
        for pair, axis in enumerate(axes_of_pairs):
            angle = 0.0 if math.isnan(position[axis]) else position[axis] * base ** (-pair / pairs)
            a, b = x[..., token, 2 * pair].double(), x[..., token, 2 * pair + 1].double()
            out[..., token, 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            out[..., token, 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


@pytest.mark.parametrize(
    ("options", "pair_axes"),
    [
        ({"axes": 3}, [0, 1, 2, 0, 1, 2, 0, 0]),
        ({"axes": 3, "interleaved": False}, [0, 0, 0, 0, 1, 1, 2, 2]),
        ({"axes": 3, "sections": (2, 3, 3), "interleaved": False}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"axes": 3, "sections": (5, 2, 1)}, [0, 1, 2, 0, 1, 0, 0, 0]),
        ({"axes": 3, "sections": (5, 1, 2)}, [0, 1, 2, 0, 0, 2, 0, 0]),
        ({"axes": 2, "sections": (4, 4)}, [0, 1, 0, 1, 0, 1, 0, 1]),
        ({"axes": (2, 3, 4, 5), "sections": (2, 2, 2, 2)}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"axes": 4, "sections": (4, 2, 1, 1)}, [0, 1, 2, 3, 0, 1, 0, 0]),
        ({"axes": 1}, [0] * 8),
        ({"axes": 3, "rotary_dim": 12}, [0, 1, 2, 0, 1, 2]),
    ],
)
def test_pairs_and_formula(options, pair_axes):
    encoding = MRoPE(16, **options, base=500.0)
    assert encoding.pair_axes == pair_axes
    axes = len(encoding.pairs)
    assert [pair_axes.count(axis) for axis in range(axes)] == list(encoding.pairs)
    positions = torch.rand(7, axes, dtype=torch.float64) * 900 - 100
    positions[2, 0] = positions[3] = math.nan
    x = torch.randn(2, 3, 7, 16)
    expected = formula(x, positions.tolist(), pair_axes, 500.0)
    near(mmpos.rotate(x.double(), encoding(positions)), expected, 1e-6)


def test_interleaved_sections_of_qwen3():
    pair_axes = MRoPE(128, sections=(24, 20, 20)).pair_axes
    assert [pair for pair, axis in enumerate(pair_axes) if axis == 1] == list(range(1, 59, 3))
    assert [pair for pair, axis in enumerate(pair_axes) if axis == 2] == list(range(2, 60, 3))
    assert pair_axes[60:] == [0, 0, 0, 0]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interleaved": False},
        {"layout": "half", "trailing": True, "rotary_dim": 12},
        {"extension": YaRN(factor=4, original_length=99)},
        {"extension": DynamicNTK(factor=2, original_length=99)},
        {"axes": 5},
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_text_is_one_dimensional_rope_bit_for_bit(head_dim, options, dtype):
    encoding = MRoPE(head_dim, **options, base=1e6)
    plain = RotaryEncoding(
        head_dim,
        base=1e6,
        **{key: value for key, value in options.items() if key not in ("axes", "interleaved")},
    )
    text = (torch.rand(40, 1, dtype=torch.float64) * 1e5 - 300).to(dtype)
    ours = encoding(text.expand(-1, len(encoding.pairs)), length=512)
    theirs = plain(text, length=512)
    assert torch.equal(ours.cos, theirs.cos)
    assert torch.equal(ours.sin, theirs.sin)
    assert ours[2:] == theirs[2:]


def test_the_axes_of_a_batch_of_text_and_an_image():
    """2 words, an image of 2 × 3, 2 words: Qwen2-VL's positions."""
    t = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    h = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    w = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    positions = torch.tensor([t, h, w]).T
    rotation = MRoPE(16, base=100.0)(positions)
    for pair, axis in enumerate(MRoPE(16).pair_axes):
        expected = (positions[:, axis].double() * 100 ** (-pair / 8)).cos()
        near(rotation.cos[0, :, pair].double(), expected, 1e-7)


def qk(length, width):
    return torch.nn.functional.normalize(torch.randn(2, 2, 3, length, width), dim=-1)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize(
    ("kind", "extension"),
    [
        ({"rope_type": "default"}, None),
        (
            {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 128},
            YaRN(factor=3, original_length=128),
        ),
        ({"rope_type": "linear", "factor": 2.0}, PositionInterpolation(factor=2)),
    ],
    ids=["default", "yarn", "linear"],
)
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_qwen(model, kind, extension):
    sections = [16, 24, 24] if model == "qwen2" else [24, 20, 20]
    module, config = {
        "qwen2": (modeling_qwen2_vl, Qwen2VLTextConfig),
        "qwen3": (modeling_qwen3_vl, Qwen3VLTextConfig),
    }[model]
    rope = {"rope_theta": 1e6, "mrope_section": sections, **kind}
    own = config(hidden_size=384, num_attention_heads=3, head_dim=128, rope_parameters=rope)
    if model == "qwen2":
        own.head_dim = 128
        rotary = module.Qwen2VLRotaryEmbedding(own)
    else:
        rotary = module.Qwen3VLTextRotaryEmbedding(own)
    positions = torch.randint(0, 270, (2, 40, 3))
    q, k = qk(40, 128)
    cos, sin = rotary(q, positions.movedim(-1, 0))
    expected = module.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = MRoPE(
        128,
        sections=sections,
        interleaved=model == "qwen3",
        base=1e6,
        layout="half",
        extension=extension,
    )
    rotation = encoding(positions)
    for x, turned in zip((q, k), expected, strict=True):
        near(mmpos.rotate(x, rotation), turned)


@pytest.mark.peer("timm")
@pytest.mark.parametrize(
    ("width", "theirs", "ours"),
    [
        (64, (8, 12, 12), (11, 11, 10)),
        (72, (8, 12, 12), (12, 12, 12)),
        (64, (16, 8, 8), (16, 8, 8)),
    ],
)
@pytest.mark.parametrize("sizes", [(3, 90), (14, 14)])
def test_timm(width, theirs, ours, sizes):
    embed = RotaryEmbeddingMRope(width, mrope_section=theirs).get_embed(list(sizes))
    rotation = MRoPE(width, sections=ours, layout="half")(
        torch.nn.functional.pad(grid(*sizes), (1, 0))
    )
    for x in qk(math.prod(sizes), width):
        near(mmpos.rotate(x, rotation), apply_rot_embed_cat(x, embed, half=True))


def test_each_axis_extends_the_shared_spectrum():
    positions = torch.rand(9, 3) * 300
    encoding = MRoPE(
        16,
        extension=[
            YaRN(factor=4, original_length=99, attention_factor=1.5),
            None,
            LongRoPE(short_factor=[1] * 8, long_factor=range(1, 9), original_length=8, factor=1),
        ],
    )
    rotation = encoding(positions, length=(1, 2, 9))
    time = RotaryEncoding(16, extension=encoding.extension[0])(positions[:, :1])
    rows = RotaryEncoding(16)(positions[:, 1:2])
    columns = RotaryEncoding(16, extension=encoding.extension[2])(positions[:, 2:], length=9)
    for pair, axis in enumerate(encoding.pair_axes):
        own = (time, rows, columns)[axis]
        assert torch.equal(rotation.cos[..., pair], own.cos[..., pair])
        assert torch.equal(rotation.sin[..., pair], own.sin[..., pair])


def test_extensions_count_all_pairs_of_the_spectrum():
    MRoPE(8, extension=NTKAware(factor=2))
    with pytest.raises(ValueError, match="short_factor has 2 numbers, the axis has 4 pairs"):
        MRoPE(
            8,
            extension=LongRoPE(
                short_factor=[1, 1], long_factor=[1, 1], original_length=8, factor=2
            ),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"head_dim": 64, "sections": (8, 12, 12)},
            r"sections=\(8, 12, 12\) interleaved on 32 pairs really give \(11, 11, 10\): pass",
        ),
        (
            {"head_dim": 72, "sections": (8, 12, 12)},
            r"on 36 pairs really give \(12, 12, 12\): pass sections=\(12, 12, 12\)",
        ),
        (
            {"head_dim": 128, "sections": (16, 24, 24)},
            r"\(16, 24, 24\) interleaved on 64 pairs really give \(22, 21, 21\)",
        ),
        (
            {"head_dim": 128, "sections": (16, 24, 23), "interleaved": False},
            r"must give each of the 3 axes 1 pair or more, 64 in all; evenly .*\(22, 21, 21\)",
        ),
        ({"head_dim": 16, "sections": (4, 4)}, r"\(4, 4\) must give each of the 3 axes"),
        ({"head_dim": 16, "sections": (8, 0, 0)}, r"\(8, 0, 0\) must give each of the 3 axes"),
        (
            {"head_dim": 16, "sections": (9, 0, -1), "interleaved": False},
            "1 pair or more, 8 in all",
        ),
        ({"head_dim": 17}, "even number of features.*got 17: pass rotary_dim=16"),
        ({"head_dim": 4}, r"2 pairs \(4 features\) cannot be divided among 3 axes"),
        ({"head_dim": 16, "extension": [None]}, "extension has 1 entries, the encoding has 3 axes"),
    ],
)
def test_bad_arguments(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        MRoPE(**options)


def test_wrong_number_of_axes(unchecked):
    with pytest.raises(ValueError, match=r"\(5, 2\), expected \[..., length, 3\].*3 axes"):
        MRoPE(16)(torch.zeros(5, 2))


def test_it_is_rebuilt_with_its_own_sections():
    for encoding in (MRoPE(16), MRoPE(16, sections=(5, 2, 1)), MRoPE(16, rotary_dim=12)):
        twin = mmpos.build(encoding.spec())
        assert twin.spec() == encoding.spec()
        assert twin.pair_axes == encoding.pair_axes
    assert "sections" not in MRoPE(16).spec()["init_args"]
