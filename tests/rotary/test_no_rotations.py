"""The two published schemes that are no rotations, beside the rotations that were meant."""

import math

import pytest
import torch
from transformers import VJEPA2Config
from transformers.models.vjepa2 import modeling_vjepa2

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Scaled
from mmpos.frequencies import NTKAware, PositionInterpolation, YaRN
from mmpos.positions import absent, grid, join
from mmpos.rotary import MRoPE, VJEPA2Encoding, XDRoPE


def near(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def scores(encoding, q, k, positions):
    rotation = encoding(positions)
    return mmpos.rotate(q, rotation) @ mmpos.rotate(k, rotation).mT


@pytest.mark.parametrize(
    ("width", "each", "rest"),
    [(64, 20, 4), (72, 24, 0), (80, 26, 2), (88, 28, 4), (96, 32, 0), (128, 42, 2)],
)
def test_features_of_vjepa2(width, each, rest):
    encoding = VJEPA2Encoding(width)
    assert encoding.pairs == (each // 2,) * 3
    x = torch.randn(1, 2, 5, width)
    out = mmpos.rotate(x, encoding(torch.rand(5, 3) * 300 + 1))
    assert torch.equal(out[..., 3 * each :], x[..., 3 * each :])
    assert out[..., 3 * each :].shape[-1] == rest
    assert (out[..., : 3 * each] != x[..., : 3 * each]).any((0, 1, 2)).all()


@pytest.mark.parametrize(("width", "axes"), [(64, 3), (16, 1), (14, 2), (10, 3)])
def test_vjepa2_is_its_formula(width, axes):
    share = 2 * (width // axes // 2)
    x, positions = torch.randn(1, 2, 6, width), torch.rand(6, axes).double() * 900 - 100
    positions[1, 0] = positions[2] = math.nan
    expected = x.double().clone()
    for token, position in enumerate(torch.nan_to_num(positions).tolist()):
        for axis, coordinate in enumerate(position):
            block = x[..., token, axis * share : (axis + 1) * share].double()
            angles = [coordinate / 10000 ** (i / (share // 2)) for i in range(share // 2)] * 2
            for c, angle in enumerate(angles):
                partner = -block[..., c + 1] if c % 2 == 0 else block[..., c - 1]
                expected[..., token, axis * share + c] = block[..., c] * math.cos(
                    angle
                ) + partner * math.sin(angle)
    near(mmpos.rotate(x.double(), VJEPA2Encoding(width, axes)(positions)), expected, 1e-6)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("width", [64, 72, 80, 88])
@pytest.mark.parametrize("size", [(4, 3), (8, 16)])
def test_vjepa2_of_transformers(width, size):
    frames, side = size
    config = VJEPA2Config(
        hidden_size=3 * width,
        num_attention_heads=3,
        crop_size=side * 16,
        frames_per_clip=frames * 2,
        num_hidden_layers=1,
    )
    theirs = modeling_vjepa2.VJEPA2RopeAttention(
        config, hidden_size=3 * width, num_attention_heads=3
    )
    x = unit(2, 3, frames * side * side, width)
    expected = theirs.apply_rotary_embeddings(x, theirs.get_position_ids(x.flatten(1, 1)[:, 0]))
    out = mmpos.rotate(x, VJEPA2Encoding(width)(grid(frames, side, side)))
    near(out, expected)


def test_vjepa2_is_no_rotation_but_its_counterpart_is():
    x = torch.randn(1, 3, 40, 64)
    positions = grid(4, 2, 5).double()
    q, k = unit(2, 1, 3, 40, 64)
    published, meant = VJEPA2Encoding(64), RotaryEncoding(64, 3, split=(10, 10, 10))
    assert published.relative is False
    assert meant.relative is True
    assert published.pairs == meant.pairs
    for encoding, is_rotation in ((published, False), (meant, True)):
        norms = mmpos.rotate(x, encoding(positions)).norm(dim=-1)
        shifted = scores(encoding, q, k, positions + 5)
        change = (norms / x.norm(dim=-1) - 1).abs().max()
        moved = (shifted - scores(encoding, q, k, positions)).abs().max()
        assert change < 1e-5 if is_rotation else change > 0.05
        assert moved < 1e-5 if is_rotation else moved > 0.05


def xd_formula(x, positions, sections, base) -> torch.Tensor:
    """Half layout; the axis of feature ``c`` by sections of all features."""
    width = x.shape[-1]
    axis_of = [axis for axis, section in enumerate(sections) for _ in range(2 * section)]
    out = x.double().clone()
    for token, position in enumerate(positions):
        for c in range(width):
            coordinate = position[axis_of[c]]
            i = c % (width // 2)
            angle = 0.0 if math.isnan(coordinate) else coordinate * base ** (-2 * i / width)
            other = -x[..., token, c + width // 2] if c < width // 2 else x[..., token, i]
            out[..., token, c] = x[..., token, c].double() * math.cos(
                angle
            ) + other.double() * math.sin(angle)
    return out


@pytest.mark.parametrize(
    ("width", "sections"),
    [(32, (4, 4, 4, 4)), (16, (1, 2, 2, 3)), (24, (6, 2, 4)), (12, (6,)), (10, (2, 3))],
)
def test_xdrope_is_its_formula(width, sections):
    axes = len(sections)
    x, positions = torch.randn(2, 3, 6, width), torch.rand(6, axes).double() * 900 - 100
    positions[1, 0] = positions[2] = math.nan
    encoding = XDRoPE(width, axes, sections=sections, base=500.0)
    expected = xd_formula(x, positions.tolist(), sections, 500.0)
    near(mmpos.rotate(x.double(), encoding(positions)), expected, 1e-6)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("alpha", [None, 1000.0])
@pytest.mark.parametrize("sections", [[16, 16, 16, 16], [8, 24, 20, 12], [20, 22, 22]])
def test_hunyuan_of_transformers(sections, alpha):
    module = pytest.importorskip("transformers.models.hunyuan_vl.modeling_hunyuan_vl")
    configs = pytest.importorskip("transformers.models.hunyuan_vl.configuration_hunyuan_vl")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if alpha:
        rope |= {"rope_type": "dynamic", "alpha": alpha, "factor": 1.0}
    config = configs.HunYuanVLTextConfig(
        hidden_size=384, num_attention_heads=3, head_dim=128, rope_parameters=rope
    )
    positions = torch.randint(0, 270, (2, 40, len(sections)))
    q, k = unit(2, 2, 3, 40, 128)
    cos, sin = module.HunYuanVLRotaryEmbedding(config)(q, positions.movedim(-1, 0))
    expected = module.apply_rotary_pos_emb(q, k, cos, sin)
    encoding = XDRoPE(
        128,
        len(sections),
        sections=sections,
        extension=NTKAware(factor=alpha) if alpha else None,
    )
    for x, turned in zip((q, k), expected, strict=True):
        near(mmpos.rotate(x, encoding(positions)), turned)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_text_in_xdrope_is_one_dimensional_rope_bit_for_bit(dtype):
    text = (torch.rand(40, 1, dtype=torch.float64) * 1e5).to(dtype)
    ours = XDRoPE(64)(text.expand(-1, 4))
    plain = RotaryEncoding(64, layout="half")(text)
    assert torch.equal(ours.cos, plain.cos)
    assert torch.equal(ours.sin, plain.sin)
    assert ours.second is not None
    assert torch.equal(ours.second[0], plain.cos)
    assert torch.equal(ours.second[1], plain.sin)


def test_xdrope_is_no_rotation_but_its_counterpart_is():
    positions = grid(2, 2, 5, 2).double() * 3
    x = torch.randn(1, 3, 40, 64)
    q, k = unit(2, 1, 3, 40, 64)
    published = XDRoPE(64, sections=(8, 8, 8, 8))
    meant = MRoPE(64, 4, sections=(8, 8, 8, 8), layout="half")
    assert published.relative is False
    assert meant.relative is True
    for encoding, is_rotation in ((published, False), (meant, True)):
        norms = mmpos.rotate(x, encoding(positions)).norm(dim=-1)
        shifted = scores(encoding, q, k, positions + torch.tensor([7.0, 0, 3, 1]))
        change = (norms / x.norm(dim=-1) - 1).abs().max()
        moved = (shifted - scores(encoding, q, k, positions)).abs().max()
        assert change < 1e-5 if is_rotation else change > 0.05
        assert moved < 1e-5 if is_rotation else moved > 0.05


def test_readings_and_extensions_apply():
    positions = join(absent(1, 3), grid(2, 3, 50))
    scaled = VJEPA2Encoding(64, (2, 16, 16), coordinates=Scaled())
    by_hand = VJEPA2Encoding(64)(positions * torch.tensor([1, 16 / 3, 16 / 50]).double())
    for a, b in zip(scaled(positions, (2, 3, 50))[:2], by_hand[:2], strict=True):
        near(a, b, 1e-6)
    slower = PositionInterpolation(factor=2)
    for cls in (VJEPA2Encoding, XDRoPE):
        longer = cls(24, 3, extension=[None, slower, None])(positions)
        plain = cls(24, 3)(positions / torch.tensor([1.0, 2.0, 1.0]))
        for a, b in zip((*longer[:2], *longer.second), (*plain[:2], *plain.second), strict=True):
            near(a, b, 1e-6)
    sharp = YaRN(factor=1, original_length=99, attention_factor=2.0)
    for cls in (VJEPA2Encoding, XDRoPE):
        loud, quiet = cls(24, 3, extension=sharp)(positions), cls(24, 3)(positions)
        for a, b in zip((*loud[:2], *loud.second), (*quiet[:2], *quiet.second), strict=True):
            assert torch.equal(a[:, 1:], 2 * b[:, 1:])
            assert torch.equal(a[:, :1], b[:, :1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VJEPA2Encoding(5), "5 features cannot be divided among 3 axes: use at least 6"),
        (lambda: VJEPA2Encoding(16, 0), "axes must be a whole number of 1 or more"),
        (lambda: XDRoPE(16, sections=(4, 4, 4, 4)), "sections=.* 1 pair or more, 8 in all; evenly"),
        (lambda: XDRoPE(16, 3, sections=(4, 4)), r"\(4, 4\) must give each of the 3 axes"),
        (lambda: XDRoPE(17), "even number of features.*got 17"),
        (lambda: XDRoPE(6), r"3 pairs \(6 features\) cannot be divided among 4 axes"),
    ],
)
def test_bad_arguments(unchecked, make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_they_are_rebuilt():
    for encoding in (VJEPA2Encoding(64, base=100.0), XDRoPE(16, 3, sections=(4, 2, 2)), XDRoPE(16)):
        assert mmpos.build(encoding.spec()).spec() == encoding.spec()
