import math

import pytest
import torch

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Centered, OneBased, Scaled
from mmpos.positions import absent, grid, join, sequence


def formula(x, positions, *, base=10000.0, width=None, layout="interleaved") -> torch.Tensor:
    """RoFormer, eq. 34, feature by feature in plain Python; axes one after the other."""
    width = width or x.shape[-1]
    axes = len(positions[0])
    pairs = [width // 2 // axes + (width // 2 % axes if axis == 0 else 0) for axis in range(axes)]
    out = x.double().clone()
    for token, position in enumerate(positions):
        pair = 0
        for coordinate, count in zip(position, pairs, strict=True):
            for i in range(count):
                angle = 0.0 if math.isnan(coordinate) else coordinate / base ** (i / count)
                a, b = (2 * pair, 2 * pair + 1)
                if layout == "half":
                    a, b = pair, pair + width // 2
                first, second = x[..., token, a].double(), x[..., token, b].double()
                out[..., token, a] = first * math.cos(angle) - second * math.sin(angle)
                out[..., token, b] = first * math.sin(angle) + second * math.cos(angle)
                pair += 1
    return out


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("axes", "width", "base"),
    [(1, None, 10000.0), (1, 8, 10000.0), (2, None, 100.0), (2, 10, 100.0), (3, None, 50.0)],
)
def test_formula(axes, width, base, layout):
    x = torch.randn(2, 3, 12, 16)
    positions = torch.rand(12, axes, dtype=torch.float64) * 900 - 100
    positions[2, 0] = positions[3] = math.nan
    encoding = RotaryEncoding(16, axes, base=base, rotary_dim=width, layout=layout)
    expected = formula(x, positions.tolist(), base=base, width=width, layout=layout)
    exact = mmpos.rotate(x.double(), encoding(positions))
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
    single = mmpos.rotate(x, encoding(positions.float()))
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=5e-4)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_a_positive_angle_turns_the_first_feature_towards_the_second(layout):
    rotation = RotaryEncoding(4, layout=layout)(torch.tensor([[math.pi / 2]]))
    out = mmpos.rotate(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), rotation).flatten()
    assert out[1 if layout == "interleaved" else 2] == pytest.approx(1.0)


def test_layouts_are_permutations_of_one_another():
    x, positions = torch.randn(2, 3, 7, 16), sequence(7, start=300)
    order = torch.arange(16).reshape(8, 2).T.flatten()
    halves = mmpos.rotate(x[..., order], RotaryEncoding(16, layout="half")(positions))
    pairs = mmpos.rotate(x, RotaryEncoding(16)(positions))
    torch.testing.assert_close(halves, pairs[..., order])


@pytest.mark.parametrize("axes", [2, 3])
def test_an_axis_alone_is_the_one_axis_encoding_of_its_own_pairs(axes):
    x, turns = torch.randn(2, 3, 7, 64), sequence(7, start=300)
    encoding = RotaryEncoding(64, axes)
    start = 0
    for axis, pairs in enumerate(encoding.pairs):
        positions = torch.full((7, axes), math.nan)
        positions[:, axis : axis + 1] = turns
        part = slice(2 * start, 2 * (start + pairs))
        rotation, own = encoding(positions), RotaryEncoding(2 * pairs)(turns)
        assert torch.equal(rotation.cos[..., start : start + pairs], own.cos)
        assert torch.equal(rotation.sin[..., start : start + pairs], own.sin)
        out, alone = mmpos.rotate(x, rotation), mmpos.rotate(x[..., part].contiguous(), own)
        torch.testing.assert_close(out[..., part], alone, rtol=0, atol=1e-6)
        assert torch.equal(out[..., : part.start], x[..., : part.start])
        assert torch.equal(out[..., part.stop :], x[..., part.stop :])
        start += pairs


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(
    ("split", "bases", "order"),
    [
        ((1, 5, 2), (100.0, 1e4, 1e6), None),
        ((3, 1, 1), 50.0, (2, 0, 1)),
        ((2, 4, 2), (100.0, 50.0, 10.0), (1, 2, 0)),
    ],
)
def test_each_axis_has_its_pairs_its_base_and_its_place(split, bases, order, layout):
    encoding = RotaryEncoding(16, 3, split=split, base=bases, order=order, layout=layout)
    positions = torch.rand(7, 3, dtype=torch.float64) * 900 - 100
    rotation, pair = encoding(positions), 0
    for axis in order or range(3):
        base = bases if isinstance(bases, float) else bases[axis]
        for i in range(split[axis]):
            assert encoding.pair_axes[pair] == axis
            angle = positions[:, axis] * base ** (-i / split[axis])
            torch.testing.assert_close(
                rotation.cos[0, :, pair], angle.cos().float(), rtol=0, atol=1e-6
            )
            torch.testing.assert_close(
                rotation.sin[0, :, pair], angle.sin().float(), rtol=0, atol=1e-6
            )
            pair += 1
    assert rotation.cos.shape[-1] == pair
    assert mmpos.build(encoding.spec()).spec() == encoding.spec()


