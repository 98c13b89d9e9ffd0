"""Clips of videos: which moments they show, how they are looked at, and batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.transforms.v2 import functional

from .motion import Motion
from .video_files import Timeline, read_frames, timeline


class Clips(NamedTuple):
    """Clips of videos, as `tasks.VideoClassification` takes them."""

    values: Tensor
    """Frames ``[W, C, T, H, W']``, 0 beyond the end of each row."""
    mask: Tensor | None
    """``[W, T]``, True for real frames; None where all are."""
    step: float | tuple[float, ...]
    """Seconds from a frame to the next, of each row where they differ in it. These are plain
    numbers, which a run in half precision does not round.
    """
    owner: Tensor | None = None
    """The video of each row ``[W]``; each row is one if None."""


class Part(NamedTuple):
    """One clip: its real frames float32 ``[C, T, H, W]``, and the seconds between them."""

    frames: Tensor
    step: float


class Source(Protocol):
    """Videos by their number, each as one clip or several."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[list[Part], Any]:
        """The clips, and what stands beside them in a batch."""
        ...


@dataclass(frozen=True)
class Augmentation:
    """What is drawn in training for all frames of a clip alike, beside its place in time.

    The crop has the shape of ``image_size`` and lies anywhere in the frame; its area is ``scale``
    of the largest such crop, uniform from the least to the most.

    Args:
        scale: least and most; (1, 1) crops nothing along the shorter side.
        flip: probability of left and right changed, and all motions with them.
    """

    scale: tuple[float, float] = (1.0, 1.0)
    flip: float = 0.0

    def __post_init__(self) -> None:
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale is {self.scale}; expected two parts of an area, 0 < a ≤ b ≤ 1")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}; expected a probability from 0 to 1")


class Look:
    """Makes frames uint8 ``[T, C, H, W]`` of any size to float32 ``[C, T, *size]``, normalised.

    Without a generator (evaluation) they are resized with antialiasing until they cover ``size``,
    the shorter side as long as that, and their centre is cut out; with one `Augmentation` holds.
    """

    def __init__(
        self,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        augment: Augmentation | None = None,
    ) -> None:
        self.size, self.mean, self.std = size, list(mean), list(std)
        self.augment = augment or Augmentation()

    def __call__(self, frames: Tensor, draw: np.random.Generator | None = None) -> Tensor:
        (height, width), (rows, columns) = frames.shape[-2:], self.size
        if draw is None:
            scale = max(rows / height, columns / width)
            cover = [max(rows, round(height * scale)), max(columns, round(width * scale))]
            frames = functional.resize(frames, cover, antialias=True)
            frames = functional.center_crop(frames, [rows, columns])
        else:
            side = draw.uniform(*self.augment.scale) ** 0.5 * min(height / rows, width / columns)
            box = [max(1, round(side * rows)), max(1, round(side * columns))]
            top, left = (
                int(draw.integers(whole - own + 1))
                for whole, own in zip((height, width), box, strict=True)
            )
            frames = functional.resized_crop(
                frames, top, left, *box, size=[rows, columns], antialias=True
            )
            if draw.random() < self.augment.flip:
                frames = functional.horizontal_flip(frames)
        frames = functional.to_dtype(frames, torch.float32, scale=True)
        return functional.normalize(frames, self.mean, self.std).movedim(1, 0)


def evenly(room: Fraction, views: int) -> list[Fraction]:
    """Where ``views`` clips begin: from the start to ``room`` behind it, the middle for one; those
    that would be the same are one.
    """
    if views == 1:
        return [room / 2]
    return list(dict.fromkeys(room * view / (views - 1) for view in range(views)))


class Files:
    """Clips of ``frames`` frames of video files; labels are a class, or the path if there are none.

    Frame k of a clip is what is on screen at ``start + k / fps``, or the k-th from the one there on
    if ``fps`` is None; ``step`` is then 1 over the average rate of the file. A video that ends
    before its clip does has the frames that it has. Evaluation takes ``views`` clips evenly; with a
    ``seed``, for training, it is one from a random place, drawn with all else from
    ``(seed, index)``.
    """

    def __init__(
        self,
        paths: Sequence[str],
        targets: Sequence[int] | None,
        look: Look,
        frames: int,
        fps: float | None,
        *,
        views: int = 1,
        file_fps: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.paths, self.targets, self.look = paths, targets, look
        self.frames, self.views, self.file_fps, self.seed = frames, views, file_fps, seed
        self.rate = None if fps is None else Fraction(str(fps))  # as written: 29.97 is 2997/100

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[list[Part], Any]:
        path = self.paths[index % len(self)]
        labels = path if self.targets is None else {"class": self.targets[index % len(self)]}
        draw = None if self.seed is None else np.random.default_rng((self.seed, index))
        line = timeline(path, self.file_fps)
        step = float(1 / (self.rate or line.rate))
        colours = "gray" if len(self.look.mean) == 1 else "rgb24"
        parts = [
            Part(self.look(read_frames(path, numbers, colours, self.file_fps), draw), step)
            for numbers in self._numbers(line, draw)
        ]
        return parts, labels

    def _numbers(self, line: Timeline, draw: np.random.Generator | None) -> list[list[int]]:
        """Which frames of the file each clip has."""
        count = len(line.ticks)
        if self.rate is None:
            room = max(0, count - self.frames)
            if draw is not None:
                firsts = [int(draw.integers(room + 1))]
            else:
                firsts = dict.fromkeys(round(start) for start in evenly(Fraction(room), self.views))
            return [list(range(first, min(first + self.frames, count))) for first in firsts]
        room = max(Fraction(0), line.seconds - self.frames / self.rate)
        starts = evenly(room, self.views) if draw is None else [room * Fraction(draw.random())]
        moments = ([start + k / self.rate for k in range(self.frames)] for start in starts)
        return [line.at([moment for moment in own if moment < line.seconds]) for own in moments]


class Moving:
    """Embedded pictures in motion (`tasks.data.motion.Motion`), each a clip as long as may be."""

    def __init__(self, motion: Motion) -> None:
        self.motion = motion

    def __len__(self) -> int:
        return len(self.motion)

    def __getitem__(self, index: int) -> tuple[list[Part], Any]:
        frames, labels = self.motion[index]
        return [Part(frames, 1 / self.motion.fps)], labels


class Videos(Dataset[tuple[list[Part], Any]]):
    """Item ``i`` is the clips of video ``i`` and its labels.

    Args:
        frames: of a clip in a batch; what a row lacks is 0 at its end, and masked.
        shuffle: what the order of each clip's real frames is drawn from, with ``i``; they are in
            their own order if it is None.
    """

    def __init__(self, source: Source, frames: int, shuffle: tuple[int, ...] | None = None) -> None:
        self.source, self.frames, self.shuffle = source, frames, shuffle

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[list[Part], Any]:
        parts, labels = self.source[index]
        if self.shuffle is not None:
            draw = np.random.default_rng((*self.shuffle, index))
            orders = [draw.permutation(part.frames.shape[1]) for part in parts]
            parts = [
                Part(part.frames[:, order], part.step)
                for part, order in zip(parts, orders, strict=True)
            ]
        return parts, labels

    def batch(self, items: Sequence[tuple[list[Part], Any]]) -> tuple[Clips, Any]:
        """Of items: their clips, and all labels."""
        parts = [part for own, _ in items for part in own]
        lengths = torch.tensor([part.frames.shape[1] for part in parts])
        channels, _, *size = parts[0].frames.shape
        values = torch.zeros(len(parts), channels, self.frames, *size)
        for row, part in zip(values, parts, strict=True):
            row[:, : part.frames.shape[1]] = part.frames
        mask = torch.arange(self.frames) < lengths[:, None]
        steps = [part.step for part in parts]
        counts = torch.tensor([len(own) for own, _ in items])
        clips = Clips(
            values,
            None if mask.all() else mask,
            steps[0] if len(set(steps)) == 1 else tuple(steps),
            torch.arange(len(items)).repeat_interleave(counts) if counts.max() > 1 else None,
        )
        return clips, default_collate([labels for _, labels in items])
