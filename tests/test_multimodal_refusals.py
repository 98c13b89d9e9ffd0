"""Parts, rules and token types that do not fit are refused, with both numbers."""

import pytest
import torch

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
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: of_parts([Video(3, 1, 1)], Counting(ticks=2)),
            "3 frames needs its rate.* 2 ticks",
        ),
        (lambda: of_parts([Audio(3)], Counting(ticks=2)), "audio of 3 tokens needs its rate"),
        (
            lambda: of_parts([Image(4, 5)], Counting(2)),
            "4 x 5 patches has no whole blocks of 2 x 2",
        ),
        (lambda: of_parts([Image(3, 4)], Counting(2)), "3 x 4 patches has no whole blocks"),
        (lambda: of_parts([Interleaved(Video(1, 1, 1), Audio(1))]), "got ticks=None"),
        (lambda: blocks(4, 5, merge=2), "4 x 5 patches has no whole blocks"),
        (lambda: blocks(4, merge=2), r"a height and a width, got sizes \(4,\)"),
        (lambda: of_rows([[Text(3)], [Text(5)]], length=4), "to 4 tokens, the longest has 5"),
        (lambda: of_rows([[Text(3)]], side="both"), "'left' or 'right', .* got 'both'"),
        (lambda: Counting(0), "merge must be a whole number of 1 or more, got 0"),
        (lambda: Counting(follow="most"), "follow is one of .*'extent'.*got 'most'"),  # type: ignore
        (lambda: Counting(decode="extent"), "decode is one of .*'follow'"),  # type: ignore
        (lambda: Counting(rounding="round"), "rounding is one of .*None"),  # type: ignore
        (lambda: Counting(ticks=0), "ticks must be above 0"),
        (lambda: Text(-1), "length of text must be a whole number of 0 or more, got -1"),
        (lambda: Image(0, 2), "height of an image must be .* got 0"),
        (lambda: Video(0, 2, 2), "frames of a video"),
        (lambda: Video(1, 2, 2, rate=1, seconds=2), "a rate or seconds .* got 1 and 2"),
        (lambda: Video(1, 2, 2, rate=0), "rate of a video must be above 0 and finite, got 0"),
        (lambda: Video(3, 2, 2, stamps=(1, 2)), "each of 3 frames, got 2"),
        (lambda: Interleaved(Video(1, 1, 1, stamps=2), Audio(1)), "has no stamps, got 2"),
        (lambda: Interleaved(Video(1, 1, 1), Audio(1), 0), "chunk, in seconds, must be above 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_parts_that_are_none(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("types", "options", "message"),
    [
        (
            [0, 1, 1],
            {"images": [[1, 1, 3]]},
            "types have 2 image tokens, the grids 3, with merge=1",
        ),
        ([0, 1, 1], {}, "types have 2 image tokens, the grids 0"),
        ([0, 0], {"images": [[1, 1, 3]]}, "types have 0 image tokens, the grids 3"),
        ([2, 0, 2, 2], {"videos": [[2, 1, 1], [1, 1, 1]]}, "run of 1 video tokens, .* have 2"),
        ([1], {"images": [[2, 1, 1]]}, "has 1 frame, got a grid of 2 x 1 x 1"),
        ([2, 2], {"videos": [[2, 1, 1]], "seconds": [1.0, 2.0]}, "1 videos, and seconds for 2"),
        ([2, 2], {"videos": [[2, 1, 1]], "counting": Counting(ticks=2)}, "2 frames needs its rate"),
        ([3], {"counting": Counting(ticks=2)}, "audio of 1 tokens needs its rate"),
        ([0, 4], {}, "3 audio, got 4"),
        ([0, -1], {}, "3 audio, got -1"),
        ([0], {"mask": torch.ones(1, 2, dtype=torch.bool)}, r"\(1, 1\), their mask \(1, 2\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_types_that_do_not_fit(types, options, message):
    for name in {"images", "videos"} & options.keys():
        options = {**options, name: torch.tensor(options[name])}
    with pytest.raises(ValueError, match=message):
        of_types(torch.tensor([types]), **options)
