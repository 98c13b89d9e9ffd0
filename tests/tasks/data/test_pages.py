"""Pages of pictures: the text, the page and the sound are each needed, and each says its part."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from tasks.data import Images
from tasks.data.pages import (
    CLASSES,
    COLUMNS,
    ROWS,
    SIDE,
    WORDINGS,
    Pages,
    latin_page,
    longest_sound,
)
from tasks.data.scenes import PARTS
from tasks.data.sources import Embedded
from tasks.data.splits import SPLITS
from tasks.data.spoken import GAP, SPEED, SpokenDigits, embedded_clips

ORDERS = np.array(list(itertools.permutations(range(5))))


def all_pages():
    """Every page that three permutations give, ``[120 · 120, 2, 2]`` for each of the symbols."""
    rows, columns = ORDERS.repeat(120, 0), np.tile(ORDERS, (120, 1))
    for symbols in ORDERS:
        yield latin_page(rows, columns, np.broadcast_to(symbols, rows.shape))


def test_the_answer_is_at_chance_without_each_of_the_three() -> None:
    at_cell, most = np.zeros((2, 2, 5), dtype=int), Counter[int]()
    for pages in all_pages():
        assert pages.min() == 0 and pages.max() == 4
        for axis in (1, 2):  # in a column, in a row: two classes, each once
            assert (np.diff(np.sort(pages, axis), axis=axis) > 0).all()
        counts = np.stack([(pages == label).sum((1, 2)) for label in range(5)], 1)
        most.update(counts.max(1).tolist())
        at_cell += np.stack([(pages == label).sum(0) for label in range(5)], 2)
    # without a page: every class as often in every cell
    assert (at_cell == 120**3 // 5).all()
    # with the page alone: the class that is there most, of four cells
    assert most == {1: 120**3 // 2, 2: 120**3 // 2}  # 1.5 of 4: 3/8


def test_a_page_is_of_a_cyclic_latin_square() -> None:
    rows, columns, symbols = (
        np.array([4, 0, 2, 1, 3]),
        np.array([1, 3, 2, 0, 4]),
        np.arange(5)[::-1],
    )
    # (row + column) mod 5 is 0 2 / 1 3
    assert latin_page(rows, columns, symbols).tolist() == [[4, 2], [3, 1]]


def test_the_three_permutations_are_uniform() -> None:
    def corner(pages: np.ndarray) -> np.ndarray:
        return np.bincount(pages[:, :2, :2].reshape(-1, 4) @ [125, 25, 5, 1], minlength=625)

    def pattern(pages: np.ndarray) -> np.ndarray:
        """Which cells are alike, whatever the symbols: of each the first that is."""
        flat = pages.reshape(-1, 4)
        first = (flat[:, :, None] == flat[:, None]).argmax(2)
        return np.bincount(first @ [0, 1, 4, 16], minlength=64)

    data, count = Pages("train"), 12_000
    drawn = np.stack([data.page(index).classes for index in range(count)])
    every = np.sum([corner(pages) for pages in all_pages()], 0), pattern(next(all_pages()))
    for expected, found in zip(every, (corner(drawn), pattern(drawn)), strict=True):
        often = expected * count / expected.sum()
        known = often > 0
        assert not found[~known].any() and known.sum() > 2
        chi_square = float(((found - often)[known] ** 2 / often[known]).sum())
        assert chi_square < known.sum() + 4 * (2 * known.sum()) ** 0.5


def test_row_and_column_are_uniform_and_independent_of_all_else() -> None:
    count = 9000
    for split in ("train", "test"):
        data = Pages(split)
        plans = [data.page(index) for index in range(count)]
        cell = np.array([2 * plan.row + plan.column for plan in plans])

        def quarter(values: Any) -> np.ndarray:
            ranks = np.argsort(np.argsort(np.array(values)))
            return 4 * ranks // count

        clips = embedded_clips()
        words = [plan.said for plan in plans]
        speeds = [len(clips.words[w.clips[0]]) / (w.ends - w.starts)[0] for w in words]
        wording = [WORDINGS.index(p.text.replace(f" {ROWS[p.row]} ", " {} ")) for p in plans]
        groups = [
            np.zeros(count, dtype=int),
            np.array(wording),
            np.array([plan.classes[plan.row, plan.column] for plan in plans]),
            *(
                np.array([plan.classes[i, j] for plan in plans])
                for i, j in ((0, 0), (0, 1), (1, 1))
            ),
            np.arange(count) % len(SpokenDigits(split, 1).names),
            np.roll(cell, 1),
            quarter([plan.sides[1, 1] for plan in plans]),
            quarter([plan.places[0, 0, 1] for plan in plans]),
            quarter([plan.pictures[1, 1] for plan in plans]),
            quarter([word.gains[0] for word in words]),
            quarter([word.noise for word in words]),
            quarter([word.starts[0] for word in words]),
        ]
        groups += [quarter(speeds)] * (split == "train")
        for group in groups:
            table = np.zeros((group.max() + 1, 4))
            np.add.at(table, (group, cell), 1)
            expected = table.sum(1, keepdims=True) / 4
            chi_square = float(((table - expected) ** 2 / expected).sum())
            freedom = 3 * len(table)
            assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, table
        assert (np.bincount(wording) > 0.9 * count / len(WORDINGS)).all()


def test_wordings_name_a_row_and_no_other() -> None:
    for words, row in itertools.product(WORDINGS, ROWS):
        assert [name for name in ROWS if name in words.format(row)] == [row]


@pytest.mark.parametrize("split", SPLITS)
def test_an_item_says_what_its_plan_does(split: Any) -> None:
    data, clips = Pages(split), embedded_clips()
    assert data.classes == {"what": list(CLASSES), "where": PARTS}
    speeds, seen = [], set()
    for index in range(60):
        (text, image, sound), labels = data[index]
        plan = data.page(index)
        assert bytes(text.tolist()).decode() == plan.text and text.dtype == torch.int64
        assert image.shape == (1, 32, 32) and image.dtype == torch.float32
        assert sound.shape == (plan.said.samples,) and sound.dtype == torch.float32
        assert list(labels) == ["what", "where"]
        assert all(label.dtype == torch.int64 and label.shape == () for label in labels.values())
        row = next(number for number, name in enumerate(ROWS) if name in plan.text)
        (clip,) = plan.said.clips
        column = int(clips.digit[clip]) - 1
        assert COLUMNS[column] == clips.digit[clip]
        assert labels["what"] == data.labels[plan.pictures[row, column]]
        place = f"{ROWS[row]} {('left', 'right')[column]}"
        assert data.classes["where"][int(labels["where"])] == place
        assert clips.names[clips.voice[clip]] == plan.said.voice
        assert clips.split[clips.voice[clip]] == split
        start, end = plan.said.starts[0], plan.said.ends[0]
        speeds.append(len(clips.words[clip]) / (end - start))
        seen.add((row, column))
        if split != "train":
            expected = plan.said.gains[0] * clips.words[clip]
            assert np.abs(sound.numpy()[start:end] - expected).max() < 6 * plan.said.noise
        silence = torch.cat([sound[:start], sound[end:]])
        assert silence.std() == pytest.approx(plan.said.noise, rel=0.15)
        assert len(sound) / 8000 <= longest_sound()
    assert len(seen) == 4
    if split == "train":
        assert SPEED[0] - 0.01 < min(speeds) < 0.9 and 1.1 < max(speeds) < SPEED[1] + 0.01
    else:
        assert set(speeds) == {1.0}


def test_no_number_takes_longer_than_said() -> None:
    clips = embedded_clips()
    longest = max(
        len(word) for word, digit in zip(clips.words, clips.digit, strict=True) if 1 <= digit <= 2
    )
    assert longest_sound() == pytest.approx(longest / 8000 / 0.8 + 2 * GAP[1])


@pytest.mark.parametrize("size", [(32, 32), (50, 64), (24, 96), (9, 7)])
def test_pictures_stay_whole_in_their_cells_on_pages_of_any_shape(size: tuple[int, int]) -> None:
    data, double = Pages("val", size=size), Pages("val", size=(2 * size[0], 2 * size[1]))
    side = min(size) / 2
    for index in range(12):
        page, image = data.page(index), data[index][0].image
        assert image.shape == (1, *size) and image.min() >= 0 and image.max() <= 1
        finer = double[index][0].image
        assert torch.allclose(avg_pool2d(finer, 2), image, atol=1e-6)
        for (i, j), picture in np.ndenumerate(page.pictures):
            cell = finer[0, i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
            mass = data.images[picture].mean() / 255 * (2 * page.sides[i, j] * side) ** 2
            assert float(cell.sum()) == pytest.approx(mass, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("size", [(280, 280), (280, 400), (420, 280)])
def test_a_page_shows_its_images_where_the_plan_has_them_and_is_normalised(
    size: tuple[int, int],
) -> None:
    data, cell = Pages("test", size=size), np.array(size) / 2
    for index in range(4):
        page, image = data.page(index), data[index][0].image
        for (i, j), picture in np.ndenumerate(page.pictures):
            assert data.labels[picture] == page.classes[i, j]
            side = 140 * page.sides[i, j]
            corner = cell * np.array([i, j]) + page.places[i, j] * (cell - side)
            y, x = (
                (corner[axis] + (np.arange(28) + 0.5) / 28 * side).astype(int) for axis in (0, 1)
            )
            shown = image[0].numpy()[np.ix_(y, x)]
            assert np.abs(shown * 255 - data.images[picture]).mean() < 3
        again = Pages("test", size=size, mean=0.25, std=0.5)[index][0].image
        assert torch.allclose(again, (image - 0.25) / 0.5, atol=1e-6)


def test_pictures_are_anywhere_in_their_cells_and_no_pixel_is_always_black() -> None:
    data = Pages("train")
    plans = [data.page(index) for index in range(1500)]
    sides = (np.array([plan.sides for plan in plans]) - SIDE[0]) / (SIDE[1] - SIDE[0])
    places = np.array([plan.places for plan in plans])
    for values in (sides, places):
        assert 0 <= values.min() < 0.01 and 0.99 < values.max() <= 1
        assert np.allclose(values.mean(0), 0.5, atol=0.04)
        assert np.allclose(values.var(0), 1 / 12, atol=0.01)
    assert torch.stack([data[index][0].image for index in range(1500)]).amax(0).min() > 0


@pytest.mark.parametrize("split_seed", [0, 5])
def test_images_are_split_as_the_image_data_are(split_seed: int) -> None:
    images, seen = Images(split_seed=split_seed), set()
    images.setup()
    for split in SPLITS:
        data = Pages(split, split_seed=split_seed)  # pyright: ignore
        other: Any = images._data[split]
        names = np.array(Embedded.classes)[other.labels]
        own = np.isin(names, CLASSES)
        assert np.array_equal(data.images, other.images[own])
        assert [CLASSES[label] for label in data.labels] == names[own].tolist()
        used = {int(p) for index in range(300) for p in data.page(index).pictures.flat}
        found = {data.images[picture].tobytes() for picture in used}
        assert not found & seen and len(used) > 0.6 * min(len(data.images), 1200)
        seen |= found


def test_the_classes_are_told_apart_as_well_as_said() -> None:
    data = Pages("train")
    small = avg_pool2d(torch.from_numpy(data.images).float(), 2).flatten(1)
    labels = torch.from_numpy(data.labels)
    distance = torch.cdist(small, small).fill_diagonal_(float("inf"))
    near = labels[distance.topk(5, largest=False).indices].mode(1).values
    assert float((near == labels).float().mean()) == pytest.approx(0.972, abs=5e-4)


def test_an_item_follows_from_split_seed_and_index_alone() -> None:
    data, again = Pages("train", 5, seed=3), Pages("train", 9, seed=3)
    assert len(data) == 5 and len(again) == 9
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore
    for index in (4, 0, 1007):
        one, other = data[index], again[index]
        assert all(torch.equal(*pair) for pair in zip(one[0], other[0], strict=True))
        assert one[1] == other[1]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]  # type: ignore
    drawn = [
        float(Pages(split, 5, seed=seed).page(index).sides[0, 0])
        for split in SPLITS
        for seed in (0, 1)
        for index in (0, 5)
    ]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "dev"}, "split is 'dev'; expected one of"),
        ({"samples": 0}, "samples is 0; expected at least 1"),
        ({"size": (48, 1)}, r"size is \(48, 1\); expected height and width, at least 2"),
        ({"size": (48,)}, r"size is \(48,\); expected height and width"),
        ({"std": 0.0}, "mean and std are 0.0 and 0.0; expected finite numbers, std above 0"),
        ({"mean": float("nan")}, "mean and std are nan"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"split_seed": -1}, "split_seed is -1"),
    ],
)
def test_what_cannot_be_shown_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made: Any = Pages
        made(**{"split": "val"} | options)
