import math

import pytest
import torch

import mmpos
from mmpos.bias import ClippedRelativeBias
from mmpos.positions import absent, grid, join, sequence


@pytest.mark.parametrize(
    ("sizes", "distance"), [((300,), (16,)), ((9, 40), (3, 30)), ((3, 5, 7), (4, 1, 2))]
)
def test_a_number_for_each_combination_of_clipped_offsets(sizes, distance):
    bias = ClippedRelativeBias(2, len(sizes), distance=distance)
    assert bias.table.shape == (*(2 * reach + 1 for reach in distance), 2)
    queries, keys = grid(*sizes)[-30:], grid(*sizes)[::7][:37]

    def row(q: list[int], k: list[int]) -> tuple[int, ...]:
        steps = zip(q, k, distance, strict=True)
        return tuple(max(-reach, min(reach, b - a)) + reach for a, b, reach in steps)

    for head in range(2):
        expected = [
            [bias.table[(*row(q, k), head)].item() for k in keys.tolist()] for q in queries.tolist()
        ]
        assert bias(queries, keys)[head].tolist() == expected


def test_the_table_counts_from_the_key_furthest_before():
    bias = ClippedRelativeBias(1, distance=2)
    with torch.no_grad():
        bias.table[:, 0] = torch.arange(5.0)
    assert bias(sequence(4), sequence(4))[0].tolist() == [
        [2, 3, 4, 4],
        [1, 2, 3, 4],
        [0, 1, 2, 3],
        [0, 0, 1, 2],
    ]


def test_gradients_count_the_pairs():
    bias = ClippedRelativeBias(3, distance=2)
    bias(sequence(5), sequence(6)).sum().backward()
    assert bias.table.grad is not None
    assert bias.table.grad[:, 0].tolist() == [6, 4, 5, 5, 10]


def test_tokens_without_a_place_and_axes_that_one_lacks():
    bias = ClippedRelativeBias(2, 2, distance=(3, 4))
    places = torch.tensor([[1.0, 2.0], [math.nan, 5.0], [2.0, math.nan]])
    out = bias(join(absent(1, 2), places), places)
    assert not out[:, 0].any()
    assert torch.equal(out[:, 2, 0], bias.table[3, 4 - 3])  # the first axis counts as no offset
    assert torch.equal(out[:, 3, 0], bias.table[3 - 1, 4])
    assert not out[:, 2, 2].any(), "no axis is shared"


@pytest.mark.parametrize("shape", [(2, 5), (1, 6)])
def test_fractions_are_refused(unchecked, shape):
    bias = ClippedRelativeBias(2, 2, distance=shape)
    places = grid(2, 3) + 0.25
    assert torch.equal(bias(places, places), bias(grid(2, 3), grid(2, 3)))
    places[2, 1] += 0.5
    message = r"a query and a key are \(0.0, -2.5\) apart, .* differences of whole positions only"
    with pytest.raises(ValueError, match=message):
        bias(places, places)
    with pytest.raises(ValueError, match=message):
        bias.score_mod(places, places)


def test_fractions_give_nan_where_looking_is_not_free(monkeypatch):
    bias = ClippedRelativeBias(2, distance=3)
    places = torch.tensor([[0.0], [1.5], [2.0], [math.nan]])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    lost = [[False, True, False, False]] * 4
    lost[1], lost[3] = [True, False, True, False], [False] * 4
    assert bias(places, places)[1].isnan().tolist() == lost
    bias(places[[0, 2, 3]], places[[0, 2, 3]]).sum().backward()
    assert bias.table.grad is not None and bias.table.grad.isfinite().all()
    for pair in ([[0.0, 0.5], [0.0, 0.0]], [[0.5, 0.0], [0.0, 0.0]]):
        both = ClippedRelativeBias(2, 2)(torch.tensor(pair), torch.tensor(pair))
        assert both[0].isnan().tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distance": 0}, "distance must be 1 or more, one for all or for each of 1 axes, got 0"),
        ({"distance": -3}, "distance must be 1 or more.*got -3"),
        ({"distance": (3, -1), "axes": 2}, r"distance must be 1 or more.*got \(3, -1\)"),
        ({"distance": (3, 4)}, r"for each of 1 axes, got \(3, 4\)"),
        ({"heads": 0}, "heads must be a whole number of 1 or more, got 0"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        ClippedRelativeBias(**{"heads": 3, **arguments})


def test_it_is_rebuilt_from_its_spec():
    bias = ClippedRelativeBias(3, (4, 6), distance=[3, 5], std=0.1)
    assert repr(mmpos.build(bias.spec())) == repr(bias)


def test_rows_of_a_batch_may_differ_by_a_fraction():
    bias = ClippedRelativeBias(3, 2, distance=3)
    rows = torch.stack((grid(2, 3) + 0.5, grid(2, 3)))
    assert torch.equal(bias(rows, rows), bias(grid(2, 3), grid(2, 3)).expand(2, -1, -1, -1))
