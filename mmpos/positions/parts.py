"""What a multimodal sequence is made of, each part with its positions in t, h and w."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int, Num
from torch import Tensor

from mmpos.positions.base import check_size
from mmpos.positions.counting import Counting


class Placed(NamedTuple):
    """Tokens of a part, counted from its start."""

    positions: Num[Tensor, "length 3"]
    reach: int
    """From the start of this part to that of the next."""


@runtime_checkable
class Part(Protocol):
    """A run of tokens in a sequence."""

    def placed(self, counting: Counting) -> Placed:
        """Positions from 0, by these rules."""
        ...


@dataclass(frozen=True)
class Text:
    """``length`` tokens that have the same position on all axes.

    Args:
        step: from each to the next: 0 for marks that share one position.
    """

    length: int
    step: int = 1

    def __post_init__(self) -> None:
        _check_count("length of text", self.length)
        _check_count("step of text", self.step)

    def placed(self, counting: Counting) -> Placed:
        return _line(torch.arange(self.length) * self.step)


@dataclass(frozen=True)
class Image:
    """An image of ``height × width`` patches: all at one time, in row-major order once merged."""

    height: int
    width: int

    def __post_init__(self) -> None:
        check_size("height of an image", self.height)
        check_size("width of an image", self.width)

    def placed(self, counting: Counting) -> Placed:
        return _block(torch.zeros(1, dtype=torch.int64), self.height, self.width, counting)


@dataclass(frozen=True)
class Video:
    """``frames`` of ``height × width`` patches each.

    Args:
        frames: steps in time, after frames were joined in tubelets.
        rate: such steps in a second; or
        seconds: from one step to the next, transformers' ``second_per_grid``; or the time of each
            step, for frames that are not evenly apart.
        stamps: text tokens before each frame, one number for all or one for each. Each frame then
            is an image of its own, and time is in the text (Qwen3-VL).

    Raises: ValueError for both of rate and seconds, one not above 0, times that go back, or stamps
        or times for other frames.
    """

    frames: int
    height: int
    width: int
    rate: float | None = field(default=None, kw_only=True)
    seconds: float | Sequence[float] | None = field(default=None, kw_only=True)
    stamps: int | Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_size("frames of a video", self.frames)
        check_size("height of a video", self.height)
        check_size("width of a video", self.width)
        if self.rate is not None and self.seconds is not None:
            raise ValueError(
                f"a video has a rate or seconds from frame to frame, got {self.rate} and "
                f"{self.seconds}"
            )
        _check_positive("rate of a video", self.rate)
        if isinstance(self.seconds, Sequence):
            self._check_times(self.seconds)
        else:
            _check_positive("seconds of a video", self.seconds)
        if isinstance(self.stamps, Sequence) and len(self.stamps) != self.frames:
            raise ValueError(
                f"stamps has a number for each of {self.frames} frames, got {len(self.stamps)}"
            )

    def _check_times(self, times: Sequence[float]) -> None:
        if len(times) != self.frames:
            raise ValueError(
                f"seconds has a time for each of {self.frames} frames, got {len(times)}"
            )
        if not all(0 <= early <= late < math.inf for early, late in pairwise((0.0, *times))):
            raise ValueError(f"times of frames are 0 or more and do not go back, got {times}")

    def placed(self, counting: Counting) -> Placed:
        if self.stamps is not None:
            each = self.stamps if isinstance(self.stamps, Sequence) else [self.stamps] * self.frames
            frame = Image(self.height, self.width)
            return chain((part for stamp in each for part in (Text(stamp), frame)), counting)
        seconds = self.seconds if self.rate is None else 1 / self.rate
        times = counting.times(self.frames, seconds, f"a video of {self.frames} frames")
        return _block(times, self.height, self.width, counting)


@dataclass(frozen=True)
class Audio:
    """``count`` tokens of sound, ``rate`` in a second, at the same position on all axes."""

    count: int
    rate: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("count of audio tokens", self.count)
        _check_positive("rate of audio", self.rate)

    def placed(self, counting: Counting) -> Placed:
        seconds = None if self.rate is None else 1 / self.rate
        return _line(counting.times(self.count, seconds, f"audio of {self.count} tokens"))


@dataclass(frozen=True)
class Interleaved:
    """A video and its sound from the same start, in turns of ``chunk`` seconds, pictures first.

    Source: TMRoPE (Qwen2.5-Omni, arXiv:2503.20215).

    >>> both = Interleaved(Video(4, 2, 2, rate=1), Audio(4, rate=1))
    >>> both.kinds(Counting(merge=2, ticks=25)).int().tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]

    Raises: ValueError for a chunk that is not above 0, or a video with stamps; and when placed
        without ticks.
    """

    video: Video
    audio: Audio
    chunk: float = 2.0

    def __post_init__(self) -> None:
        _check_positive("chunk, in seconds,", self.chunk)
        if self.video.stamps is not None:
            raise ValueError(
                f"a video interleaved with audio has no stamps, got {self.video.stamps}"
            )

    def placed(self, counting: Counting) -> Placed:
        video, audio = self.video.placed(counting), self.audio.placed(counting)
        order = self._order(video, audio, counting)
        both = torch.cat((video.positions, audio.positions))[order]
        return Placed(both, max(video.reach, audio.reach))

    def kinds(self, counting: Counting) -> Bool[Tensor, " length"]:
        """Which tokens are sound."""
        video, audio = self.video.placed(counting), self.audio.placed(counting)
        return self._order(video, audio, counting) >= len(video.positions)

    def _order(self, video: Placed, audio: Placed, counting: Counting) -> Int[Tensor, " length"]:
        if counting.ticks is None:
            raise ValueError(
                f"chunks of {self.chunk} seconds need ticks in a second, got ticks=None"
            )
        span = counting.ticks * self.chunk
        turns = [(part.positions[:, 0].double() / span).floor() * 2 for part in (video, audio)]
        return torch.cat((turns[0], turns[1] + 1)).argsort(stable=True)


def chain(parts: Iterable[Part], counting: Counting) -> Placed:
    """Parts one after the other, each where the one before it says."""
    found, start = [torch.zeros(0, 3, dtype=torch.int64)], 0
    for part in parts:
        own, reach = part.placed(counting)
        found.append(own + start)
        start += reach
    return Placed(torch.cat(found), start)


def _line(at: Tensor) -> Placed:
    return Placed(at.unsqueeze(-1).expand(-1, 3), math.floor(at[-1]) + 1 if len(at) else 0)


def _block(times: Tensor, height: int, width: int, counting: Counting) -> Placed:
    counting.tokens(height, width)
    rows, columns = height // counting.merge, width // counting.merge
    ticks = (times, *(torch.arange(size, dtype=times.dtype) for size in (rows, columns)))
    positions = torch.stack(torch.meshgrid(*ticks, indexing="ij"), dim=-1).view(-1, 3)
    reach = max(rows, columns)
    if counting.follow == "max":
        reach = max(reach, math.floor(times[-1]) + 1)
    return Placed(positions, reach)


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"{name} must be a whole number of 0 or more, got {count!r}")


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
