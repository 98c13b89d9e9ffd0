"""A picture that goes round: the same frames in another order, at any rate and size."""

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

import tasks.data.motion
from tasks.data import Images
from tasks.data.motion import MOTIONS, RADIUS, Motion
from tasks.data.samplers import EpochSampler
from tasks.data.scenes import SIDE
from tasks.data.splits import SPLITS

TURNS = list(MOTIONS.values())


def centres(clip: Tensor) -> np.ndarray:
    """Centre of mass ``[T, 2]`` (y, x) of frames ``[1, T, H, W]``, in pixels."""
    frames = clip[0].double().numpy()
    mass = frames.sum((1, 2))
    y, x = (np.arange(pixels) + 0.5 for pixels in frames.shape[1:])
    return np.stack([frames.sum(2) @ y / mass, frames.sum(1) @ x / mass], 1)


Made = Callable[..., Motion]


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A data set that always goes round so many times, with all else as it is."""

    def make(turns: int, *arguments: Any, **options: Any) -> Motion:
        with monkeypatch.context() as patch:
            names = [f"{name}, so called" for name in MOTIONS]
            patch.setattr(tasks.data.motion, "MOTIONS", dict.fromkeys(names, turns))
            return Motion(*arguments, **options)

    return make


def bag(clip: Tensor) -> Counter[bytes]:
    return Counter(frame.numpy().tobytes() for frame in clip[0])


@pytest.mark.parametrize(
    ("fps", "seconds", "size"),
    [
        *[(8, 2.0, (32, 32)), (8, 4.0, (24, 40)), (4, 2.0, (32, 32)), (16, 2.0, (17, 9))],
        *[(5, 2, (8, 8)), (32, 2.0, (32, 32)), (2.5, 2.0, (32, 32)), (2.5, 6.0, (32, 32))],
    ],
)
def test_all_motions_from_a_phase_show_the_same_frames(
    turning: Made, fps: float, seconds: float, size: tuple[int, int]
) -> None:
    made = [turning(turns, "train", 9, size, fps, seconds) for turns in TURNS]
    assert Motion("train", 9, size, fps, seconds).shuffled_is_chance
    for index in (0, 8, 12345):
        clips = [data[index][0] for data in made]
        assert all(bag(clip) == bag(clips[0]) for clip in clips)  # bit for bit
        assert set(bag(clips[0]).values()) == {seconds // 2}  # each place as often
        for one, other in zip(clips, clips[1:] + clips[:1], strict=True):
            assert not torch.equal(one, other)
            assert torch.equal(one[:, 0], other[:, 0])


def test_the_bag_law_is_coprimality_over_whole_turns() -> None:
    for fps in [*range(2, 62), 2.5, 7.5, 12.5, 0.5]:
        for seconds in (2, 3, 4, 5, 6):
            places = Fraction(2 * fps)
            if (places * seconds / 2).denominator > 1:
                continue
            expected = seconds % 2 == 0 and math.gcd(3, places.numerator) == 1
            data = Motion("test", fps=fps, seconds=seconds)
            assert data.shuffled_is_chance == expected, (fps, seconds)


def test_slow_rates_alias_as_said(turning: Made) -> None:
    def clip(turns: int, fps: float) -> Tensor:
        return turning(turns, "train", fps=fps)[5][0]

    assert torch.equal(clip(3, 3), clip(-3, 3)) and not torch.equal(clip(1, 3), clip(-1, 3))
    assert torch.equal(clip(3, 2), clip(-1, 2)) and torch.equal(clip(-3, 2), clip(1, 2))
    assert not torch.equal(clip(3, 2), clip(1, 2))
    assert all(torch.equal(clip(turns, 1), clip(1, 1)) for turns in TURNS)
    fewest = [clip(turns, 4) for turns in TURNS]
    assert len({tuple(frame.numpy().tobytes() for frame in frames[0]) for frames in fewest}) == 4


@pytest.mark.parametrize(("fps", "seconds"), [(4, 2.0), (16, 2.0), (32, 2), (30, 2.0), (7, 4.0)])
@pytest.mark.parametrize("size", [(32, 32), (20, 50)])
def test_a_moment_looks_the_same_at_every_rate(
    fps: int, seconds: float, size: tuple[int, int]
) -> None:
    data, other = Motion("val", size=size), Motion("val", size=size, fps=fps, seconds=seconds)
    shared = [(t, t * fps // 8) for t in range(16) if t * fps % 8 == 0]
    assert len(shared) >= 2
    for index in range(8):
        (clip, labels), (again, same) = data[index], other[index]
        assert labels == same
        for t, u in shared:
            assert torch.equal(clip[:, t], again[:, u])


def test_places_follow_the_formula_in_seconds() -> None:
    for fps, seconds in ((8, 2.0), (30, 3.0), (7, 5), (29.97, 100.0)):
        data = Motion("train", size=(20, 30), fps=fps, seconds=seconds)
        for index in range(20):
            plan = data.orbit(index)
            time = np.arange(data.frames) / fps
            angle = 2 * np.pi * (plan.phase + TURNS[plan.how] / 2 * time)
            expected = plan.centre + plan.radius * np.stack([np.sin(angle), np.cos(angle)], 1)
            assert np.allclose(plan.places, expected, atol=1e-9)


@pytest.mark.parametrize("size", [(32, 32), (64, 24)])
def test_clockwise_is_clockwise_on_the_screen(size: tuple[int, int]) -> None:
    seen = set()
    for index in range(24):
        data = Motion("train", size=size, fps=16)
        clip, labels = data[index]
        name = data.classes["how"][int(labels["how"])]
        seen.add(name)
        at = centres(clip)
        y, x = (at - at.mean(0)).T
        plan = data.orbit(index)
        radius = plan.radius * min(size)
        assert np.allclose(np.hypot(y, x), radius, atol=0.25)  # a circle in pixels, not an ellipse
        # at the right going down, at the bottom going left, and so on
        ahead = np.roll(at, -1, 0) - at
        for place, step in ((x, ahead[:, 0]), (y, -ahead[:, 1]), (-x, -ahead[:, 0])):
            assert (step[place.argmax()] > 0) == name.endswith(" clockwise")
        angle = np.unwrap(np.arctan2(y, x))
        turns = (angle[-1] - angle[0]) / (2 * np.pi) * 32 / 31
        assert abs(turns) == pytest.approx(3 if name.startswith("fast") else 1, abs=0.05)
    assert seen == set(MOTIONS)


@pytest.mark.parametrize(
    ("size", "fps", "seconds", "frames"),
    [((32, 32), 8, 2.0, 16), ((24, 96), 5, 3.0, 15), ((40, 9), 30, 2.0, 60), ((2, 2), 10, 0.1, 1)],
)
def test_the_whole_picture_stays_on_canvases_of_any_shape(
    size: tuple[int, int], fps: float, seconds: float, frames: int
) -> None:
    data = Motion("val", size=size, fps=fps, seconds=seconds)
    double = Motion("val", size=(2 * size[0], 2 * size[1]), fps=fps, seconds=seconds)
    for index in range(12):
        (clip, labels), plan = data[index], data.orbit(index)
        assert clip.shape == (1, frames, *size) and clip.dtype == torch.float32
        assert all(label.shape == () and label.dtype == torch.int64 for label in labels.values())
        assert clip.min() >= 0 and clip.max() <= 1
        mass = data.images[index].mean() / 255 * (plan.side * min(size)) ** 2
        assert np.allclose(clip.sum((0, 2, 3)), mass, rtol=1e-4)  # nothing is cut off
        assert torch.allclose(avg_pool2d(double[index][0][0], 2), clip[0], atol=1e-6)


def test_the_circle_is_anywhere_in_the_room() -> None:
    for size in ((32, 32), (32, 80)):
        data = Motion("train", size=size)
        plans = [data.orbit(index) for index in range(1000)]
        reach = np.array([[plan.radius + plan.side / 2] for plan in plans])
        room = np.array(size) / 32 - 2 * reach
        share = (np.array([plan.centre for plan in plans]) - reach) / room
        assert share.min() >= 0 and share.max() <= 1
        assert np.allclose(share.mean(0), 0.5, atol=0.04)
        assert np.allclose(np.cov(share.T), np.eye(2) / 12, atol=0.012)


def test_motions_are_uniform_and_independent_of_all_else() -> None:
    count = 8000
    data = Motion("test", size=(32, 48))
    plans = [data.orbit(index) for index in range(count)]
    how = np.array([plan.how for plan in plans])
    what = data.labels[[plan.picture for plan in plans]]
    assert (np.bincount(what) == count / 10).all()

    def quarter(values: list[float], ends: tuple[float, float]) -> np.ndarray:
        share = (np.array(values) - ends[0]) / (ends[1] - ends[0])
        assert 0 <= share.min() < 0.01 and 0.99 < share.max() <= 1
        return (4 * share).astype(int)

    groups = [
        np.zeros(count, dtype=int),
        what,
        quarter([plan.phase for plan in plans], (0, 1)),
        quarter([plan.side for plan in plans], SIDE),
        quarter([plan.radius for plan in plans], RADIUS),
        np.array([plan.centre[1] > 0.75 for plan in plans], dtype=int),
        np.array([plan.centre[0] > 0.5 for plan in plans], dtype=int),
        np.arange(count) % 4,
        np.roll(how, 1),
    ]
    for t in (0, 7):  # where a frame alone shows the picture
        below = np.array([plan.places[t] > plan.centre for plan in plans]).astype(int)
        groups.append(2 * below[:, 0] + below[:, 1])
    for group in groups:
        table = np.zeros((group.max() + 1, len(MOTIONS)))
        np.add.at(table, (group, how), 1)
        expected = count / table.size
        chi_square = float(((table - expected) ** 2 / expected).sum())
        assert chi_square < table.size + 4 * (2 * table.size) ** 0.5, table


def features(data: Motion, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Of each clip: statistics of its bag of frames, and of pairs of neighbours, as they come and
    shuffled; and "how".
    """
    draw = np.random.default_rng(1)
    found: dict[str, list[Tensor]] = {"bag": [], "order": [], "shuffled": []}
    labels = []
    for index in range(count):
        clip, label = data[index]
        labels.append(label["how"])
        places = torch.from_numpy(centres(clip)).float()
        coarse = avg_pool2d(clip[0], 8).flatten(1)
        ranked = torch.cat([coarse[:, 5:7], places], 1).sort(0).values
        found["bag"].append(torch.cat([coarse.mean(0), coarse.std(0), ranked.flatten()]))
        order = draw.permutation(len(places))
        for name, seen in (("order", places), ("shuffled", places[order])):
            seen = seen - seen.mean(0)
            found[name].append((seen[:-1].T @ seen[1:]).flatten())
    return {name: torch.stack(rows) for name, rows in found.items()}, torch.stack(labels)


