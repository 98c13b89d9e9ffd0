"""Sounds as frames, whole or in windows, in batches that keep their lengths."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .audio_files import read_audio, resample, seconds_of
from .audio_sources import Clip
from .features import Features, SpecAugment
from .padding import padded
from .spoken import SpokenDigits

Longer = Literal["raise", "windows", "extend"]


class Sound(NamedTuple):
    """Clips of any lengths, as `tasks.AudioClassification` takes them."""

    values: Tensor
    """Frames ``[W, bins, T]``, 0 beyond the end of each row."""
    mask: Tensor
    """``[W, T]``, True for what is real."""
    step: float
    """Seconds from a frame to the next."""
    owner: Tensor | None = None
    """The clip of each row ``[W]``, where clips are cut into windows; each row is one if None."""


class Source(Protocol):
    """Sounds by their number, and what is to be told of them."""

    def __len__(self) -> int: ...

    def seconds(self, index: int) -> float:
        """How long a sound is."""
        ...

    def name(self, index: int) -> str:
        """What errors call it."""
        ...

    def sound(self, index: int, start: float, seconds: float | None) -> Tensor:
        """Samples ``[T]`` from ``start`` on, to the end or of so many seconds."""
        ...

    def labels(self, index: int) -> Any:
        """What stands beside it in a batch."""
        ...


class Files:
    """Clips of files; labels are a class, several (a row of 0 and 1), or the path if there are no
    ``classes``.
    """

    def __init__(
        self, clips: Sequence[Clip], rate: int, classes: int = 0, *, multilabel: bool = False
    ) -> None:
        self.clips, self.rate = clips, rate
        self.classes, self.multilabel = classes, multilabel

    def __len__(self) -> int:
        return len(self.clips)

    def seconds(self, index: int) -> float:
        return seconds_of(self.name(index))

    def name(self, index: int) -> str:
        return self.clips[index % len(self)].path

    def sound(self, index: int, start: float, seconds: float | None) -> Tensor:
        return read_audio(self.name(index), self.rate, start, seconds)

    def labels(self, index: int) -> Any:
        clip = self.clips[index % len(self)]
        if not self.classes:
            return clip.path
        if not self.multilabel:
            return {"class": clip.labels[0]}
        row = torch.zeros(self.classes)
        row[list(clip.labels)] = 1
        return {"class": row}


class Digits:
    """Sequences of spoken digits at ``rate``."""

    def __init__(self, digits: SpokenDigits, rate: int) -> None:
        self.digits, self.rate = digits, rate

    def __len__(self) -> int:
        return len(self.digits)

    def seconds(self, index: int) -> float:
        return self.digits.utterance(index).samples / self.digits.sample_rate

    def name(self, index: int) -> str:
        said = self.digits.utterance(index)
        return f"a sequence of {len(said.digits)} digits"

    def sound(self, index: int, start: float, seconds: float | None) -> Tensor:
        whole = resample(self.digits[index][0], self.digits.sample_rate, self.rate)
        first = round(start * self.rate)
        return whole[first : None if seconds is None else first + round(seconds * self.rate)]

    def labels(self, index: int) -> Any:
        return self.digits.labels(index)


class Sounds(Dataset[tuple[list[Tensor], Any]]):
    """Item ``i`` is the frames ``[bins, T]`` of each window of sound ``i``, and its labels.

    A sound of up to ``seconds`` is a single window. A longer one is refused (``raise``), is whole
    all the same (``extend``), or is cut into ``windows`` of that length, which share ``overlap`` of
    it with the one before; the last ends with the sound, and shares more. With a ``seed``, for
    training, it is a single window from a random place instead, and `SpecAugment` masks its frames;
    what is drawn follows from ``(seed, i)``. Each window is a sound of its own to `Features`.

    Raises: ValueError for a sound that is longer, naming it.
    """

    def __init__(
        self,
        source: Source,
        features: Features,
        seconds: float,
        longer: Longer,
        overlap: float = 0.0,
        augment: SpecAugment | None = None,
        seed: int | None = None,
    ) -> None:
        self.source, self.features = source, features
        self.seconds, self.overlap = seconds, overlap
        self.longer: Longer = longer
        self.augment, self.seed = augment, seed

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self, epoch: int) -> Sequence[float]:
        """How long each sample of an epoch is, in seconds; of files by their headers, read once."""
        if isinstance(self.source, Files):
            return self._of_files
        start = epoch * len(self)
        return [self._length(index) for index in range(start, start + len(self))]

    @functools.cached_property
    def _of_files(self) -> Sequence[float]:
        return [self._length(index) for index in range(len(self))]

    def _length(self, index: int) -> float:
        own = self.source.seconds(index)
        return min(own, self.seconds) if self.longer == "windows" else own

    def check(self, index: int) -> None:
        """Raise for a sound that is longer than may be."""
        own = self.source.seconds(index)
        if self.longer == "raise" and own > self.seconds + 1 / self.features.rate:
            raise ValueError(
                f"{self.source.name(index)} is {own:.2f} seconds long, and the model is made for "
                f"{self.seconds:g}: --data.longer windows averages over parts of it, extend passes "
                "it on whole (for encodings that go on), or --data.seconds makes another model"
            )

    def __getitem__(self, index: int) -> tuple[list[Tensor], Any]:
        self.check(index)
        labels = self.source.labels(index)
        if self.seed is None:
            sound = self.source.sound(index, 0.0, None)
            return [self.features(part) for part in self._windows(sound)], labels
        with isolate_rng(include_cuda=False):
            torch.default_generator.manual_seed(hash((self.seed, index)))
            start, part = 0.0, None
            if self.longer == "windows" and self.source.seconds(index) > self.seconds:
                part = self.seconds
                start = float(torch.rand(())) * (self.source.seconds(index) - part)
            frames = self.features(self.source.sound(index, start, part))
            if self.augment is not None:
                frames = self.augment(frames, self.features.step)
        return [frames], labels

    def _windows(self, sound: Tensor) -> list[Tensor]:
        length = self.features.samples(self.seconds)
        if self.longer != "windows" or len(sound) <= length:
            return [sound]
        hop = max(1, round(length * (1 - self.overlap)))
        last = len(sound) - length
        return [sound[start : start + length] for start in (*range(0, last, hop), last)]

    def batch(self, items: Sequence[tuple[list[Tensor], Any]]) -> tuple[Sound, Any]:
        """Of items: their windows, padded to the longest, and all labels."""
        windows = [frames.T for own, _ in items for frames in own]
        counts = torch.tensor([len(own) for own, _ in items])
        values, mask = padded(windows)
        owner = torch.arange(len(items)).repeat_interleave(counts) if counts.max() > 1 else None
        sound = Sound(values.mT.contiguous(), mask, self.features.step, owner)
        return sound, default_collate([labels for _, labels in items])
