"""Video files: when their frames are shown, frames by number, and which are broken."""

import functools
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

BARE = {"h261", "h263", "h264", "hevc", "vvc", "evc", "mjpeg", "mjpeg_2000", "mpegvideo", "m4v"}
BARE |= {"vc1", "cavsvideo", "avs2", "avs3", "dirac", "dnxhd", "obu", "ingenient", "rawvideo"}
"""FFmpeg's formats of frames alone: whatever times it gives them are made up, of 25 a second."""
ROUNDING = Fraction(1, 1000)
"""Seconds by which a file's clock may be late: Matroska counts milliseconds."""

Colours = Literal["rgb24", "gray"]


class Broken(ValueError):
    """A video file that cannot be read as asked: one line that names it, why, and the way out."""

    reason: str

    @classmethod
    def because(
        cls, path: str | Path, reason: str, way_out: str = "repair or remove it"
    ) -> "Broken":
        error = cls(
            f"cannot read the video {path} ({reason}); {way_out}, "
            "or leave out such files with --data.on_error skip"
        )
        error.reason = reason
        return error


class Timeline(NamedTuple):
    """When the frames of a file are shown, by its packets; nothing is decoded for it."""

    ticks: np.ndarray
    """When each frame comes on screen, rising, int64 ``[N]``, of the file's own clock."""
    tick: Fraction
    """Seconds of a tick."""
    end: int
    """When the last frame goes, in ticks."""
    keys: np.ndarray
    """Those of ``ticks`` that decoding can begin at."""

    @property
    def seconds(self) -> Fraction:
        """From when the first frame comes to when the last one goes."""
        return (self.end - int(self.ticks[0])) * self.tick

    @property
    def rate(self) -> Fraction:
        """Frames a second on average: ``(N - 1) / (last - first)``; of one, 1 over its time."""
        count, span = len(self.ticks) - 1, int(self.ticks[-1] - self.ticks[0])
        return count / (span * self.tick) if count else 1 / self.seconds

    def at(self, moments: Sequence[Fraction]) -> list[int]:
        """The frame on screen at each of ``moments``, seconds from the first frame on: the last
        that came at it or before. A tick may be late by rounding, of which `ROUNDING` is forgiven,
        but no more than a tick or a quarter of the time between frames.
        """
        late = min(1, ROUNDING / self.tick, 1 / self.rate / self.tick / 4)
        until = [int(self.ticks[0]) + int(moment / self.tick + late) for moment in moments]
        found = np.searchsorted(self.ticks, until, side="right") - 1
        return np.clip(found, 0, None).tolist()


def library() -> Any:
    """PyAV. Raises ImportError without it, and tells how to get it."""
    try:
        av: Any = importlib.import_module("av")
    except ImportError as error:
        raise ImportError(
            "video files are read by the library av: pip install 'mmpos[video]'"
        ) from error
    return av


@contextmanager
def _open(path: str | Path, file_fps: float | None) -> Iterator[tuple[Any, Any]]:
    """The file, and the first stream in it that is a video (and no cover of an album)."""
    av = library()
    try:
        with open(path, "rb") as file:  # so that no name is taken for an address
            if not os.fstat(file.fileno()).st_size:
                raise Broken.because(path, "it has 0 bytes")
            with av.open(file) as container:
                cover = av.stream.Disposition.attached_pic
                streams = [s for s in container.streams.video if not s.disposition & cover]
                if container.format.name.endswith("_pipe") or container.format.name == "image2":
                    raise Broken.because(path, "it is a picture")
                if not streams:
                    raise Broken.because(path, "it has no video")
                if container.format.name in BARE and file_fps is None:
                    raise _without_rate(path)
                streams[0].codec_context.thread_count = 1  # loader processes share the cores
                yield container, streams[0]
    except av.FFmpegError as error:
        log = error.log[2] if error.log else ""
        reason = ": ".join(part for part in (error.strerror, log.strip(" .\n")) if part)
        raise Broken.because(path, " ".join(reason.split())) from error
    except OSError as error:
        raise Broken.because(path, error.strerror or "it cannot be opened") from error


def _without_rate(path: str | Path) -> Broken:
    return Broken.because(
        path, "it does not tell when its frames are shown", "give its rate, --data.file_fps FPS"
    )


def check(path: str | Path, file_fps: float | None = None) -> None:
    """Raises `Broken` for what a file's beginning shows to be no video that can be read."""
    with _open(path, file_fps):
        pass


def timeline(path: str | Path, file_fps: float | None = None) -> Timeline:
    """When the frames of a file are shown. Every packet is looked at and none decoded, as headers
    may tell of no length, or of a wrong one; it is remembered while the file stays as it is.

    Args:
        file_fps: frames a second of a file that does not tell its own.

    Raises: `Broken`.
    """
    try:
        known = os.stat(path)
    except OSError as error:
        raise Broken.because(path, error.strerror or "it cannot be opened") from error
    return _timeline(path, file_fps, known.st_mtime_ns, known.st_size)