def test_an_order_is_that_of_flipped_positions():
    positions = join(absent(2, 3), grid(2, 3, 270))
    ordered = RotaryEncoding(18, 3, order=(2, 1, 0))(positions)
    assert torch.equal(ordered.cos, RotaryEncoding(18, 3)(positions.flip(-1)).cos)


def test_a_missing_coordinate_turns_as_coordinate_zero():
    positions = torch.tensor([[math.nan, 3.0], [0.0, 3.0]])
    rotation = RotaryEncoding(16, 2)(positions)
    assert torch.equal(rotation.cos[:, 0], rotation.cos[:, 1])
    assert torch.equal(rotation.sin[:, 0], rotation.sin[:, 1])


def test_shapes_with_and_without_a_batch():
    assert RotaryEncoding(16, 2)(grid(3, 4)).cos.shape == (1, 12, 8)
    assert RotaryEncoding(16, 2)(grid(3, 4).expand(5, -1, -1)).cos.shape == (5, 1, 12, 8)
    assert RotaryEncoding(16, 2, rotary_dim=12)(grid(3, 4)).sin.shape == (1, 12, 6)


def test_readings():
    positions = join(absent(1, 2), grid(4, 6))
    plain = RotaryEncoding(16, 2)
    for reading, expected in (
        (OneBased(), plain(positions + 1)),
        (Scaled((2, 3)), plain(positions / 2)),
        (Centered(), plain(2 * (positions + 0.5) / torch.tensor([4, 6]) - 1)),
    ):
        rotation = RotaryEncoding(16, 2, coordinates=reading)(positions, extent=(4, 6))
        torch.testing.assert_close(rotation[:2], expected[:2])


