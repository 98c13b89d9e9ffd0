"""Where tubelets are in seconds, whatever the frame rate."""

from fractions import Fraction
from itertools import product

import pytest
import torch

import mmpos
from mmpos.coordinates import Index
from mmpos.models import TubeletEmbedding

SIZE = (4, 6)


def cut(tubelet: int) -> TubeletEmbedding:
    return TubeletEmbedding(8, (tubelet, 2, 2), 2).double()


def clip(frames: int) -> torch.Tensor:
    return torch.randn(1, 2, frames, *SIZE, dtype=torch.float64)


RATES = (0.5, 1, 2, 30)


@pytest.mark.parametrize("tubelet", [1, 2, 3])
@pytest.mark.parametrize("ticks", [1, 7, 1000])
def test_the_same_second_has_the_same_time_at_every_rate(tubelet: int, ticks: int) -> None:
    made, every = cut(tubelet), 2 * tubelet  # seconds from a moment that all share to the next
    moments = []
    for rate in RATES:
        x = torch.zeros(1, 2, int(8 * every * rate), *SIZE, dtype=torch.float64)
        tokens = made(x, step=ticks / rate)
        times = tokens.positions.unflatten(0, made.grid(*x.shape[2:]))
        assert torch.equal(times[..., 1:], made(x).positions.view(times.shape)[..., 1:].double())
        seconds = times[:, 0, 0, 0]
        exact = [float(Fraction(i * tubelet * ticks) / Fraction(rate)) for i in range(len(times))]
        wanted = torch.tensor(exact, dtype=torch.float64)
        torch.testing.assert_close(seconds, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(times[..., 0], seconds[:, None, None].expand(-1, 2, 3))
        assert tokens.extent.tolist() == [8 * every * ticks, 2, 3]
        moments.append(times[:: int(every * rate / tubelet)].flatten(0, 2))
    for same in moments[1:]:
        torch.testing.assert_close(same, moments[0], rtol=0, atol=1e-9)


def scores(positions: torch.Tensor) -> torch.Tensor:
    """``q · k`` of moments, each with a query and a key of its own, turned by where they are."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, len(positions), 24, generator=draw)
    rotation = mmpos.RotaryEncoding(24, 3, base=100)(positions)
    return mmpos.rotate(q, rotation) @ mmpos.rotate(k, rotation).mT


@pytest.mark.parametrize("tubelet", [1, 2, 3])
def test_scores_in_seconds_do_not_depend_on_the_rate(tubelet: int) -> None:
    found, counted = [], []
    for rate, whole in product(RATES, (False, True)):
        x = torch.zeros(1, 2, int(12 * tubelet * rate), *SIZE, dtype=torch.float64)
        tokens = cut(tubelet)(x, step=None if whole else 4 / rate)
        common = tokens.positions.view(-1, 6, 3)[:: int(2 * rate)].flatten(0, 1)
        (counted if whole else found).append(scores(common))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-5)
    assert all((other - counted[0]).abs().max() > 1 for other in counted[1:])


def test_a_table_is_read_at_its_seconds() -> None:
    made, x = cut(1), clip(8)
    table = mmpos.LearnedEncoding(8, (16, 2, 3)).double()
    tokens = made(x, step=8 / 4)  # 8 ticks a second, 4 frames
    found = table(tokens.positions, tokens.extent)
    assert torch.equal(found, table.table[::2].flatten(0, -2).float())
    fine = made(clip(32), step=8 / 16)
    with pytest.raises(ValueError, match=r"^position \(0.5, .* whole position .*$") as caught:
        table(fine.positions, fine.extent)
    assert "\n" not in str(caught.value)
    between = mmpos.LearnedEncoding(8, (16, 2, 3), coordinates=Index()).double()
    own = between.table
    middle = between(fine.positions, fine.extent).view(32, 6, 8)
    torch.testing.assert_close(middle[::2].double(), own.flatten(1, 2), rtol=0, atol=1e-6)
    halves = ((own[:-1] + own[1:]) / 2).flatten(1, 2)
    torch.testing.assert_close(middle[1:-1:2].double(), halves, rtol=0, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"made for a grid of 16 × 2 × 3, the input has 14 × 2 × 3"
    ):
        table(made(clip(7), step=2).positions, made(clip(7), step=2).extent)
    with pytest.raises(ValueError, match=r"the input has 15\.5 × 2 × 3: resize the table"):
        table(made(clip(31), step=0.5).positions, made(clip(31), step=0.5).extent)


@pytest.mark.parametrize("rate", range(1, 61))
def test_whole_ticks_are_whole_at_every_rate(rate: int) -> None:
    """``49 · (1 / 49)`` is below 1 in floating point, which no table has a row for."""
    table = mmpos.LearnedEncoding(8, (120, 2, 3)).double()
    tokens = cut(1)(torch.zeros(1, 2, 120, *SIZE).double(), step=1 / rate * rate)
    assert torch.equal(table(tokens.positions, tokens.extent), table.table.flatten(0, 2).float())
