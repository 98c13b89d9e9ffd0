"""How frames are looked at, and what is in a batch."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.data.clips import Augmentation, Look, Part, Videos, evenly


def plain(size: tuple[int, int], **augment: Any) -> Look:
    return Look(size, (0.0,), (1.0,), Augmentation(**augment))


def ramp(height: int, width: int, frames: int = 2) -> Tensor:
    """Frames whose pixels are 4 · column + row, the same in all."""
    grey = 4 * torch.arange(width) + torch.arange(height)[:, None]
    return grey.to(torch.uint8).expand(frames, 1, height, width)


def same(seen: Tensor, frames: Tensor) -> bool:
    return torch.allclose(seen, frames.movedim(1, 0).float() / 255, atol=1e-6)


def test_evaluation_covers_by_the_shorter_side_and_cuts_the_centre() -> None:
    look = plain((8, 8))
    frames = ramp(8, 20)
    assert same(look(frames), frames[..., 6:14])
    assert same(look(ramp(20, 8)), ramp(20, 8)[..., 6:14, :])
    assert same(plain((8, 20))(frames), frames)
    for shape in ((5, 40), (40, 5), (16, 40), (3, 3), (1, 1), (37, 53)):
        assert plain((6, 9))(ramp(*shape)).shape == (1, 2, 6, 9)


def test_resizing_is_antialiased() -> None:
    stripes = (torch.arange(64) % 8 == 0).to(torch.uint8).mul(255).expand(1, 1, 64, 64)
    for draw in (None, np.random.default_rng(0)):
        assert (plain((8, 8))(stripes, draw)[..., 1:-1] - 1 / 8).abs().max() < 0.03


def test_values_are_normalised_by_channel() -> None:
    frames = torch.tensor([0, 51, 255], dtype=torch.uint8)[None, :, None, None].expand(4, 3, 6, 6)
    seen = Look((6, 6), (0.0, 0.1, 0.5), (1.0, 0.5, 0.25))(frames)
    assert seen.shape == (3, 4, 6, 6)
    assert torch.allclose(seen[:, 0, 0, 0], torch.tensor([0.0, 0.2, 2.0]), atol=1e-6)


def test_a_crop_is_the_same_in_all_frames_and_lies_anywhere() -> None:
    look, frames = plain((8, 8)), ramp(8, 20)
    places = set()
    for seed in range(200):
        seen = look(frames, np.random.default_rng(seed))
        assert torch.equal(seen[:, 0], seen[:, 1])
        left = round(float(seen[0, 0, 0, 0]) * 255 / 4)
        assert same(seen, frames[..., left : left + 8])
        places.add(left)
    assert places == set(range(13))


def test_scale_is_a_part_of_the_area_of_the_largest_crop() -> None:
    look, rows = plain((10, 10), scale=(0.25, 0.25)), torch.arange(100)[:, None].expand(100, 300)
    spans = []
    for seed in range(50):
        seen = look(rows.to(torch.uint8)[None, None], np.random.default_rng(seed)) * 255
        spans.append(float(seen[0, 0, -1, 0] - seen[0, 0, 0, 0]) / 9 * 10)
    assert np.mean(spans) == pytest.approx(50, abs=1)  # half of the side
    drawn = plain((10, 10), scale=(0.25, 1.0))
    spans = [
        float(np.ptp(drawn(rows.to(torch.uint8)[None, None], np.random.default_rng(s)).numpy()))
        for s in range(200)
    ]
    areas = (np.array(spans) * 255 / 0.9 / 100) ** 2
    assert areas.mean() == pytest.approx(0.625, abs=0.06) and areas.min() < 0.35 < 0.9 < areas.max()


def test_flips_have_their_probability() -> None:
    frames = ramp(8, 8)
    for flip, expected in ((0.0, 0.0), (0.3, 0.3), (1.0, 1.0)):
        look, flipped = plain((8, 8), flip=flip), []
        for seed in range(300):
            seen = look(frames, np.random.default_rng(seed))
            turned = bool(seen[0, 0, 0, 0] > seen[0, 0, 0, -1])
            assert torch.equal(seen.flip(-1) if turned else seen, look(frames))
            flipped.append(turned)
        assert np.mean(flipped) == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.0, 1.0)}, r"scale is \(0.0, 1.0\); expected two parts"),
        ({"scale": (0.8, 0.5)}, "scale is"),
        ({"scale": (0.5, 1.5)}, "scale is"),
        ({"scale": (1.0,)}, "scale is"),
        ({"flip": 1.5}, "flip is 1.5; expected a probability"),
    ],
)
def test_bad_augmentations(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**options)


def test_views_begin_evenly() -> None:
    assert evenly(Fraction(3), 1) == [Fraction(3, 2)]
    assert evenly(Fraction(3), 2) == [0, 3]
    assert evenly(Fraction(3), 4) == [0, 1, 2, 3]
    assert evenly(Fraction(0), 4) == [0]


class Given:
    """A source of what it is given."""

    def __init__(self, *items: list[Part]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[list[Part], Any]:
        return self.items[index % len(self)], {"class": index}


def part(frames: int, step: float = 0.5) -> Part:
    return Part(1.0 + torch.arange(frames)[None, :, None, None].expand(2, -1, 3, 4).float(), step)


def test_a_batch_pads_and_tells() -> None:
    videos = Videos(Given([part(5)], [part(2), part(4, 0.25)], [part(5)]), 5)
    clips, labels = videos.batch([videos[0], videos[2]])
    assert clips.values.shape == (2, 2, 5, 3, 4) and clips.values.is_contiguous()
    assert clips.mask is None and clips.owner is None and clips.step == 0.5
    assert labels["class"].tolist() == [0, 2] and labels["class"].dtype == torch.int64
    clips, _ = videos.batch([videos[0], videos[1]])
    assert clips.values[:, 0, :, 0, 0].tolist() == [
        [1, 2, 3, 4, 5],
        [1, 2, 0, 0, 0],
        [1, 2, 3, 4, 0],
    ]
    assert clips.mask is not None and clips.owner is not None
    assert clips.mask.sum(1).tolist() == [5, 2, 4] and clips.owner.tolist() == [0, 1, 1]
    assert torch.equal(clips.mask, clips.values[:, 1, :, 2, 3] > 0)
    assert clips.step == (0.5, 0.5, 0.25)


def test_shuffled_frames_are_a_permutation_of_the_real_ones() -> None:
    source = Given([part(16), part(7)])
    real, mixed = Videos(source, 16), Videos(source, 16, (0, 1))
    orders = []
    for index in range(20):
        for row, (own, other) in enumerate(zip(real[index][0], mixed[index][0], strict=True)):
            order = other.frames[0, :, 0, 0] - 1
            assert torch.equal(other.frames, own.frames[:, order.long()])
            assert sorted(order.tolist()) == list(range((16, 7)[row])) and other.step == own.step
            orders.append(tuple(order.tolist()))
    assert len(set(orders)) == 40
    again = [tuple(p.frames[0, :, 0, 0].tolist()) for p in Videos(source, 16, (0, 1))[3][0]]
    assert again == [tuple(k + 1 for k in order) for order in orders[6:8]]
    first = Videos(source, 16, (0, 2))[3][0][0].frames[0, :, 0, 0]
    assert tuple(first.tolist()) != again[0]
    clips, _ = mixed.batch([mixed[0]])
    assert clips.mask is not None and clips.mask.sum(1).tolist() == [16, 7]
    mean = np.mean([order[0] for order in orders[::2]])
    assert 3 < mean < 12  # no order is preferred
