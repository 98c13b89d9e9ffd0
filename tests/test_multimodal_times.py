"""Frames that are not evenly apart in time."""

import pytest
import torch

from mmpos.positions import Audio, Counting, Interleaved, Text, Video, of_parts

TIMES = [0.0, 0.29, 0.5, 2.0, 7.25]


@pytest.mark.parametrize("ticks", [1.0, 2.0, 25.0, 100.0])
def test_times_are_the_whole_ticks_before_them(ticks):
    video = Video(5, 2, 4, seconds=TIMES)
    with pytest.warns(UserWarning, match="at the same time") if ticks <= 2 else nothing():
        places = of_parts([Text(3), video], Counting(merge=2, ticks=ticks)).positions
    expected = [3 + int(round(t * ticks, 6)) for t in TIMES for _ in range(2)]
    assert places[3:, 0].tolist() == expected
    assert places[3:, 2].tolist() == [3, 4] * 5


def nothing():
    import contextlib

    return contextlib.nullcontext()


def test_even_times_are_those_of_a_rate():
    even = [frame / 4 for frame in range(8)]
    counting = Counting(ticks=8)
    one = of_parts([Video(8, 2, 2, seconds=even), Text(2)], counting)
    other = of_parts([Video(8, 2, 2, rate=4), Text(2)], counting)
    assert torch.equal(one.positions, other.positions)


def test_fractions_are_kept_where_they_are_asked_for():
    places = of_parts([Video(5, 1, 1, seconds=TIMES)], Counting(ticks=2, rounding=None)).positions
    assert places[:, 0].tolist() == [2 * time for time in TIMES]


def test_uneven_frames_take_turns_with_sound():
    both = Interleaved(Video(3, 1, 1, seconds=[0.0, 1.5, 2.5]), Audio(4, rate=1), chunk=2.0)
    assert both.kinds(Counting(ticks=10)).int().tolist() == [0, 0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([0.0, 1.0], "a time for each of 3 frames, got 2"),
        ([0.0, 2.0, 1.0], "do not go back"),
        ([-1.0, 0.0, 1.0], "0 or more"),
        ([0.0, 1.0, float("inf")], "do not go back"),
    ],
)
def test_times_that_are_none(times, message):
    with pytest.raises(ValueError, match=message):
        Video(3, 2, 2, seconds=times)