@functools.lru_cache(maxsize=512)
def _timeline(path: str | Path, file_fps: float | None, *version: int) -> Timeline:
    with _open(path, file_fps) as (container, stream):
        packets, count = [], 0
        for packet in container.demux(stream):
            count += packet.size > 0 or packet.dts is not None  # none for the one that flushes
            if packet.size > 0 and not packet.is_discard:
                packets.append((packet.pts, packet.is_keyframe, packet.duration or 0))
        if count < stream.frames:
            raise Broken.because(path, f"cut off: it has {count} of its {stream.frames} frames")
        if not packets:
            raise Broken.because(path, "it has no frames")
        if container.format.name in BARE or any(packet[0] is None for packet in packets):
            if file_fps is None:
                raise _without_rate(path)
            ticks = np.arange(len(packets))
            return Timeline(ticks, 1 / Fraction(str(file_fps)), len(ticks), ticks[:0])
        keys = np.unique([packet[0] for packet in packets if packet[1]])
        ticks = np.unique([packet[0] for packet in packets])
        if len(keys):  # what comes before it cannot be decoded
            ticks = ticks[ticks >= keys[0]]
        last, rate = max(packets)[2], stream.average_rate or file_fps
        if not last and len(ticks) > 1:
            last = max(1, round((ticks[-1] - ticks[0]) / (len(ticks) - 1)))
        elif not last and rate:
            last = max(1, round(1 / rate / stream.time_base))
        elif not last:
            raise _without_rate(path)
        end = int(ticks[-1]) + last
        whole, there = _told(stream.metadata.get("DURATION", "")), end * float(stream.time_base)
        if whole - there > max(0.1, 2 * last * stream.time_base):
            raise Broken.because(path, f"cut off: it has {there:.2f} of its {whole:.2f} seconds")
        return Timeline(ticks, Fraction(stream.time_base), end, keys)


def _told(duration: str) -> float:
    """Seconds of Matroska's ``h:m:s``; 0 for anything else."""
    try:
        hours, minutes, seconds = map(float, duration.split(":"))
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def read_frames(
    path: str | Path,
    numbers: Sequence[int],
    colours: Colours = "rgb24",
    file_fps: float | None = None,
) -> Tensor:
    """Frames ``numbers``, rising, of the file's `timeline`: uint8 ``[T, 3 or 1, H, W]``, turned as
    the file says they are to be shown. Pixels are taken to be square.

    Decoding begins at the last key frame before the first of them and ends with the last; in a
    file that does not tell times, at the beginning.

    Raises: `Broken` for a file that cannot be decoded so far.
    """
    line = timeline(path, file_fps)
    wanted = [int(tick) for tick in line.ticks[list(numbers)]]
    before = line.keys[line.keys <= wanted[0]][1:]  # to the first there is no need to seek
    # a container may seek to too late a place: then go back twice as far, at last to the beginning
    for back in [2**power for power in range(len(before).bit_length())]:
        found = _decoded(path, wanted, colours, file_fps, int(before[-back]))
        if found is not None:
            return found
    found = _decoded(path, wanted, colours, file_fps)
    assert found is not None
    return found


def _decoded(
    path: str | Path,
    wanted: Sequence[int],
    colours: Colours,
    file_fps: float | None,
    start: int | None = None,
) -> Tensor | None:
    """What is on screen at ``wanted`` ticks; None where decoding began after the first of them."""
    left, arrays, shown = list(wanted), [], None
    with _open(path, file_fps) as (container, stream):
        if start is not None:
            container.seek(start, stream=stream)
        for tick, frame in _frames(container, stream):
            if shown is None and start is not None and tick > left[0]:
                return None
            while left and left[0] < tick:
                arrays.append(_array(path, shown or frame, colours))
                left.pop(0)
            if not left:
                break
            shown = frame
            if left == [tick]:  # so that no frame is decoded in vain
                break
        if shown is None and start is not None:
            return None
        arrays += [_array(path, shown, colours) for _ in left if shown is not None]
    _alike(path, {array.shape for array in arrays})
    frames = torch.from_numpy(np.stack(arrays))
    return frames[:, None] if colours == "gray" else frames.movedim(-1, 1)


def _frames(container: Any, stream: Any) -> Iterator[tuple[int, Any]]:
    """Frames as they are decoded, with their ticks; counted where the file tells none."""
    bare = container.format.name in BARE
    for number, frame in enumerate(container.decode(stream)):
        yield number if bare or frame.pts is None else frame.pts, frame


def _array(path: str | Path, frame: Any, colours: Colours) -> np.ndarray:
    _whole(path, frame)
    turns = frame.rotation / 90  # counter-clockwise
    array = frame.to_ndarray(format=colours)
    return np.rot90(array, int(turns)) if turns % 1 == 0 else array


def _whole(path: str | Path, frame: Any) -> None:
    if frame.is_corrupt:
        at = "" if frame.time is None else f" at {frame.time:.2f} s"
        raise Broken.because(path, f"corrupt: its frame{at} is not whole")


def _alike(path: str | Path, sizes: set) -> None:
    if not sizes:
        raise Broken.because(path, "none of its frames can be decoded")
    if len(sizes) > 1:
        raise Broken.because(path, "its frames are of several sizes", "convert it to one size")


def unreadable(paths: Sequence[str], file_fps: float | None = None) -> dict[str, str]:
    """Those of ``paths`` that cannot be read whole, and why; decodes every file once."""
    reasons: dict[str, str] = {}
    for path in paths:
        try:
            timeline(path, file_fps)
            with _open(path, file_fps) as (container, stream):
                sizes = set()
                for _, frame in _frames(container, stream):
                    _whole(path, frame)
                    sizes.add((frame.height, frame.width))
                _alike(path, sizes)
        except Broken as error:
            reasons[path] = error.reason
    return reasons
