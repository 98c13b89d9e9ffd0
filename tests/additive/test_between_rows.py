"""Tables read between their rows."""

import functools
import itertools
import math

import pytest
import torch
from torch.nn.functional import interpolate

import mmpos
from mmpos.additive import FactorizedEncoding, LearnedEncoding
from mmpos.coordinates import Centered, Coordinates, Index, OneBased, Scaled
from mmpos.positions import absent, grid, join

GRIDS = {1: (300,), 2: (5, 290), 3: (2, 3, 270)}


def multilinear(table, place):
    """The mean of the rows around one place in plain Python, rows beyond the border repeated."""
    total = [0.0] * table.shape[-1]
    for corner in itertools.product((0, 1), repeat=len(place)):
        share, row = 1.0, table
        for x, end, size in zip(place, corner, table.shape[:-1], strict=True):
            x = min(max(x, 0.0), size - 1.0)
            low = math.floor(x)
            share *= x - low if end else 1 - (x - low)
            row = row[min(low + end, size - 1)]
        total = [t + share * r for t, r in zip(total, row.tolist(), strict=True)]
    return total


def torchs(table, sizes):
    """`interpolate` of a table, its cells in row-major order."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(sizes)]
    moved = table.movedim(-1, 0).unsqueeze(0)
    return interpolate(moved, sizes, mode=mode, align_corners=False)[0].flatten(1).T


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_formula(axes):
    encoding = LearnedEncoding(6, GRIDS[axes], std=1.0, coordinates=Index())
    last = torch.tensor(GRIDS[axes])
    positions = torch.rand(40, axes, dtype=torch.float64) * last - 0.5
    positions[0], positions[1] = -0.5, last - 0.5
    expected = torch.tensor([multilinear(encoding.table, row) for row in positions.tolist()])
    torch.testing.assert_close(encoding(positions), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoding(positions.float()), expected, rtol=0, atol=1e-4)
    assert encoding(positions).dtype == torch.float32


@pytest.mark.parametrize("sizes", [(7,), (12, 31), (3, 4, 5)])
@pytest.mark.parametrize("reading", [Scaled(offset=0.5), Scaled((9, 9, 9), offset=0.5), Centered()])
@pytest.mark.parametrize("scale", [(1, 1), (2, 1), (1, 3), (3, 2), (1, 12)])
def test_another_grid_is_read_as_torch_interpolates(sizes, reading, scale):
    if isinstance(reading, Scaled) and reading.reference:
        reading = Scaled(reading.reference[: len(sizes)], offset=0.5)
    up, down = scale
    encoding = LearnedEncoding(6, sizes, std=1.0, coordinates=reading)
    other = tuple(max(1, size * up // down + axis) for axis, size in enumerate(sizes))
    out = encoding(grid(*other), extent=other)
    torch.testing.assert_close(out, torchs(encoding.table, other), rtol=0, atol=1e-5)
    exact = torchs(encoding.table.double(), other)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6)
    tensor = torch.tensor(other)
    torch.testing.assert_close(encoding(grid(*other), extent=tensor), out, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(700,), (3, 300), (5, 7, 11), (1, 1), (49, 1)])
@pytest.mark.parametrize(
    "reading",
    [
        Index(),
        OneBased(),
        Scaled(),
        Scaled(offset=0.5),
        Scaled((14, 7, 3), offset=0.3),
        Centered(),
        Centered(jitter=2.0, shift=0.5),
    ],
)
@pytest.mark.parametrize("cls", [LearnedEncoding, FactorizedEncoding])
def test_on_its_own_grid_a_table_has_its_rows_bit_for_bit(sizes, reading, cls):
    if isinstance(reading, Scaled) and reading.reference:
        reading = Scaled(reading.reference[: len(sizes)], offset=reading.offset)
    encoding = cls(6, sizes, coordinates=reading).eval()
    plain = cls(6, sizes)
    with torch.no_grad():
        for table in encoding.parameters():
            table[..., ::2, 0] = 0.0  # beside large neighbours: the least of them would be seen
            table[..., 1::2, 0] = 1e6
    plain.load_state_dict(encoding.state_dict())
    for positions in (grid(*sizes), grid(*sizes).float()):
        assert torch.equal(encoding(positions, extent=sizes), plain(positions))


def test_a_ragged_batch_is_read_by_extents_of_its_own(unchecked):
    encoding = LearnedEncoding(6, (4, 5), coordinates=Scaled(offset=0.5), prefix_rows=1)
    assert encoding.prefix is not None
    sizes = [(2, 6), (3, 4), (12, 1)]
    positions = torch.stack([join(absent(1, 2), grid(*size)) for size in sizes])
    out = encoding(positions, extent=torch.tensor(sizes))
    for row, size in zip(out, sizes, strict=True):
        assert torch.equal(row[:1], encoding.prefix)
        torch.testing.assert_close(row[1:], torchs(encoding.table, size))


def test_a_crop_is_a_part_of_the_whole():
    encoding = LearnedEncoding(6, (4, 5), coordinates=Scaled(offset=0.5))
    whole = encoding(grid(8, 10), extent=(8, 10)).reshape(8, 10, 6)
    crop = encoding(grid(3, 4) + torch.tensor([5, 2]), extent=(8, 10))
    assert torch.equal(crop, whole[5:8, 2:6].flatten(0, 1))


def test_gradients_reach_the_rows_around_and_the_positions():
    encoding = LearnedEncoding(3, (2, 4), coordinates=Index(), prefix_rows=1)
    positions = torch.tensor([[0.25, 1.5], [math.nan, math.nan], [1.0, 2.0]], requires_grad=True)
    out = encoding(positions)
    out[0].sum().backward()
    expected = torch.zeros(2, 4)
    expected[0, 1:3], expected[1, 1:3] = 0.375, 0.125
    assert encoding.table.grad is not None
    assert torch.equal(encoding.table.grad, expected.unsqueeze(-1).expand(2, 4, 3))
    table = encoding.table.detach()
    across = (table[0, 2] - table[0, 1]) * 0.75 + (table[1, 2] - table[1, 1]) * 0.25
    down = (table[1, 1:3] - table[0, 1:3]).sum(0) * 0.5
    assert positions.grad is not None
    torch.testing.assert_close(positions.grad[0], torch.stack([down.sum(), across.sum()]))
    assert not positions.grad[1:].any()
    positions.grad = None
    encoding(positions)[2].sum().backward()
    assert positions.grad[2, 1] == pytest.approx((table[1, 3] - table[1, 2]).sum().item())


def test_prefix_rows_and_no_places_are_as_without_a_reading():
    encoding = LearnedEncoding(6, (2, 3), prefix_rows=1, coordinates=Index())
    out = encoding(join(absent(2, 2), grid(2, 3)))
    assert torch.equal(out[:1], encoding.prefix)
    assert not out[1].any()
    assert torch.equal(out[2:], encoding.table.flatten(0, 1))


@pytest.mark.parametrize("cls", [LearnedEncoding, FactorizedEncoding])
@pytest.mark.parametrize("position", [[-0.51, 0.0], [1.6, 0.0], [0.0, 2.75], [math.inf, 0.0]])
def test_positions_beyond_half_a_cell(cls, position, monkeypatch):
    encoding = cls(4, (2, 3), coordinates=Index())
    positions = torch.tensor([[0.0, 0.5], position, [math.nan, math.nan]])
    with pytest.raises(ValueError, match=r"position \(.*\) lies beyond the table: Index.*2 × 3"):
        encoding(positions)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out = encoding(positions)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()
    assert not out[2].any()


def test_a_table_is_not_read_without_a_coordinate():
    with pytest.raises(ValueError, match=r"\(nan, 1.0\) lacks an axis.*given on all axes"):
        LearnedEncoding(4, (2, 3), coordinates=Index())(torch.tensor([[math.nan, 1.0]]))


@pytest.mark.parametrize("reading", [Index(), OneBased(), None])
def test_a_reading_of_raw_positions_takes_no_other_grid(reading):
    encoding = LearnedEncoding(4, (2, 3), coordinates=reading)
    assert not encoding.any_grid
    with pytest.raises(ValueError, match=r"made for a grid of 2 × 3, the input has 4 × 6: resize"):
        encoding(grid(2, 3), extent=(4, 6))


def test_what_takes_any_grid():
    assert LearnedEncoding(4, (2, 3), dynamic=True).any_grid
    assert LearnedEncoding(4, (2, 3), coordinates=Centered()).any_grid
    assert FactorizedEncoding(4, (2, 3), coordinates=Scaled()).any_grid


@pytest.mark.parametrize("cls", [LearnedEncoding, FactorizedEncoding])
def test_disturbed_in_training_it_stays_on_the_table(cls):
    """The disturbed reading may leave the table; whether the token did is asked before that."""
    encoding = cls(4, (3, 5), coordinates=Index(shift=40.0), std=1.0)
    positions = grid(3, 5)
    plain = encoding.eval()(positions)
    encoding.train()
    draws = torch.stack([encoding(positions) for _ in range(20)])
    assert draws.isfinite().all()
    assert (draws - plain).abs().amax((1, 2)).min() > 0
    with pytest.raises(ValueError, match="lies beyond"):
        encoding(positions + 40)


def test_a_small_shift_in_training_is_the_same_for_all_tokens():
    encoding = LearnedEncoding(1, (50,), coordinates=Index(shift=0.4)).train()
    encoding.table.data = torch.arange(50.0).unsqueeze(-1)
    moved = encoding(grid(50))[5:-5, 0] - torch.arange(5.0, 45)
    assert 0 < moved.abs().max() <= 0.4
    torch.testing.assert_close(moved, moved[:1].expand(40), rtol=0, atol=1e-5)


def test_resized_or_loaded_it_is_read_on_its_new_grid():
    encoding = LearnedEncoding(6, (4, 5), coordinates=Scaled(offset=0.5))
    encoding.resize((8, 3))
    assert torch.equal(encoding(grid(8, 3), extent=(8, 3)), encoding.table.flatten(0, 1))
    other = LearnedEncoding(6, (2, 6), coordinates=Centered())
    other.load_state_dict(encoding.state_dict())
    assert torch.equal(other(grid(2, 6), extent=(2, 6)), other.table.flatten(0, 1))


def test_it_is_rebuilt_from_its_spec():
    for reading in (None, Index(), Index(shift=0.25), Scaled(offset=0.5), Centered()):
        for cls in (LearnedEncoding, FactorizedEncoding):
            encoding = cls(6, (4, 5), coordinates=reading)
            twin = mmpos.build(encoding.spec())
            assert repr(twin) == repr(encoding)
            assert type(twin.coordinates) is type(reading)
            assert twin.spec() == encoding.spec()


def test_bad_arguments(unchecked):
    with pytest.raises(ValueError, match=r"dynamic=True resizes.*coordinates read.*use one"):
        LearnedEncoding(4, (2, 3), dynamic=True, coordinates=Scaled())
    with pytest.raises(TypeError, match=r"must be an instance such as Index\(\)"):
        LearnedEncoding(4, (2, 3), coordinates=Scaled)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Scaled coordinates need the size of the grid"):
        LearnedEncoding(4, (2, 3), coordinates=Scaled())(grid(2, 3))
    with pytest.raises(ValueError, match=r"std must be above 0, got -1.0"):
        LearnedEncoding(4, (2, 3), std=-1.0)


def test_a_reading_of_ones_own_is_understood():
    class Metres(Coordinates):
        """Thirty centimetres a cell, from the far end."""

        def read(self, positions, axes, extent):
            return 100 - 0.3 * positions

    encoding = LearnedEncoding(6, (4, 5), std=1.0, coordinates=Metres())
    assert torch.equal(encoding(grid(4, 5)), encoding.table.flatten(0, 1))
    half = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    half(encoding(torch.tensor([[1.5, 2.0]]))[0], encoding.table[1:3, 2].mean(0))
