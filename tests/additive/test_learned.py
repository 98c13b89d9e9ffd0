import math

import pytest
import torch

from mmpos import LearnedEncoding
from mmpos.positions import absent, grid, join, sequence

GRIDS = [(700,), (3, 300), (2, 3, 4), (1, 1)]


@pytest.mark.parametrize("sizes", GRIDS)
@pytest.mark.parametrize("floating", [False, True])
def test_on_its_own_grid_it_is_its_table_bit_for_bit(sizes, floating):
    encoding = LearnedEncoding(6, sizes)
    positions = grid(*sizes).float() if floating else grid(*sizes)
    out = encoding(positions, extent=sizes)
    assert torch.equal(out, encoding.table.reshape(-1, 6))
    order = torch.randperm(len(positions))
    assert torch.equal(encoding(positions[order]), out[order])
    assert encoding.grid == sizes


def test_rows_are_found_by_row_and_column():
    encoding = LearnedEncoding(2, (3, 300))
    with torch.no_grad():
        encoding.table[..., 0] = torch.arange(3.0)[:, None]
        encoding.table[..., 1] = torch.arange(300.0)
    positions = torch.tensor([[2, 257], [0, 299], [1, 0]])
    assert torch.equal(encoding(positions), positions.float())


def test_prefix_rows_go_to_tokens_without_a_place_in_order():
    encoding = LearnedEncoding(6, (2, 3), prefix_rows=2)
    prefix = encoding.prefix
    assert prefix is not None
    for count in range(5):
        out = encoding(join(absent(count, 2), grid(2, 3)))
        assert torch.equal(out[:count][:2], prefix[:count])
        assert not out[2:count].any()
        assert torch.equal(out[count:], encoding.table.reshape(6, 6))
    between = encoding(join(grid(1, 2), absent(1, 2), grid(1, 2), absent(1, 2)))
    assert torch.equal(between[[2, 5]], prefix)
    assert torch.equal(between[:2], between[3:5])


def test_each_sample_counts_its_own_prefix_tokens():
    encoding = LearnedEncoding(6, (4,), prefix_rows=1)
    positions = torch.tensor([[math.nan, 2.0, 1.0], [3.0, 0.0, math.nan]]).unsqueeze(-1)
    out = encoding(positions)
    assert encoding.prefix is not None
    assert torch.equal(out[0, 0], encoding.prefix[0])
    assert torch.equal(out[1, 2], encoding.prefix[0])
    assert torch.equal(out[0, 1], encoding.table[2])


def test_gradients_reach_the_rows_that_were_read():
    encoding = LearnedEncoding(6, (2, 3), prefix_rows=2)
    encoding(join(absent(1, 2), torch.tensor([[1, 2], [1, 2], [0, 1]]))).sum().backward()
    expected = torch.zeros(2, 3)
    expected[1, 2], expected[0, 1] = 2, 1
    assert encoding.table.grad is not None
    assert torch.equal(encoding.table.grad, expected.unsqueeze(-1).expand(2, 3, 6))
    assert encoding.prefix is not None
    assert encoding.prefix.grad is not None
    assert encoding.prefix.grad.tolist() == [[1.0] * 6, [0.0] * 6]


def test_initial_rows():
    table = LearnedEncoding(64, (20, 30), prefix_rows=1, std=0.5)
    assert table.table.std().item() == pytest.approx(0.44, abs=0.02)  # cut at two deviations
    assert table.table.abs().max() <= 1.0
    assert table.prefix is not None
    assert 0 < table.prefix.abs().max() <= 1.0


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ([2, 0], r"position \(2, 0\) is no cell of the table.*2 × 3"),
        ([0, 3], r"position \(0, 3\) is no cell of the table.*2 × 3"),
        ([0, -1], r"position \(0, -1\) is no cell"),
        ([-1.0, 0.0], r"position \(-1.0, 0.0\) is no cell"),
        ([0.5, 1.0], r"\(0.5, 1.0\) is no cell.*each whole position"),
        ([math.nan, 1.0], r"\(nan, 1.0\) lacks an axis.*given on all axes"),
        ([math.inf, 1.0], r"\(inf, 1.0\) is no cell"),
    ],
)
def test_positions_that_are_no_cells(position, message):
    with pytest.raises(ValueError, match=message):
        LearnedEncoding(4, (2, 3))(torch.tensor([[0, 0], position]))


@pytest.mark.parametrize(
    "position", [[2, 0], [0, 3], [0, -1], [0.5, 1.0], [math.nan, 1.0], [math.inf, 1.0]]
)
def test_where_nothing_can_be_raised_such_a_position_has_a_row_of_nan(position, monkeypatch):
    """As in a compiled graph, or away from the CPU."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    table = LearnedEncoding(4, (2, 3))
    rows = table(torch.tensor([[1.0, 2.0], position, [math.nan, math.nan]]))
    assert rows[1].isnan().all()
    assert torch.equal(rows[0], table.table[1, 2]) and rows[2].eq(0).all()


@pytest.mark.parametrize("extent", [(3, 2), (4, 4), (2, 4), (1, 6), (6,), (2, 3, 1)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_another_grid_is_refused_even_if_it_has_as_many_cells(extent, as_tensor):
    given = torch.tensor(extent) if as_tensor else extent
    name = " × ".join(str(size) for size in extent)
    with pytest.raises(ValueError, match=f"grid of 2 × 3, the input has {name}: resize the table"):
        LearnedEncoding(4, (2, 3))(torch.tensor([[0, 0]]), extent=given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axes": 2}, TypeError, r"needs its grid.*\(14, 14\) or \(2,\), got 2"),
        ({"axes": ()}, ValueError, "a grid of such sizes"),
        ({"axes": (4, 0)}, ValueError, r"a grid of such sizes, got \(4, 0\)"),
        ({"axes": (4,), "prefix_rows": -1}, ValueError, "prefix_rows must be 0 or more, got -1"),
        ({"axes": (4,), "dim": 0}, ValueError, "dim must be a whole number of 1 or more, got 0"),
    ],
)
def test_bad_arguments(unchecked, arguments, error, message):
    with pytest.raises(error, match=message):
        LearnedEncoding(**{"dim": 4, **arguments})


def test_positions_of_another_number_of_axes():
    with pytest.raises(ValueError, match=r"\(5, 1\), expected \[..., length, 2\]"):
        LearnedEncoding(4, (2, 3))(sequence(5))