def accuracy(train: Tensor, labels: Tensor, test: Tensor, answers: Tensor) -> float:
    """Of multinomial logistic regression on standardised features."""
    mean, std = train.mean(0), train.std(0) + 1e-6
    train, test = (
        torch.cat([(part - mean) / std, torch.ones(len(part), 1)], 1) for part in (train, test)
    )
    weight = torch.zeros(train.shape[1], len(MOTIONS), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(train @ weight, labels) + 1e-3 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return float(((test @ weight).argmax(1) == answers).float().mean())


def test_a_bag_of_frames_is_at_chance_and_order_is_not() -> None:
    (train, labels), (test, answers) = (
        features(Motion("train"), 1000),
        features(Motion("test"), 1500),
    )
    scores = {name: accuracy(train[name], labels, test[name], answers) for name in train}
    assert scores["order"] > 0.95
    for name in ("bag", "shuffled"):
        assert abs(scores[name] - 1 / 4) < 0.045, scores  # four standard deviations
    # the same statistics do tell where they can: in half a slow turn
    (train, labels), (test, answers) = (
        features(Motion(split, seconds=1.0), count)  # pyright: ignore
        for split, count in (("train", 1000), ("test", 500))
    )
    assert accuracy(train["bag"], labels, test["bag"], answers) > 0.4


def test_a_clip_follows_from_split_seed_and_index_alone() -> None:
    data, again = Motion("train", 5, seed=3), Motion("train", 9, seed=3)
    state = torch.get_rng_state(), str(np.random.get_state())
    first = data[1007]
    np.random.seed(1)
    for index in (4, 0, 1007):
        one, other = data[index], again[index]
        assert torch.equal(one[0], other[0]) and one[1] == other[1]
    assert torch.equal(first[0], data[1007][0])
    assert torch.equal(torch.get_rng_state(), state[0])
    phases = [
        Motion(split, 5, seed=seed).orbit(index).phase
        for split in SPLITS
        for seed in (0, 1)
        for index in (0, 5)
    ]
    assert len(set(phases)) == len(phases)


def test_epochs_are_further_clips_of_the_images_in_turn() -> None:
    data = Motion("val", 80)
    assert len(data) == 80 and len(Motion("val")) == 800
    assert data.orbit(80).picture == 80 and data.orbit(803).picture == 3
    assert data.orbit(803).phase != data.orbit(3).phase
    sampler = EpochSampler(data, num_replicas=1, rank=0, seed=0)
    sampler.set_epoch(2)
    assert sorted(sampler) == list(range(160, 240))
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
    clips, labels = next(iter(loader))
    index = next(iter(sampler))
    assert clips.shape == (4, 1, 16, 32, 32) and torch.equal(clips[0], data[index][0])
    assert labels["what"][0] == data.labels[index] and labels["how"][0] == data.orbit(index).how


@pytest.mark.parametrize("split_seed", [0, 5])
def test_images_are_split_as_the_image_data_are(split_seed: int) -> None:
    images = Images(split_seed=split_seed)
    images.setup()
    seen: set[bytes] = set()
    for split, count in zip(SPLITS, (7200, 800, 2000), strict=True):
        data = Motion(split, split_seed=split_seed)  # pyright: ignore
        other: Any = images._data[split]
        assert np.array_equal(data.images, other.images)
        assert np.array_equal(data.labels, other.labels)
        assert len(data) == count and data.classes["what"] == images.classes["what"]
        found = {image.tobytes() for image in data.images}
        assert not found & seen
        seen |= found


def test_a_clip_shows_its_image_and_is_normalised() -> None:
    data = Motion("test", size=(320, 320))
    for index in range(4):
        clip, labels = data[index]
        plan = data.orbit(index)
        assert labels == {"what": data.labels[index], "how": plan.how}
        # the mean of the canvas over each cell of the picture, where the cell's middle is
        cells = ((np.arange(28) + 0.5) / 28 - 0.5) * plan.side
        y, x = (((plan.places[5][axis] + cells) * 320).astype(int) for axis in (0, 1))
        shown = clip[0, 5].numpy()[np.ix_(y, x)]
        assert np.abs(shown * 255 - data.images[index]).mean() < 3
        again = Motion("test", size=(320, 320), mean=0.25, std=0.5)[index][0]
        assert torch.allclose(again, (clip - 0.25) / 0.5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "dev"}, "split is 'dev'; expected one of"),
        ({"samples": 0}, "samples is 0; expected at least 1"),
        ({"size": (32, 1)}, r"size is \(32, 1\); expected height and width, at least 2"),
        ({"size": (32, 32, 3)}, r"size is \(32, 32, 3\); expected height and width"),
        ({"fps": 0}, "fps is 0; expected a finite number above 0"),
        ({"fps": math.nan}, "fps is nan"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"seconds": -2}, "seconds is -2"),
        ({"std": 0.0}, "std is 0.0"),
        ({"mean": math.nan}, "mean is nan"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"split_seed": -1}, "split_seed is -1"),
        ({"seconds": 2.01}, "fps 8 for 2.01 seconds is 16.08 frames; .* for 2.125 seconds"),
        ({"fps": 29.97}, "is 59.94 frames; expected a whole number"),
    ],
)
def test_what_cannot_be_shown_is_refused(options: dict[str, Any], words: str) -> None:
    checked: Any = Motion
    with pytest.raises(ValueError, match=words) as caught:
        checked(**({"split": "train"} | options))
    assert "\n" not in str(caught.value)