def test_a_disturbance_in_training_is_one_for_all_tokens():
    encoding = RotaryEncoding(16, (4, 6), coordinates=OneBased(shift=3.0))
    q, k = torch.randn(2, 1, 2, 24, 16)
    still, moved = encoding.eval()(grid(4, 6)), encoding.train()(grid(4, 6))
    assert (still.cos - moved.cos).abs().max() > 1e-2
    before, after = (mmpos.rotate(q, r) @ mmpos.rotate(k, r).mT for r in (still, moved))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 33}, "even number of features between 2 and head_dim=33, got 33.*=32"),
        ({"head_dim": 16, "rotary_dim": 9}, "head_dim=16, got 9: pass rotary_dim=8"),
        ({"head_dim": 16, "rotary_dim": 18}, "head_dim=16, got 18: pass rotary_dim=16"),
        ({"head_dim": 16, "rotary_dim": 0}, "head_dim=16, got 0: pass rotary_dim=2"),
        ({"head_dim": 4, "axes": 3}, r"2 pairs \(4 features\) cannot be divided among 3 axes"),
        ({"head_dim": 16, "axes": 0}, "axes must be a whole number of 1 or more"),
        ({"head_dim": 16, "base": 0.0}, "base must be above 0 and finite, got 0.0"),
        (
            {"head_dim": 16, "axes": 2, "base": (100.0,)},
            "base has 1 entries, the encoding has 2 axes",
        ),
        (
            {"head_dim": 16, "axes": 2, "split": (4, 5)},
            "9 pairs in all, and head_dim=16 has 8",
        ),
        (
            {"head_dim": 16, "axes": 2, "split": (4, 2), "rotary_dim": 16},
            r"split=\(4, 2\) must give each of the 2 axes 1 pair or more, 8 in all",
        ),
        ({"head_dim": 16, "axes": 2, "split": (8, 0)}, r"split=\(8, 0\) must give each of the 2"),
        ({"head_dim": 16, "axes": 3, "split": (4, 4)}, r"split=\(4, 4\) must give each of the 3"),
        ({"head_dim": 16, "axes": 2, "order": (1, 1)}, r"order=\(1, 1\) must name each .* 0 … 1"),
        ({"head_dim": 16, "axes": 2, "order": (0,)}, r"order=\(0,\) must name each of the axes"),
        ({"head_dim": 16, "layout": "llama"}, "layout must be one of.*half.*got 'llama'"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEncoding(**arguments)


def test_heads_that_do_not_fit_the_rotation(unchecked):
    rotation = RotaryEncoding(16)(sequence(7))
    with pytest.raises(
        ValueError, match="x has 8 features in a head, the rotation turns those up to 16"
    ):
        mmpos.rotate(torch.randn(1, 3, 7, 8), rotation)
    with pytest.raises(
        ValueError, match=r"x has shape \(1, 7, 3, 16\).*rotation is for .* = \(1, 7\)"
    ):
        mmpos.rotate(torch.randn(1, 7, 3, 16), rotation)


@pytest.mark.parametrize(
    ("x", "positions"),
    [((2, 7, 16), (2, 7, 1)), ((1, 3, 7, 16), (2, 7, 1)), ((3, 7, 16), (2, 7, 1))],
)
def test_heads_are_not_grown_to_the_batch_of_the_rotation(unchecked, x, positions):
    with pytest.raises(ValueError, match=r"x has shape .*, the rotation is for"):
        mmpos.rotate(torch.randn(x), RotaryEncoding(16)(torch.zeros(positions)))


def test_what_cannot_be_turned(unchecked):
    rotation = RotaryEncoding(4)(sequence(2))
    with pytest.raises(TypeError, match=r"must be floating to be turned, got torch.int64"):
        mmpos.rotate(torch.ones(1, 1, 2, 4, dtype=torch.long), rotation)
    with pytest.raises(ValueError, match=r"layout must be one of .* got 'interleavd'"):
        mmpos.rotate(torch.ones(1, 1, 2, 4), rotation._replace(layout="interleavd"))


@pytest.mark.parametrize("start", [4096, 100_000, 10**6, 2**24, 1_700_000_000])
def test_angles_are_exact_far_out(start):
    """To the rounding of a float32 cosine, for every pair: seconds since 1970 are positions too."""
    cos, sin = RotaryEncoding(16)(sequence(5, start=start))[:2]
    for row, position in enumerate(range(start, start + 5)):
        for pair in range(8):
            angle = math.fmod(position * 10000 ** (-pair / 8), 2 * math.pi)
            bound = 1e-7 + 3e-16 * position
            assert abs(cos[0, row, pair].item() - math.cos(angle)) < bound
            assert abs(sin[0, row, pair].item() - math.sin(angle)) < bound


def test_another_extension_makes_it_what_a_new_one_would_be():
    longer = mmpos.frequencies.YaRN(factor=4, original_length=64)
    encoding = mmpos.RotaryEncoding(16, base=500)
    encoding.extend(longer)
    new = mmpos.RotaryEncoding(16, base=500, extension=longer)
    positions = mmpos.positions.sequence(300)
    assert torch.equal(encoding(positions).cos, new(positions).cos)
    assert encoding.spec() == new.spec()
    with pytest.raises(ValueError, match="short_factor has 1 numbers, the axis has 8 pairs"):
        encoding.extend(
            mmpos.frequencies.LongRoPE(
                short_factor=[1], long_factor=[2], original_length=64, factor=2
            )
        )
    assert encoding.extension == longer
    encoding.extend(None)
    assert torch.equal(encoding(positions).sin, mmpos.RotaryEncoding(16, base=500)(positions).sin)
    video = mmpos.RotaryEncoding(24, axes=3)
    video.extend([longer, None, None])
    assert video.extension == (longer, None, None)
