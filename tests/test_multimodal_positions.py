"""Positions of text, images, videos and sound in one sequence, against plain loops."""

import random
from fractions import Fraction
from math import floor

import pytest
import torch

from mmpos import MRoPE
from mmpos.positions import (
    Audio,
    Counting,
    Image,
    Interleaved,
    Text,
    Video,
    blocks,
    of_parts,
    of_rows,
    of_types,
    sequence,
)

seeds = pytest.mark.parametrize("seed", range(8))


def loop(parts, counting: Counting, seconds: dict) -> tuple[list, int]:
    """Token by token, times as fractions; seconds per frame of each part by its identity."""
    tokens, start = [], 0

    def time(part, index) -> int:
        if counting.ticks is None:
            return index
        return floor(index * seconds[id(part)] * Fraction(counting.ticks))

    def lay(part, start, out) -> int:
        if isinstance(part, Text):
            out += [(0, (start + i,) * 3) for i in range(part.length)]
            return start + part.length
        if isinstance(part, Audio):
            out += [(3, (start + time(part, i),) * 3) for i in range(part.count)]
            return out[-1][1][0] + 1
        frames = getattr(part, "frames", 1)
        height, width = part.height // counting.merge, part.width // counting.merge
        for t in range(frames):
            for h in range(height):
                for w in range(width):
                    at = time(part, t) if frames > 1 else 0
                    out.append((2, (start + at, start + h, start + w)))
        if counting.follow == "extent":
            return start + max(height, width)
        return max(max(place) for _, place in out[-frames * height * width :]) + 1

    for part in parts:
        own: list = []
        if isinstance(part, Interleaved):
            seen, heard = [], []
            ends = lay(part.video, start, seen), lay(part.audio, start, heard)
            span, turn = (counting.ticks or 0) * part.chunk, 0
            while seen or heard:
                for queue in (seen, heard):
                    while queue and queue[0][1][0] - start < (turn + 1) * span:
                        own.append(queue.pop(0))
                turn += 1
            start = max(ends)
        elif getattr(part, "stamps", None) is not None:
            for stamp in part.stamps:
                start = lay(Text(stamp), start, own)
                start = lay(Image(part.height, part.width), start, own)
        else:
            start = lay(part, start, own)
        tokens += own
    return tokens, start


def drawn(draw: random.Random, counting: Counting) -> tuple[list, dict]:
    """Parts of all kinds in any order, and the exact seconds of those that have a rate."""
    parts, seconds = [], {}
    for _ in range(draw.randint(1, 7)):
        height, width = (counting.merge * draw.randint(1, 4) for _ in range(2))
        gap = Fraction(draw.randint(1, 12), draw.choice([2, 4, 8]))
        frames = draw.randint(1, 6)
        video = Video(frames, height, width, seconds=float(gap))
        audio = Audio(draw.randint(1, 30), rate=12.5)
        stamps = tuple(draw.randint(0, 3) for _ in range(frames))
        kinds = [
            Text(draw.randint(1, 5)),
            Image(height, width),
            video,
            Video(frames, height, width, stamps=stamps),
            audio,
            Interleaved(video, audio, 1.5) if counting.ticks else Text(1),
        ]
        seconds |= {id(video): gap, id(audio): Fraction(2, 25)}
        parts.append(draw.choice(kinds))
    return parts, seconds


@seeds
@pytest.mark.parametrize("ticks", [None, 25, 13])
@pytest.mark.parametrize("follow", ["max", "extent"])
@pytest.mark.parametrize("decode", ["max", "follow"])
def test_parts_as_a_loop_places_them(seed, ticks, follow, decode):
    draw = random.Random(seed)
    counting = Counting(draw.randint(1, 3), follow, decode, ticks)
    for _ in range(12):
        parts, seconds = drawn(draw, counting)
        expected, end = loop(parts, counting, seconds)
        ours = of_parts(parts, counting)
        assert ours.positions.tolist() == [list(place) for _, place in expected]
        assert ours.positions.dtype == torch.int64
        top = max(max(place) for _, place in expected) + 1
        assert ours.delta.item() == (top if decode == "max" else end) - len(expected)
        assert ours.mask.all() and ours.mask.shape == ours.positions.shape[:1]


@seeds
@pytest.mark.parametrize("follow", ["max", "extent"])
def test_the_delta_is_where_a_longer_row_goes_on(seed, follow):
    draw = random.Random(seed)
    counting = Counting(2, follow, "follow", 25)
    rows = [drawn(draw, counting)[0] for _ in range(4)]
    longer = of_rows([[*row, Text(3)] for row in rows], counting, side="left")
    prompt = of_rows(rows, counting, side="left")
    tokens = prompt.mask.sum(-1)
    decoded = sequence(3, start=tokens + prompt.delta).expand(-1, -1, 3)
    assert torch.equal(longer.positions[:, -3:], decoded)
    assert torch.equal(longer.delta, prompt.delta)


