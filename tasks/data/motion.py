"""A picture that goes round: a question that only the order of frames answers, at any rate."""

import math
from fractions import Fraction
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .scenes import SIDE, coverage
from .sources import Embedded
from .splits import SPLITS, hold_out

Split = Literal["train", "val", "test"]

MOTIONS = {
    "slow clockwise": 1,
    "slow counter-clockwise": -1,
    "fast clockwise": 3,
    "fast counter-clockwise": -3,
}
"""Turns in ``PERIOD`` seconds, clockwise on a screen whose y points down."""
PERIOD = 2
"""Seconds of a slow turn."""
RADIUS = (3 / 16, 1 / 4)
"""Smallest and largest radius of the circle, in parts of the canvas's shorter side."""


class Orbit(NamedTuple):
    """What goes round and how, before it is drawn; lengths in parts of the shorter side."""

    picture: int
    """Which of the split's images."""
    how: int
    side: float
    radius: float
    centre: np.ndarray
    """Of the circle: y, x."""
    phase: float
    """Where it begins, in turns clockwise from the right."""
    places: np.ndarray
    """Of the picture's centre in each frame, ``[T, 2]``: y, x."""


class Motion(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Moves a real image round a circle, and asks "what" moves and "how" (``MOTIONS``).

    At time s the picture is at angle ``2π · (phase + turns · s / PERIOD)``, whatever the frame
    rate: frame t is at ``s = t / fps``, and a moment that two rates share looks the same in both.
    Motion and phase are uniform, independent of each other and of all else: the picture, its side
    (as ``Scenes`` has it), and a circle of any radius (``RADIUS``), anywhere on the black canvas
    that keeps the picture whole.

    Frames lie on the N = PERIOD · fps places of a slow turn, from the phase on; frame t is at place
    ``turns · t`` modulo N, from integers. Where a clip is of whole slow turns (``seconds`` is a
    multiple of ``PERIOD``) and ``gcd(3, N) = 1``, all four motions from a phase show the same
    frames, bit for bit, in another order; so every "how" has probability 1/4 given the bag of
    frames. Of 2 seconds, where N = T, this holds at 4, 5, 8, 10, 16, 20 and 32 frames a second. It
    fails at 6, 12, 24 and 30, where a fast picture meets a third of the places thrice, and in parts
    of a turn, where a slow one does not come round. ``shuffled_is_chance`` tells. At 3 frames a
    second and fewer rotation aliases, and order does not answer either: at 3 both fast motions are
    one, half a turn a frame; at 2 (4 frames a turn) fast clockwise is slow counter-clockwise; at 1
    all are one.

    One frame says nothing of "how", but two neighbours do: where a token is a tubelet of several
    frames, its content tells, and tokens need no time. For that, use tubelets of one frame.

    Clip ``index`` follows from ``(split, seed, index)`` alone and shows image ``index`` modulo
    their number. Indices beyond the length are further clips: item i of epoch e is
    ``e · samples + i``. Images are the embedded ones, split as ``tasks.data.Images`` does.

    Shape: an item is float32 ``[1, T, H, W]``, values in 0 … 1 normalised by ``mean`` and ``std``,
    and int64 scalars ``{"what": …, "how": …}``.

    Args:
        samples: clips in an epoch; None: as many as there are images.
        size: height and width of the canvas; the circle stays round.
        fps: frames a second, whole or not.
        seconds: length; with ``fps`` a whole number of frames.
        seed: of everything drawn.
        split_seed: of the images that validate instead of train.
    """

    classes: ClassVar = {"what": list(Embedded.classes), "how": list(MOTIONS)}

    def __init__(
        self,
        split: Split,
        samples: int | None = None,
        size: tuple[int, int] = (32, 32),
        fps: float = 8,
        seconds: float | Fraction = 2.0,
        *,
        seed: int = 0,
        split_seed: int = 0,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {SPLITS}")
        if samples is not None and samples < 1:
            raise ValueError(f"samples is {samples}; expected at least 1")
        if len(size) != 2 or min(size) < 2:
            raise ValueError(f"size is {size}; expected height and width, at least 2 pixels each")
        for name, value in (("fps", fps), ("seconds", seconds), ("std", std)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; expected a finite number above 0")
        if not math.isfinite(mean):
            raise ValueError(f"mean is {mean}; expected a finite number")
        for name, value in (("seed", seed), ("split_seed", split_seed)):
            if value < 0:
                raise ValueError(f"{name} is {value}; expected at least 0")
        rate = Fraction(str(fps))  # as written: 29.97 is 2997/100
        frames = rate * Fraction(str(seconds))
        if frames.denominator != 1:
            raise ValueError(
                f"fps {fps} for {seconds} seconds is {float(frames):g} frames; expected a whole "
                f"number, as for {float(math.ceil(frames) / rate):g} seconds"
            )
        self.split: Split = split
        self.size = (size[0], size[1])
        self.fps = fps
        self.seconds = seconds
        self.frames = int(frames)
        self.seed = seed
        self.mean = mean
        self.std = std
        base = Embedded(train=split != "test")
        chosen = (
            np.arange(len(base.targets))
            if split == "test"
            else hold_out(base.targets, ["val"], split_seed)[split]
        )
        self.images, self.labels = base.data[chosen], base.targets[chosen]
        self.samples = len(self.images) if samples is None else samples
        turn = rate * PERIOD
        turned = np.outer(list(MOTIONS.values()), np.arange(self.frames)) * turn.denominator
        self._turned = turned % turn.numerator  # integers, so that equal places are equal bits
        self._turn = turn.numerator

    def __len__(self) -> int:
        return self.samples

    @property
    def shuffled_is_chance(self) -> bool:
        """Whether all motions from a phase show one bag of frames, which says nothing of "how"."""
        return bool((np.sort(self._turned) == np.sort(self._turned[0])).all())

    def orbit(self, index: int) -> Orbit:
        """The plan of clip ``index``: all but its pixels."""
        draw = np.random.default_rng((SPLITS.index(self.split), self.seed, index))
        how = int(draw.integers(len(MOTIONS)))
        side, radius, phase = draw.uniform(*SIDE), draw.uniform(*RADIUS), draw.random()
        middle = np.array(self.size) / min(self.size) / 2
        centre = middle + (middle - radius - side / 2) * draw.uniform(-1, 1, 2)
        angle = 2 * np.pi * (phase + self._turned[how] / self._turn)
        places = centre + radius * np.stack([np.sin(angle), np.cos(angle)], 1)
        return Orbit(index % len(self.images), how, side, radius, centre, phase, places)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        seen = self.orbit(index)
        picture = self.images[seen.picture] / 255
        rows, columns = (
            coverage((seen.places[:, axis] - seen.side / 2) * part, extent, cells, pixels)
            for axis, (pixels, cells) in enumerate(zip(self.size, picture.shape, strict=True))
            for part in [min(self.size) / pixels]
            for extent in [np.full(self.frames, seen.side * part)]
        )
        canvas = (rows @ picture @ columns.transpose(0, 2, 1) - self.mean) / self.std
        labels = {"what": int(self.labels[seen.picture]), "how": seen.how}
        return torch.from_numpy(canvas.astype(np.float32))[None], {
            question: torch.tensor(label) for question, label in labels.items()
        }
