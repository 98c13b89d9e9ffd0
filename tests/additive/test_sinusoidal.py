import math

import pytest
import torch
from einops import rearrange
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed

import mmpos
from mmpos import SinusoidalEncoding
from mmpos.coordinates import Centered, Scaled
from mmpos.positions import absent, grid, join, sequence


def formula(dim, positions, base=10000.0) -> torch.Tensor:
    """Attention Is All You Need, sec. 3.5, an axis after the other, in plain Python."""
    axes = len(positions[0])
    pairs = [dim // 2 // axes + (dim // 2 % axes if axis == 0 else 0) for axis in range(axes)]
    rows = []
    for position in positions:
        row = []
        for x, count in zip(position, pairs, strict=True):
            for pair in range(count):
                angle = x / base ** (2 * pair / (2 * count))
                row += [0.0, 0.0] if math.isnan(x) else [math.sin(angle), math.cos(angle)]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dim", "axes", "base"),
    [(2, 1, 10000.0), (48, 1, 10000.0), (48, 2, 100.0), (46, 2, 10000.0), (64, 3, 10000.0)],
)
def test_formula(dim, axes, base):
    positions = torch.cat((torch.rand(20, axes) * 900 - 100, torch.full((1, axes), math.nan)))
    positions[3, 0] = math.nan
    out = SinusoidalEncoding(dim, axes, base=base)(positions)
    expected = formula(dim, positions.tolist(), base)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    exact = SinusoidalEncoding(dim, axes, base=base)(positions.double())
    torch.testing.assert_close(exact.double(), expected, rtol=0, atol=1e-7)


def test_golden_values():
    out = SinusoidalEncoding(4)(torch.tensor([[1], [3]])).tolist()
    assert out[0] == pytest.approx(
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004], abs=1e-6
    )
    assert out[1] == pytest.approx(
        [0.1411200081, -0.9899924966, 0.0299955002, 0.9995500337], abs=1e-6
    )


def test_it_holds_timms_features_in_another_order():
    theirs = build_sincos2d_pos_embed([3, 300], dim=48)
    ours = SinusoidalEncoding(48, 2)(grid(3, 300))
    ordered = rearrange(ours, "l (a pair wave) -> l (wave a pair)", a=2, wave=2)
    torch.testing.assert_close(ordered, theirs, rtol=0, atol=1e-5)


def test_several_axes_are_the_encodings_of_one_side_by_side():
    positions = grid(2, 3, 5)
    whole = SinusoidalEncoding(64, 3)(positions)
    parts = [
        SinusoidalEncoding(width)(positions[:, axis : axis + 1])
        for axis, width in enumerate((24, 20, 20))
    ]
    assert torch.equal(whole, torch.cat(parts, -1))


def test_a_token_without_a_coordinate_keeps_those_it_has():
    video = SinusoidalEncoding(64, 3)(torch.tensor([[4.0, math.nan, math.nan], [4.0, 1.0, 2.0]]))
    assert torch.equal(video[0, :24], video[1, :24])
    assert not video[0, 24:].any()
    assert not SinusoidalEncoding(64, 3)(absent(2, 3)).any()


def test_readings():
    positions = join(absent(1, 2), grid(4, 6))
    reading = Scaled((2, 3))
    scaled = SinusoidalEncoding(48, 2, coordinates=reading)(positions, extent=(4, 6))
    torch.testing.assert_close(scaled, SinusoidalEncoding(48, 2)(positions / 2))
    centred = SinusoidalEncoding(48, (4, 6), coordinates=Centered())(positions, extent=(4, 6))
    middle = centred[1:].reshape(4, 6, 48)
    torch.testing.assert_close(middle[..., 1::2], middle.flip(0, 1)[..., 1::2])
    torch.testing.assert_close(middle[..., ::2], -middle.flip(0, 1)[..., ::2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 5}, "dim must be even.*got 5"),
        ({"dim": 0}, "dim must be 1 or more, got 0"),
        ({"dim": 4, "axes": 3}, r"2 pairs \(4 features\).*3 axes"),
        ({"dim": 4, "axes": 0}, "axes must be a number of 1 or more.*got 0"),
        ({"dim": 4, "base": -1.0}, "base must be above 0 and finite, got -1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SinusoidalEncoding(**arguments)


def test_it_is_not_read_at_half_precision():
    with pytest.raises(TypeError, match=r"float16.*not exact"):
        mmpos.SinusoidalEncoding(8)(sequence(3).half())
