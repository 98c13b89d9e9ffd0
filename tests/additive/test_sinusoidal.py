import math

import pytest
import torch

import mmpos
from mmpos import SinusoidalEncoding
from mmpos.coordinates import Centered, OneBased, Scaled
from mmpos.positions import absent, grid, join, sequence


def formula(
    dim, positions, base=10000.0, layout="interleaved", endpoint=False, order=None, split=None
) -> torch.Tensor:
    """Attention Is All You Need, sec. 3.5, and its variants, number by number in plain Python."""
    axes = len(positions[0])
    if split is None:
        split = [dim // 2 // axes + (dim // 2 % axes if axis == 0 else 0) for axis in range(axes)]
    rows = []
    for position in positions:
        sines, cosines = {}, {}
        for axis, x in enumerate(position):
            for pair in range(split[axis]):
                steps = split[axis] - 1 if endpoint and split[axis] > 1 else split[axis]
                angle = x * math.exp(-math.log(base) * pair / steps)
                sines[axis, pair] = 0.0 if math.isnan(x) else math.sin(angle)
                cosines[axis, pair] = 0.0 if math.isnan(x) else math.cos(angle)
        places = [(axis, pair) for axis in order or range(axes) for pair in range(split[axis])]
        if layout == "interleaved":
            row = [wave[place] for place in places for wave in (sines, cosines)]
        elif layout == "half":
            row = [wave[place] for wave in (sines, cosines) for place in places]
        else:
            row = [
                wave[place]
                for axis in order or range(axes)
                for wave in (sines, cosines)
                for place in places
                if place[0] == axis
            ]
        rows.append((row + [0.0] * dim)[:dim])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("layout", ["interleaved", "half_per_axis", "half"])
@pytest.mark.parametrize("endpoint", [False, True])
@pytest.mark.parametrize(
    ("dim", "axes", "named"),
    [
        (2, 1, {}),
        (48, 1, {}),
        (48, 2, {"base": 100.0}),
        (46, 2, {"order": (1, 0)}),
        (64, 3, {}),
        (64, 3, {"split": (16, 8, 8), "order": (2, 0, 1)}),
        (64, 3, {"split": (10, 10, 10)}),
        (64, 3, {"split": (11, 11, 11), "order": (1, 2, 0), "base": 3.0}),
        (20, 3, {"split": (1, 4, 2), "base": 0.01}),
    ],
)
def test_formula(dim, axes, named, layout, endpoint):
    generator = torch.Generator().manual_seed(1)
    positions = torch.rand(20, axes, generator=generator, dtype=torch.float64) * 900 - 100
    positions[3, 0] = math.nan
    positions[7, -1] = math.nan
    positions[8] = math.nan
    encoding = SinusoidalEncoding(dim, axes, layout=layout, endpoint=endpoint, **named)
    expected = formula(dim, positions.tolist(), layout=layout, endpoint=endpoint, **named)
    torch.testing.assert_close(encoding(positions).double(), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(encoding(positions).double(), expected, rtol=0, atol=1e-7)
    single = positions.float()
    expected = formula(dim, single.tolist(), layout=layout, endpoint=endpoint, **named)
    torch.testing.assert_close(encoding(single).double(), expected, rtol=0, atol=1e-7)


def test_golden_values():
    out = SinusoidalEncoding(4)(torch.tensor([[1], [3]])).tolist()
    assert out[0] == pytest.approx(
        [0.8414709848078965, 0.5403023058681398, 0.009999833334166664, 0.9999500004166653], abs=1e-7
    )
    assert out[1] == pytest.approx(
        [0.1411200080598672, -0.9899924966004454, 0.02999550020249566, 0.9995500337489875], abs=1e-7
    )


@pytest.mark.parametrize(("endpoint", "last"), [(True, 1.0000e-4), (False, 1.0366e-4)])
def test_the_last_frequency_of_a_width_of_512(endpoint, last):
    out = SinusoidalEncoding(512, layout="half", endpoint=endpoint)(torch.tensor([[1]]))
    assert math.asin(out[0, 255].item()) == pytest.approx(last, rel=5e-5)
    assert math.asin(out[0, 0].item()) == pytest.approx(1.0)


def test_an_endpoint_needs_two_pairs():
    assert torch.equal(
        SinusoidalEncoding(2, endpoint=True)(sequence(5)), SinusoidalEncoding(2)(sequence(5))
    )


def test_layouts_and_orders_are_permutations():
    positions = grid(2, 3, 300)
    plain = SinusoidalEncoding(60, 3)(positions)
    waves = plain.reshape(-1, 3, 10, 2)  # token, axis, pair, wave
    per_axis = SinusoidalEncoding(60, 3, layout="half_per_axis", order=(2, 0, 1))(positions)
    assert torch.equal(per_axis, waves[:, [2, 0, 1]].transpose(2, 3).flatten(1))
    half = SinusoidalEncoding(60, 3, layout="half", order=(1, 2, 0))(positions)
    assert torch.equal(half, waves[:, [1, 2, 0]].permute(0, 3, 1, 2).flatten(1))


def test_several_axes_are_the_encodings_of_one_side_by_side():
    positions = grid(2, 3, 5)
    for split, named in [((12, 10, 10), {}), ((16, 8, 8), {"split": (16, 8, 8)})]:
        whole = SinusoidalEncoding(64, 3, **named)(positions)
        parts = [
            SinusoidalEncoding(2 * pairs)(positions[:, axis : axis + 1])
            for axis, pairs in enumerate(split)
        ]
        assert torch.equal(whole, torch.cat(parts, -1))


def test_a_token_without_a_coordinate_keeps_those_it_has():
    for layout in ("interleaved", "half_per_axis"):
        encoding = SinusoidalEncoding(64, 3, layout=layout)
        video = encoding(torch.tensor([[4.0, math.nan, math.nan], [4.0, 1.0, 2.0]]))
        assert torch.equal(video[0, :24], video[1, :24])
        assert not video[0, 24:].any()
        assert not encoding(absent(2, 3)).any()
    half = SinusoidalEncoding(64, 3, layout="half")(torch.tensor([[4.0, math.nan, 2.0]]))
    assert half[0, :12].all() and half[0, 22:44].all() and half[0, 54:].all()
    assert not half[0, 12:22].any() and not half[0, 44:54].any()


def test_missing_coordinates_leave_finite_gradients():
    positions = torch.tensor([[math.nan, 2.0], [1.5, math.nan]], requires_grad=True)
    SinusoidalEncoding(8, 2)(positions).sum().backward()
    assert positions.grad is not None
    assert positions.grad[[0, 1], [1, 0]].all()
    assert not positions.grad[[0, 1], [0, 1]].any()


def test_readings():
    positions = join(absent(1, 2), grid(4, 6))
    reading = Scaled((2, 3))
    scaled = SinusoidalEncoding(48, 2, coordinates=reading)(positions, extent=(4, 6))
    torch.testing.assert_close(scaled, SinusoidalEncoding(48, 2)(positions / 2))
    one_based = SinusoidalEncoding(48, 2, coordinates=OneBased(), order=(1, 0))(positions)
    assert torch.equal(one_based, SinusoidalEncoding(48, 2, order=(1, 0))(positions + 1))
    centred = SinusoidalEncoding(48, (4, 6), coordinates=Centered())(positions, extent=(4, 6))
    middle = centred[1:].reshape(4, 6, 48)
    torch.testing.assert_close(middle[..., 1::2], middle.flip(0, 1)[..., 1::2])
    torch.testing.assert_close(middle[..., ::2], -middle.flip(0, 1)[..., ::2])


def test_it_is_rebuilt_from_its_spec():
    encoding = SinusoidalEncoding(
        64, 3, layout="half", endpoint=True, order=[2, 1, 0], split=[10, 9, 8], base=50
    )
    twin = mmpos.build(encoding.spec())
    assert repr(twin) == repr(encoding)
    assert torch.equal(twin(grid(2, 3, 4)), encoding(grid(2, 3, 4)))
    plain = SinusoidalEncoding(8).spec()
    assert plain["init_args"] == {"dim": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 5}, "dim must be even.*got 5"),
        ({"dim": 0}, "dim must be a whole number of 1 or more, got 0"),
        ({"dim": 4, "axes": 3}, r"2 pairs \(4 features\).*3 axes"),
        ({"dim": 4, "axes": 0}, "axes must be a whole number of 1 or more.*got 0"),
        ({"dim": 4, "base": -1.0}, "base must be above 0 and finite, got -1.0"),
        ({"dim": 4, "base": math.inf}, "base must be above 0 and finite, got inf"),
        ({"dim": 4, "layout": "halves"}, "layout must be one of.*'half'.*got 'halves'"),
        ({"dim": 8, "axes": 2, "order": (0, 0)}, r"order=\(0, 0\) must name each of the 2 axes"),
        ({"dim": 8, "axes": 2, "order": (1, 2)}, r"order=\(1, 2\) must name.*from 0 to 1"),
        ({"dim": 8, "axes": 2, "order": (1,)}, r"order=\(1,\) must name each of the 2 axes once"),
        ({"dim": 8, "axes": 2, "split": (4,)}, r"split=\(4,\) must give.*2 axes.*4 in all"),
        ({"dim": 8, "axes": 2, "split": ()}, r"split=\(\) must give each of the 2 axes"),
        ({"dim": 8, "axes": 2, "split": (4, 0)}, r"split=\(4, 0\) must give.*1 pair or more"),
        ({"dim": 8, "axes": 2, "split": (4, 1)}, r"split=\(4, 1\) takes 10.*an axis none: use 4"),
        (
            {"dim": 8, "axes": 2, "split": (3, 5), "layout": "half"},
            r"split=\(3, 5\) takes 16 features.*dim=8 leaves no cosines: use 4 pairs in all",
        ),
        (
            {"dim": 8, "axes": 2, "split": (1, 4), "order": (1, 0)},
            r"split=\(1, 4\) takes 10 features.*leaves an axis none",
        ),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        SinusoidalEncoding(**arguments)


def test_it_is_not_read_at_half_precision():
    with pytest.raises(TypeError, match=r"float16.*not exact"):
        mmpos.SinusoidalEncoding(8)(sequence(3).half())