def test_rows_are_counted_before_columns():
    out = of_parts([Text(1), Image(4, 6)], Counting(2))
    assert out.positions.tolist() == [
        [0] * 3,
        *([1, 1 + h, 1 + w] for h in (0, 1) for w in range(3)),
    ]
    assert out.delta.item() == 4 - 7


def test_text_after_a_long_video():
    parts = [Text(1), Video(6, 4, 4, seconds=1.0), Text(2)]
    after = lambda **rules: of_parts(parts, Counting(2, **rules)).positions[-2:, 0].tolist()  # noqa: E731
    assert after() == [7, 8]
    assert after(ticks=2) == [12, 13]
    assert after(follow="extent") == after(follow="extent", ticks=2) == [3, 4]
    peers = of_parts(parts, Counting(2, "extent", ticks=2))
    assert peers.positions.max() == 11 and peers.delta.item() == 12 - 27
    own = of_parts(parts, Counting(2, "extent", "follow", ticks=2))
    assert own.delta.item() == 5 - 27


def test_time_is_multiplied_before_it_is_rounded():
    parts = [Video(4, 1, 1, rate=2)]
    assert of_parts(parts, Counting(ticks=2)).positions[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.warns(UserWarning, match="video of 4 frames has 3 at the same.*at 2 positions"):
        out = of_parts(parts, Counting(ticks=2, rounding="truncate"))
    assert out.positions[:, 0].tolist() == [0, 0, 0, 0]
    slow = [Video(3, 1, 1, seconds=2.75)]
    assert of_parts(slow, Counting(ticks=2)).positions[:, 0].tolist() == [0, 5, 11]
    truncated = of_parts(slow, Counting(ticks=2, rounding="truncate"))
    assert truncated.positions[:, 0].tolist() == [0, 4, 8]


def test_frames_that_share_a_time_are_reported():
    with pytest.warns(UserWarning, match="has 13 at the same time.*at 2 positions.*rounding=None"):
        out = of_parts([Video(15, 1, 1, rate=15)], Counting(ticks=2))
    assert out.positions[:, 0].unique().tolist() == [0, 1]
    with pytest.warns(UserWarning, match="audio of 4 tokens has 2 at"):
        of_parts([Audio(4, rate=50)], Counting(ticks=25))


def test_times_that_keep_their_fractions():
    counting = Counting(ticks=2, rounding=None)
    out = of_parts([Text(1), Video(4, 1, 2, rate=30), Text(1)], counting)
    assert out.positions.dtype == torch.float64
    expected = [1 + frame * 2 / 30 for frame in range(4) for _ in range(2)]
    assert out.positions[1:-1, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert out.positions[-1].tolist() == [3, 3, 3] and out.delta.item() == 4 - 10
    long = of_parts([Video(4, 1, 1, seconds=0.7), Text(1)], counting)
    assert long.positions[-1].tolist() == [5, 5, 5]
    mixed = of_rows([[Text(2)], [Video(2, 1, 1, seconds=0.25)]], counting)
    assert mixed.positions[1].tolist() == [[0, 0, 0], [0.5, 0, 0]]
    rotation = MRoPE(16, sections=(4, 2, 2))(out.positions)
    whole = of_parts([Text(1), Video(4, 1, 2), Text(1)]).positions
    assert not torch.equal(rotation.cos, MRoPE(16, sections=(4, 2, 2))(whole).cos)


def test_the_same_frames_at_another_rate():
    times = [
        of_parts([Video(3, 1, 1, rate=rate)], Counting(ticks=60)).positions[:, 0].tolist()
        for rate in (1, 30)
    ]
    assert times == [[0, 60, 120], [0, 2, 4]]
    assert of_parts([Video(3, 1, 1, rate=30)]).positions[:, 0].tolist() == [0, 1, 2]


def test_sound_and_pictures_take_turns():
    both = Interleaved(Video(3, 2, 4, seconds=1.0), Audio(80, rate=25))
    out = of_parts([Text(2), both, Text(1)], Counting(2, ticks=25))
    kinds = both.kinds(Counting(2, ticks=25)).tolist()
    assert kinds == [False] * 4 + [True] * 50 + [False] * 2 + [True] * 30
    t, h, w = out.positions.T.tolist()
    assert t[2:6] == [2, 2, 27, 27] and t[6:56] == list(range(2, 52))
    assert t[56:58] == [52, 52] and t[58:88] == list(range(52, 82))
    assert h[56:58] == [2, 2] and w[56:58] == [2, 3] and h[58:88] == t[58:88]
    assert out.positions[-1].tolist() == [82] * 3


def test_padding_goes_on_the_side_that_is_named():
    rows = [[Text(2)], [Text(1), Image(2, 3), Text(1)], []]
    for side in ("left", "right"):
        out = of_rows(rows, length=10, side=side)
        assert out.positions.shape == (3, 10, 3)
        for row, positions, mask, delta in zip(rows, *out[::2], out.delta, strict=True):
            own = of_parts(row)
            real = slice(10 - len(own.positions), 10) if side == "left" else slice(len(own.mask))
            assert mask.nonzero().flatten().tolist() == list(range(10))[real]
            assert torch.equal(positions[real], own.positions) and not positions[~mask].any()
            assert delta == own.delta
    assert of_rows([]).positions.shape == (0, 0, 3)


def test_nothing_is_remembered():
    first, second = [[Text(3), Image(4, 4)], [Text(2)]], [[Image(6, 2), Text(9)]]
    before = of_rows(first, Counting(2))
    of_rows(second, Counting(2, ticks=2))
    after = of_rows(first, Counting(2))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_types_say_the_same_as_parts():
    rows = [
        [Text(2), Image(2, 4), Image(4, 2), Text(1), Audio(3, rate=25)],
        [Video(3, 2, 2, seconds=0.5), Video(1, 4, 2, seconds=2.0), Image(2, 2), Text(4)],
        [Text(5)],
    ]
    counting = Counting(2, ticks=25)
    types = torch.full((3, 13), 9)
    mask = torch.zeros(3, 13, dtype=torch.bool)
    kept = [
        [0, 0, 1, 1, 1, 1, 0, 3, 3, 3],
        [2] * 5 + [1] + [0] * 4,
        [0] * 5,
    ]
    for row, own in enumerate(kept):
        at = torch.randperm(13)[: len(own)].sort().values  # padding anywhere
        types[row, at], mask[row, at] = torch.tensor(own), True
    out = of_types(
        types.int(),
        counting,
        mask=mask,
        images=torch.tensor([[1, 2, 4], [1, 4, 2], [1, 2, 2]]),
        videos=torch.tensor([[3, 2, 2], [1, 4, 2]]),
        seconds=[0.5, 2.0],
        audio_rate=25,
    )
    expected = of_rows(rows, counting)
    assert torch.equal(out.positions[mask], expected.positions[expected.mask])
    assert not out.positions[~mask].any()
    assert torch.equal(out.delta, expected.delta) and torch.equal(out.mask, mask)
    apart = of_types(torch.tensor([[3, 3, 2, 2]]), videos=torch.tensor([[1, 1, 2]]))
    assert apart.positions[0, 2:].tolist() == [[2, 2, 2], [2, 2, 3]]
    whole = of_types(torch.tensor([[0, 0], [3, 3]]))
    assert whole.positions[..., 1].tolist() == [[0, 1], [0, 1]] and whole.mask.all()


def test_types_of_turns():
    both = Interleaved(Video(3, 2, 4, seconds=1.0), Audio(80, rate=25))
    counting = Counting(2, ticks=25)
    kinds = [0, *(3 if sound else 2 for sound in both.kinds(counting)), 0, 3, 3, 0]
    given = {"videos": torch.tensor([[3, 2, 4]]), "seconds": [1.0], "audio_rate": 25}
    out = of_types(torch.tensor([kinds]), counting, **given, chunk=2.0)
    row = [Text(1), both, Text(1), Audio(2, rate=25), Text(1)]
    assert torch.equal(out.positions[0], of_parts(row, counting).positions)
    kinds[2:6] = reversed(kinds[2:6])
    with pytest.raises(
        ValueError, match=r"row 0 has another order than turns of 2\.0 seconds from"
    ):
        of_types(torch.tensor([kinds]), counting, **given, chunk=2.0)
    with pytest.raises(ValueError, match="sound in turns with 3 videos or frames, expected 1"):
        of_types(torch.tensor([kinds]), counting, **given, chunk=2.0, stamped=True)


def test_blocks_become_one_token_each():
    cells = blocks(2, 4, 6, merge=2).view(2, 2, 3, 2, 2, 3)
    for t, i, j, y, x in torch.cartesian_prod(*map(torch.arange, (2, 2, 3, 2, 2))).tolist():
        assert cells[t, i, j, y, x].tolist() == [t, 2 * i + y, 2 * j + x]
    assert torch.equal(
        blocks(3, 5, merge=1), torch.cartesian_prod(torch.arange(3), torch.arange(5))
    )
