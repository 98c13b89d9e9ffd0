"""Pages of pictures: a text names the row, a spoken number the column, and the page answers."""

import functools
import math
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .scenes import PARTS, coverage
from .sources import Embedded
from .splits import SPLITS, hold_out
from .spoken import GAP, SAMPLE_RATE, SPEED, Utterance, embedded_clips, heard, utterance

Split = Literal["train", "val", "test"]

CLASSES = ("T-shirt/top", "Trouser", "Coat", "Bag", "Ankle boot")
"""The five of Fashion-MNIST that are told apart best when they are small: of all 252 choices the
highest accuracy of 5 nearest neighbours among the training images at 14 × 14, 97.2 %."""
ROWS = ("top", "bottom")
COLUMNS = (1, 2)
"""The number that is said for a column, from the left."""
WORDINGS = (
    "Which one is in the {} row?",
    "What is in the {} row?",
    "In the {} row, what do you see?",
    "Name what the {} row shows.",
)
SIDE = (3 / 4, 1.0)
"""Smallest and largest side of a picture, in parts of the shorter side of its cell."""


def latin_page(rows: np.ndarray, columns: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """The first 2 × 2 of the cyclic Latin square of order 5, ``(i + j) mod 5``, with its rows,
    columns and symbols permuted: no class is twice in a row or in a column.

    Shape: permutations ``[…, 5]`` → ``[…, 2, 2]``.
    """
    cyclic = (rows[..., :2, None] + columns[..., None, :2]) % len(CLASSES)
    flat = np.take_along_axis(symbols, cyclic.reshape(*cyclic.shape[:-2], 4), -1)
    return flat.reshape(cyclic.shape)


@functools.cache
def longest_sound() -> float:
    """No spoken number takes more seconds, with the silence around it."""
    clips = embedded_clips()
    words = [
        len(word) for word, digit in zip(clips.words, clips.digit, strict=True) if digit in COLUMNS
    ]
    return max(words) / SAMPLE_RATE / SPEED[0] + 2 * GAP[1]


class Page(NamedTuple):
    """What is shown, said and asked, before it is drawn."""

    classes: np.ndarray
    """Of each cell, ``[2, 2]``."""
    pictures: np.ndarray
    """Which of the split's images, ``[2, 2]``."""
    sides: np.ndarray
    """In parts of the shorter side of a cell, ``[2, 2]``."""
    places: np.ndarray
    """Where a picture begins in its cell, in parts of the room that it leaves, ``[2, 2, 2]``:
    y, x."""
    row: int
    column: int
    text: str
    said: Utterance


class Asked(NamedTuple):
    """A text in bytes of UTF-8, int64 ``[L]``; a page, float32 ``[1, H, W]``; and a sound, float32
    ``[samples]`` at `SAMPLE_RATE`.
    """

    text: Tensor
    image: Tensor
    sound: Tensor


class Pages(Dataset[tuple[Asked, dict[str, Tensor]]]):
    """Asks "what" is in one cell of a page of 2 × 2 real images, a question that needs a text, a
    page and a sound, each of them; and "where" that is, for which text and sound are enough.

    The text names the row (`ROWS`, in one of `WORDINGS`), and the sound says the number of the
    column, "one" or "two", by one of the split's voices (`tasks.data.spoken`), in training at other
    speeds. Row, column and wording are uniform, independent of each other and of the page, whose
    classes are a `latin_page` of five with uniform permutations. So "what" is

    - one of two classes, of 1/2 each, given the page and the row, or the page and the column: a row
      and a column have each class once at most;
    - one of five, of 1/5 each, given the row and the column without the page;
    - given the page alone as often as its class is among the four: 2/4 at most.

    "Where" has 1/2 given the row or the column, and 1/4 without both.

    Each picture is square, of any side (`SIDE`) and anywhere in its cell that keeps it whole, on
    black; cells are a half of the page's height and width.

    Item ``index`` follows from ``(split, seed, index)`` alone; the split's voices say it in turn.
    Indices beyond the length are further items: item i of epoch e is ``e · samples + i``. Images
    are the embedded ones of `CLASSES`, split as ``tasks.data.Images`` does.

    Shape: an item is an `Asked`, its page of values in 0 … 1 normalised by ``mean`` and ``std``,
    and int64 scalars ``{"what": …, "where": …}``.

    Args:
        samples: items in an epoch.
        size: height and width of the page.
        seed: of everything drawn.
        split_seed: of the images that validate instead of train.
    """

    classes: ClassVar = {"what": list(CLASSES), "where": PARTS}

    def __init__(
        self,
        split: Split,
        samples: int = 2000,
        size: tuple[int, int] = (32, 32),
        *,
        seed: int = 0,
        split_seed: int = 0,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {SPLITS}")
        if samples < 1:
            raise ValueError(f"samples is {samples}; expected at least 1")
        if len(size) != 2 or min(size) < len(ROWS):
            raise ValueError(f"size is {size}; expected height and width, at least 2 pixels each")
        if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
            raise ValueError(
                f"mean and std are {mean} and {std}; expected finite numbers, std above 0"
            )
        for name, value in (("seed", seed), ("split_seed", split_seed)):
            if value < 0:
                raise ValueError(f"{name} is {value}; expected at least 0")
        self.split: Split = split
        self.samples = samples
        self.size = (size[0], size[1])
        self.seed = seed
        self.mean, self.std = mean, std
        base = Embedded(train=split != "test")
        chosen = (
            np.arange(len(base.targets))
            if split == "test"
            else hold_out(base.targets, ["val"], split_seed)[split]
        )
        labels = np.array([_number(base.classes[target]) for target in base.targets[chosen]])
        self.images, self.labels = base.data[chosen][labels >= 0], labels[labels >= 0]
        self._members = [np.flatnonzero(self.labels == label) for label in range(len(CLASSES))]

    def __len__(self) -> int:
        return self.samples

    def _draw(self, index: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng((SPLITS.index(self.split), self.seed, index, purpose))

    def page(self, index: int) -> Page:
        """The plan of item ``index``: all but its pixels and its sound."""
        draw = self._draw(index, 0)
        row, column, wording = draw.integers((len(ROWS), len(COLUMNS), len(WORDINGS))).tolist()
        classes = latin_page(*(draw.permutation(len(CLASSES)) for _ in range(3)))
        pictures = [draw.choice(self._members[label]) for label in classes.flat]
        return Page(
            classes,
            np.array(pictures).reshape(classes.shape),
            draw.uniform(*SIDE, classes.shape),
            draw.random((*classes.shape, 2)),
            row,
            column,
            WORDINGS[wording].format(ROWS[row]),
            utterance(draw, self.split, index, np.array([COLUMNS[column]])),
        )

    def __getitem__(self, index: int) -> tuple[Asked, dict[str, Tensor]]:
        page = self.page(index)
        pictures = self.images[page.pictures.ravel()] / 255
        cell = np.array(self.size) / len(ROWS)
        sides = page.sides.reshape(-1, 1) * cell.min()
        corners = np.indices(page.classes.shape).reshape(2, -1).T * cell
        corners = corners + page.places.reshape(-1, 2) * (cell - sides)
        rows, columns = (
            coverage(corners[:, axis] / pixels, sides[:, 0] / pixels, cells, pixels)
            for axis, (pixels, cells) in enumerate(zip(self.size, pictures.shape[1:], strict=True))
        )
        canvas = (rows @ pictures @ columns.transpose(0, 2, 1)).sum(0)
        image = torch.from_numpy(((canvas - self.mean) / self.std).astype(np.float32))[None]
        text = torch.tensor(list(page.text.encode()))
        labels = {
            "what": int(page.classes[page.row, page.column]),
            "where": len(COLUMNS) * page.row + page.column,
        }
        return Asked(text, image, heard(page.said, self._draw(index, 1))), {
            question: torch.tensor(label) for question, label in labels.items()
        }


def _number(name: str) -> int:
    return CLASSES.index(name) if name in CLASSES else -1
