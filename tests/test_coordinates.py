import math

import pytest
import torch

import mmpos
from mmpos.coordinates import Centered, Coordinates, Index, OneBased, Scaled
from mmpos.positions import absent, grid, join

READINGS = [Index(), OneBased(), Scaled((4, 6)), Centered()]


@pytest.mark.parametrize(
    ("reading", "rule"),
    [
        (Index(), lambda i, size: i),
        (OneBased(), lambda i, size: i + 1),
        (Scaled((14, 7)), lambda i, size: i * {3: 14, 300: 7}[size] / size),
        (Scaled((14, 7), offset=0.5), lambda i, size: (i + 0.5) * {3: 14, 300: 7}[size] / size),
        (Centered(), lambda i, size: 2 * (i + 0.5) / size - 1),
    ],
    ids=["index", "one-based", "scaled", "scaled centres", "centred"],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_readings_of_a_rectangle(reading, rule, as_tensor):
    extent = (3, 300)
    expected = [[rule(y, 3), rule(x, 300)] for y in range(3) for x in range(300)]
    given = torch.tensor(extent) if as_tensor else extent
    read = reading(grid(*extent), axes=2, extent=given)
    torch.testing.assert_close(read, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("reading", READINGS)
def test_fractional_negative_and_missing_positions(reading):
    positions = torch.tensor([[-1.5, 0.25], [300.75, math.nan], [math.nan, math.nan]])
    read = reading(positions, axes=2, extent=(4, 6))
    assert torch.equal(read.isnan(), positions.isnan())
    exact = reading(positions.double(), axes=2, extent=(4, 6))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(read.double(), exact, equal_nan=True)


def test_the_reference_grid_is_the_encodings_unless_another_is_given():
    positions = grid(2, 3)
    own = Scaled()(positions, axes=(8, 9), extent=(2, 3))
    assert own[-1].tolist() == [4.0, 6.0]
    assert torch.equal(
        Scaled((4, 6))(positions, axes=(8, 9), extent=(2, 3)), own / own.new_tensor([2, 1.5])
    )


def test_on_its_own_grid_a_scaled_position_is_the_index():
    positions = grid(7, 300)
    read = Scaled()(positions, axes=(7, 300), extent=(7, 300))
    assert torch.equal(read, positions.double())


@pytest.mark.parametrize(("side", "sizes"), [("longest", (300, 300)), ("shortest", (3, 3))])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_centred_coordinates_that_keep_the_proportions(side, sizes, as_tensor):
    extent = torch.tensor([[3, 300], [300, 3]]) if as_tensor else (3, 300)
    positions = grid(3, 300).expand(2, -1, -1)
    read = Centered(side=side)(positions, axes=2, extent=extent)
    expected = [
        [2 * (i + 0.5) / size - 1 for i, size in zip(place, sizes, strict=True)]
        for place in grid(3, 300).tolist()
    ]
    torch.testing.assert_close(
        read, torch.tensor(expected, dtype=torch.float64).expand_as(read), rtol=0, atol=1e-12
    )


def test_turns_multiply_what_was_disturbed(monkeypatch):
    positions = join(absent(1, 2), grid(3, 300))
    plain = Centered()(positions, axes=2, extent=(3, 300))
    turns = Centered(turns=True)(positions, axes=2, extent=(3, 300))
    torch.testing.assert_close(turns, 2 * math.pi * plain, rtol=1e-15, atol=0, equal_nan=True)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.fill_(high))
    moved = Centered(turns=True, shift=0.5)(positions, axes=2, extent=(3, 300), training=True)
    torch.testing.assert_close(moved, 2 * math.pi * (plain + 0.5), equal_nan=True)


def test_an_unknown_side(unchecked):
    with pytest.raises(ValueError, match=r"side must be one of .*'longest'.*got 'max'"):
        Centered(side="max")


def test_a_grid_of_its_own_for_each_sample():
    positions = torch.stack((grid(2, 3), grid(3, 2)))
    read = Centered()(positions, axes=2, extent=torch.tensor([[2, 3], [3, 2]]))
    for row, extent in zip(range(2), ((2, 3), (3, 2)), strict=True):
        assert torch.equal(read[row], Centered()(positions[row], axes=2, extent=extent))


def disturbed(positions, **strength) -> torch.Tensor:
    return Index(**strength)(positions, axes=2, training=True)


def test_disturbances_are_for_training_only_and_off_by_default():
    positions = grid(3, 5)
    reading = Index(shift=1, jitter=2, rescale=2)
    assert torch.equal(reading(positions, axes=2), positions.float())
    assert torch.equal(disturbed(positions), positions.float())


def test_a_shift_is_one_per_axis_and_common_to_all_tokens():
    positions = join(absent(1, 2), grid(3, 300))
    shifts = torch.stack([(disturbed(positions, shift=2) - positions)[1:] for _ in range(300)])
    torch.testing.assert_close(shifts, shifts[:, :1].expand_as(shifts), rtol=0, atol=1e-4)
    first = shifts[:, 0]
    assert first.abs().max() <= 2
    assert first.min() < -1.8
    assert first.max() > 1.8
    assert (first[:, 0] != first[:, 1]).all()
    assert disturbed(positions, shift=2)[0].isnan().all()


@pytest.mark.parametrize(("kind", "shared"), [("jitter", False), ("rescale", True)])
def test_factors_are_log_uniform(kind, shared):
    positions = grid(3, 300) + 1
    factors = torch.stack([(disturbed(positions, **{kind: 4.0}) / positions) for _ in range(400)])
    torch.testing.assert_close(factors, factors[:, :1].expand_as(factors), rtol=1e-5, atol=0)
    logs = factors[:, 0].log() / math.log(4)
    assert torch.equal(logs[:, 0], logs[:, 1]) is shared
    assert logs.abs().max() <= 1 + 1e-6
    assert logs.abs().max() > 0.97
    assert abs(logs.mean()) < 0.1
    assert abs((logs > 0.5).float().mean() - 0.25) < 0.08


def test_disturbances_are_drawn_in_single_precision_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        read = disturbed(torch.tensor([[0, 0]]), shift=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (read != read.bfloat16()).all() and torch.equal(read, read.float().double())


def test_disturbances_come_in_the_published_order(monkeypatch):
    """Shift, then jitter, then rescale (DINOv3)."""
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.fill_(high))
    read = disturbed(torch.ones(1, 2), shift=0.5, jitter=2.0, rescale=3.0)
    torch.testing.assert_close(read, torch.full((1, 2), (1 + 0.5) * 2 * 3).double())


@pytest.mark.parametrize("strength", [{"shift": -0.1}, {"jitter": 0.5}, {"rescale": 0.0}])
@pytest.mark.parametrize("reading", [Index, OneBased, Scaled, Centered])
def test_impossible_disturbances(reading, strength):
    ((name, value),) = strength.items()
    with pytest.raises(ValueError, match=f"shift >= 0, jitter >= 1.*{name}={value}"):
        reading(**strength)


@pytest.mark.parametrize("reading", [Scaled((4, 6)), Centered()])
def test_readings_that_need_the_grid(reading):
    name = type(reading).__name__
    with pytest.raises(ValueError, match=f"{name} coordinates need the size of the grid.*extent"):
        reading(grid(4, 6), axes=2)
    with pytest.raises(ValueError, match="extent has 3 axes, the positions have 2"):
        reading(grid(4, 6), axes=2, extent=(1, 4, 6))


def test_a_reference_grid_that_is_missing_or_does_not_fit():
    with pytest.raises(ValueError, match=r"no reference grid: pass Scaled.*grid instead"):
        Scaled()(grid(4, 6), axes=2, extent=(4, 6))
    with pytest.raises(ValueError, match=r"Scaled\(reference=\(4,\)\) has 1 axes.*has 2"):
        Scaled((4,))(grid(4, 6), axes=2, extent=(4, 6))


@pytest.mark.parametrize("reading", READINGS)
def test_positions_are_checked(reading):
    assert isinstance(reading, Coordinates)
    with pytest.raises(ValueError, match=r"\(24, 2\), expected \[..., length, 3\]"):
        reading(grid(4, 6), axes=3, extent=(4, 6))
    with pytest.raises(TypeError, match="bfloat16"):
        reading(grid(4, 6).bfloat16(), axes=2, extent=(4, 6))


@pytest.mark.parametrize("given", ["Scaled", Scaled, 3])
def test_what_is_no_reading(unchecked, given):
    for encoding in (mmpos.RotaryEncoding, mmpos.SinusoidalEncoding, mmpos.ALiBi):
        with pytest.raises(TypeError, match=r"an instance such as Index\(\) or Scaled\(\), got"):
            encoding(4, coordinates=given)


@pytest.mark.parametrize("extent", [(0, 4), (-1, 4)])
def test_an_extent_without_cells(extent):
    with pytest.raises(ValueError, match="extent must be 1 cell or more on each axis, got"):
        Centered()(grid(2, 2), axes=2, extent=extent)


@pytest.mark.parametrize("reference", [(0, 4), (-3, 4)])
def test_a_reference_without_cells(reference):
    with pytest.raises(ValueError, match="a grid of such sizes, got"):
        Scaled(reference)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("reference", [(None, 4, 6), (5, None, None), (None, None, None)])
def test_an_axis_without_a_reference_is_left_as_it_is(reference, as_tensor):
    extent = (8, 2, 3)
    given = torch.tensor(extent) if as_tensor else extent
    positions = join(absent(1, 3), grid(*extent, step=(0.3, 1, 1)))
    positions[5, 1] = torch.nan
    read = Scaled(reference, offset=0.25)(positions, axes=3, extent=given)
    for axis, (size, cells) in enumerate(zip(reference, extent, strict=True)):
        own = positions[:, axis]
        if size is None:
            torch.testing.assert_close(read[:, axis], own, rtol=0, atol=0, equal_nan=True)
        else:
            wanted = (own + 0.25) * size / cells
            torch.testing.assert_close(read[:, axis], wanted, equal_nan=True)


def test_time_in_seconds_beside_a_reference_grid():
    """The same second is read alike at every rate, of frames of every size."""
    found = []
    for rate, size in ((1, 2), (8, 4)):
        positions = grid(4 * rate, size, size, step=(1 / rate, 1, 1))
        extent = torch.tensor([4.0, size, size])
        read = Scaled((None, 4, 4))(positions, axes=(16, 4, 4), extent=extent)
        found.append(read.view(4 * rate, size, size, 3)[::rate, :: size // 2, :: size // 2])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_table_and_a_rotation_are_read_so():
    reading = Scaled((None, 4, 4), offset=0.5)
    table = mmpos.LearnedEncoding(8, (6, 4, 4), coordinates=reading)
    assert torch.equal(table(grid(6, 4, 4), (6, 4, 4)), table.table.flatten(0, 2))
    later = grid(3, 4, 4, start=(2, 0, 0))
    assert torch.equal(table(later, (3, 4, 4)), table.table[2:5].flatten(0, 2))
    rope = mmpos.RotaryEncoding(24, (6, 4, 4), coordinates=reading)
    again = mmpos.build(rope.spec())
    assert again.coordinates.reference == (None, 4, 4)
    fine = grid(6, 8, 8)
    assert torch.equal(again(fine, (6, 8, 8)).cos, rope(fine, (6, 8, 8)).cos)
    time = mmpos.RotaryEncoding(24, 3)(fine).cos[..., :4]
    torch.testing.assert_close(rope(fine, (6, 8, 8)).cos[..., :4], time)


def test_a_reference_of_other_axes_or_without_cells_beside_none():
    with pytest.raises(ValueError, match=r"Scaled\(reference=\(None, 4\)\) has 2 axes.*has 3"):
        Scaled((None, 4))(grid(2, 4, 4), axes=3, extent=(2, 4, 4))
    with pytest.raises(ValueError, match="a grid of such sizes, got"):
        Scaled((None, 0))
