"""Positions of padded, packed, chosen and timed tokens, against plain loops."""

import random

import pytest
import torch

from mmpos.positions import chosen, grid, packed, padded, seconds, sequence


def test_padding_on_either_side_and_within():
    torch.manual_seed(0)
    mask = torch.rand(40, 11) < 0.6
    mask[0], mask[1] = True, False
    positions = padded(mask)
    for row, real in zip(positions.squeeze(-1).tolist(), mask.tolist(), strict=True):
        count = 0
        for position, is_real in zip(row, real, strict=True):
            count += is_real
            assert position == max(count - 1, 0)


@pytest.mark.usefixtures("unchecked")
def test_masks_that_are_none():
    with pytest.raises(TypeError, match=r"got torch.int64: pass mask.bool\(\)"):
        padded(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \[batch, length\], got \(3,\)"):
        padded(torch.ones(3, dtype=torch.bool))


def test_packed_documents_count_from_0_each():
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.randint(1, 6) for _ in range(draw.randint(1, 7))]
        expected = [(place, doc) for doc, n in enumerate(lengths) for place in range(n)]
        ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        for got in (
            packed(lengths),
            packed(torch.tensor(lengths, dtype=torch.int32), tokens=sum(lengths)),
            packed(ends, cumulative=True),
        ):
            assert list(
                zip(got.positions.squeeze(-1).tolist(), got.segments.tolist(), strict=True)
            ) == (expected)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 0, 2], {}, r"one token or more, got lengths \[3, 0, 2\]"),
        ([], {}, "one token or more"),
        ([3, 4], {"tokens": 8}, "sum to 7, there are 8 tokens"),
        ([1, 3], {"cumulative": True}, r"begin with 0, got \[1\]"),
        ([0, 3, 3], {"cumulative": True}, r"one token or more, got lengths \[3, 0\]"),
        ([0, 5, 3], {"cumulative": True}, r"got lengths \[5, -2\]"),
        ([1.5], {}, "whole numbers, one for each document"),
        (torch.ones(2, 2, dtype=torch.int64), {}, "whole numbers, one for each document"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_lengths_that_are_none(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        packed(lengths, **options)


def test_rows_keep_the_positions_of_their_tokens():
    places = grid(3, 4)
    kept = torch.stack([torch.randperm(12)[:5] for _ in range(3)])
    out = chosen(places, kept)
    assert out.shape == (3, 5, 2)
    for row, index in zip(out, kept, strict=True):
        assert torch.equal(row, places[index])
    own = torch.rand(3, 12, 2)
    assert torch.equal(chosen(own, kept)[2], own[2, kept[2]])
    assert torch.equal(chosen(own, kept[0])[1], own[1, kept[0]])
    with pytest.raises(ValueError, match="12 tokens have indices 0 to 11, got 0 to 12"):
        chosen(places, torch.tensor([0, 12]))
    with pytest.raises(ValueError, match="got -1 to 3"):
        chosen(places, torch.tensor([-1, 3]))


def test_crops_lie_where_they_do_in_the_whole():
    whole = grid(7, 9).view(7, 9, 2)
    assert torch.equal(grid(3, 4, start=(2, 5)), whole[2:5, 5:9].reshape(-1, 2))
    assert torch.equal(grid(3, 4, start=(0, 1), step=(2, 2)), whole[0:6:2, 1:9:2].reshape(-1, 2))
    assert grid(2, 2, start=(-1, -3)).tolist() == [[-1, -3], [-1, -2], [0, -3], [0, -2]]
    fine = grid(2, 2, step=(0.5, 0.25))
    assert fine.dtype == torch.float64
    assert fine.tolist() == [[0, 0], [0, 0.25], [0.5, 0], [0.5, 0.25]]
    with pytest.raises(ValueError, match=r"each of 2 axes, got \(1,\) and \(1, 1\)"):
        grid(2, 2, start=(1,))


def test_each_row_begins_at_its_own_place():
    starts = torch.tensor([0, 300, 7])
    rows = sequence(4, start=starts)
    assert rows.shape == (3, 4, 1)
    for row, start in zip(rows, starts.tolist(), strict=True):
        assert torch.equal(row, sequence(4, start=start))


@pytest.mark.usefixtures("unchecked")
def test_starts_that_are_none():
    with pytest.raises(TypeError, match=r"one for each row, got torch.float32 of shape"):
        sequence(4, start=torch.tensor([0.5]))
    with pytest.raises(TypeError, match="one for each row"):
        sequence(4, start=torch.tensor(3))


def test_seconds_do_not_depend_on_the_rate_that_they_are_sampled_at():
    coarse = seconds(50, rate=16000 / 160, span=16)
    fine = seconds(100, rate=48000 / 240, span=16)
    torch.testing.assert_close(coarse, fine[::2], rtol=0, atol=1e-12)
    assert coarse.dtype == torch.float64
    far = seconds(10**6, rate=100.0)
    assert abs(far[-1].item() - 9999.99) < 1e-9
    assert seconds(2, rate=30, start=-0.5).squeeze(-1).tolist() == [-0.5, -0.5 + 1 / 30]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate must be above 0"),
        ({"rate": float("nan")}, "rate must be above 0 and finite"),
        ({"rate": 1.0, "span": 0}, "span of 1 or more"),
        ({"rate": 1.0, "start": float("inf")}, "finite start"),
    ],
)
def test_times_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        seconds(3, **options)
