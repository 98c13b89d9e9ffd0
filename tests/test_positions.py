import math

import pytest
import torch

import mmpos
from mmpos import positions


def test_a_sequence_may_start_anywhere():
    assert positions.sequence(4).tolist() == [[0], [1], [2], [3]]
    assert positions.sequence(3, start=-1).tolist() == [[-1], [0], [1]]
    assert positions.sequence(0).shape == (0, 1)
    assert positions.sequence(2, start=2**40)[1].item() == 2**40 + 1


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 5), (1, 7), (0, 3), (2, 1, 1, 3)])
def test_a_grid_is_row_major(sizes):
    expected = [[]]
    for size in sizes:
        expected = [[*before, index] for before in expected for index in range(size)]
    grid = positions.grid(*sizes)
    assert grid.tolist() == (expected if math.prod(sizes) else [])
    assert grid.shape == (math.prod(sizes), len(sizes))
    assert grid.dtype == torch.int64


def test_rows_and_columns_of_a_rectangle():
    y, x = positions.grid(3, 4).T.tolist()
    assert y == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert x == [0, 1, 2, 3] * 3


def test_tokens_without_a_place_are_float32_whatever_the_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        none = positions.absent(2, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert none.shape == (2, 3)
    assert none.isnan().all()
    assert none.dtype == torch.float32


def test_join_keeps_integers_as_long_as_all_are():
    joined = positions.join(positions.sequence(2, start=2**53), positions.sequence(1))
    assert joined.dtype == torch.int64
    assert joined.flatten().tolist() == [2**53, 2**53 + 1, 0]


def test_join_takes_the_widest_floating_type():
    large = positions.sequence(2, start=2**24)
    assert positions.join(positions.absent(1, 1), large.float()).dtype == torch.float32
    wide = positions.join(positions.absent(1, 1), large)
    assert wide.dtype == torch.float64
    assert wide[1:].flatten().tolist() == [2**24, 2**24 + 1]


def test_join_broadcasts_batches():
    prefix, rows = positions.absent(1, 2), torch.arange(24).reshape(2, 6, 2)
    joined = positions.join(prefix, rows, positions.grid(1, 3))
    assert joined.shape == (2, 10, 2)
    assert joined[:, 0].isnan().all()
    assert torch.equal(joined[:, 1:7].long(), rows)
    assert torch.equal(joined[1, 7:].long(), positions.grid(1, 3))


@pytest.mark.parametrize("sizes", [(), (2, -1)])
def test_grids_that_are_none(sizes):
    with pytest.raises(
        ValueError,
        match=rf"size of 0 or more for each axis, got .*{sizes}".replace("(", r"\(").replace(
            ")", r"\)"
        ),
    ):
        positions.grid(*sizes)


def test_parts_that_cannot_be_joined(unchecked):
    with pytest.raises(ValueError, match=r"different numbers of axes: \[1, 2\]"):
        positions.join(positions.sequence(3), positions.grid(2, 2))
    with pytest.raises(TypeError, match=r"float16.*not exact.*float32"):
        positions.join(positions.sequence(3).half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_positions_that_are_not_exact(dtype):
    with pytest.raises(TypeError, match=f"positions are {dtype}, which is not exact: pass int32"):
        positions.check(torch.zeros(3, 1, dtype=dtype), 1)


@pytest.mark.parametrize("shape", [(3,), (), (3, 2), (5, 3, 3), (0, 2)])
def test_positions_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"have shape \(.*\), expected \[..., length, 1\].*1 axes"):
        positions.check(torch.zeros(shape), 1)


@pytest.mark.parametrize("axes", [0, -1, (), (4, 0), (-2,)])
def test_no_axes(axes):
    with pytest.raises(ValueError, match="number of 1 or more, or a grid of such sizes, got"):
        positions.axis_count(axes)


def test_axes_are_a_number_or_a_grid():
    assert positions.axis_count(2) == positions.axis_count((3, 5)) == 2
    assert positions.axis_count([7]) == 1
    assert positions.grid_of(2) is None
    assert positions.grid_of([3, 5]) == (3, 5)


def test_sizes_that_are_no_sizes(unchecked):
    with pytest.raises(TypeError, match=r"one argument for each axis, got \(\(4, 4\),\)"):
        mmpos.positions.grid((4, 4))
    with pytest.raises(ValueError, match="0 or more, got -1"):
        mmpos.positions.sequence(-1)
