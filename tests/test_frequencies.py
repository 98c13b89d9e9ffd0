import math

import pytest
import torch

from mmpos.frequencies import angles, geometric, split_pairs


@pytest.mark.parametrize(("pairs", "base"), [(1, 10000.0), (16, 10000.0), (8, 100.0), (5, 0.5)])
def test_geometric_spectrum(pairs, base):
    expected = [math.exp(-math.log(base) * 2 * pair / (2 * pairs)) for pair in range(pairs)]
    assert geometric(pairs, base) == pytest.approx(expected, rel=1e-14)
    assert geometric(pairs, base)[0] == 1.0


def test_second_frequency_of_a_width_of_32():
    assert geometric(16)[1] == pytest.approx(0.56234, abs=5e-6)


@pytest.mark.parametrize(
    ("pairs", "axes", "expected"),
    [
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (32, 3, (12, 10, 10)),
        (48, 3, (16, 16, 16)),
        (64, 3, (22, 21, 21)),
        (5, 3, (3, 1, 1)),
        (3, 3, (1, 1, 1)),
    ],
)
def test_what_is_left_over_goes_to_the_first_axis(pairs, axes, expected):
    assert split_pairs(pairs, axes) == expected


@pytest.mark.parametrize("base", [0, -100.0])
def test_bases_that_give_no_spectrum(base):
    with pytest.raises(ValueError, match=f"base must be above 0 and finite, got {base}"):
        geometric(4, base)


def test_fewer_pairs_than_axes():
    with pytest.raises(ValueError, match=r"2 pairs \(4 features\).*3 axes: use at least 6"):
        split_pairs(2, 3)


def test_angles_are_sums_over_axes_without_the_missing_ones():
    x = torch.tensor([[300.25, -7.5], [math.nan, 2.0], [math.nan, math.nan]], dtype=torch.float64)
    table = torch.rand(2, 5, dtype=torch.float64)
    expected = [
        [
            sum(0.0 if math.isnan(c) else c * f for c, f in zip(row, column, strict=True))
            for column in table.T.tolist()
        ]
        for row in x.tolist()
    ]
    torch.testing.assert_close(
        angles(x, table[None])[0], torch.tensor(expected, dtype=torch.float64)
    )


def test_angles_of_large_positions_stay_apart_under_autocast():
    positions = torch.arange(65536, 65600).float().unsqueeze(-1)
    with torch.autocast("cpu", torch.bfloat16):
        turned = angles(positions, torch.ones(1, 1, 1))
    assert turned.dtype == torch.float32
    assert len(turned.unique()) == 64


def test_missing_coordinates_leave_finite_gradients():
    table = torch.ones(1, 2, 3, requires_grad=True)
    angles(torch.tensor([[math.nan, 2.0]]), table).sum().backward()
    assert table.grad is not None
    assert table.grad.tolist() == [[[0.0] * 3, [2.0] * 3]]
