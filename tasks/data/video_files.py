"""Frames of video files by number, and which files are broken."""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .timeline import Timeline, timeline
from .video_opening import Broken, check, library, opened

__all__ = ["Broken", "Timeline", "check", "library", "read_frames", "timeline", "unreadable"]

Colours = Literal["rgb24", "gray"]


def read_frames(
    path: str | Path,
    numbers: Sequence[int],
    colours: Colours = "rgb24",
    file_fps: float | None = None,
) -> Tensor:
    """Frames ``numbers``, rising, of the file's `timeline`: uint8 ``[T, 3 or 1, H, W]``, turned as
    the file says they are to be shown. Pixels are taken to be square.

    Decoding begins at the last of `Timeline.keys` before the first of them, or else at the
    beginning, and ends with the last.

    Raises: `Broken` for a file that cannot be decoded so far.
    """
    line = timeline(path, file_fps)
    wanted = [int(tick) for tick in line.ticks[list(numbers)]]
    before = line.keys[line.keys <= wanted[0]][1:]  # to the first there is no need to seek
    # a container may seek to too late a place: then go back twice as far, at last to the beginning
    for back in [2**power for power in range(len(before).bit_length())]:
        found = _decoded(path, line, wanted, colours, file_fps, int(before[-back]))
        if found is not None:
            return found
    found = _decoded(path, line, wanted, colours, file_fps)
    assert found is not None
    return found


def _decoded(
    path: str | Path,
    line: Timeline,
    wanted: Sequence[int],
    colours: Colours,
    file_fps: float | None,
    start: int | None = None,
) -> Tensor | None:
    """What is on screen at ``wanted`` ticks; None where decoding began after the first of them."""
    left, arrays, shown = list(wanted), [], None
    with opened(path, file_fps) as (container, stream):
        if start is not None:
            container.seek(start, stream=stream)
        for tick, frame in _frames(path, line, container, stream, start):
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


def _frames(
    path: str | Path, line: Timeline, container: Any, stream: Any, start: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Frames as they are decoded, with their ticks, which rise; of a counted file that was sought,
    none where decoding does not begin at one of its keys.
    """
    number, last = -1, None
    for frame in container.decode(stream):
        if line.counted and number < 0 and start is not None:
            if frame.pts not in line.keys:
                return
            number = int(np.searchsorted(line.ticks, frame.pts)) - 1
        number += 1
        tick = frame.pts
        if line.counted:
            tick = int(line.ticks[number]) if number < len(line.ticks) else None
        if tick is None or (last is not None and tick < last):
            raise Broken.because(
                path,
                f"what is shown when is unclear from frame {number} of decoding on",
                "convert it, to .mp4 for instance",
            )
        last = tick
        yield tick, frame
    if line.counted and -1 < number < len(line.ticks) - 1:
        reason = f"damaged: {number + 1} of its {len(line.ticks)} frames can be decoded"
        raise Broken.because(path, reason)


def _array(path: str | Path, frame: Any, colours: Colours) -> np.ndarray:
    _whole(path, frame)
    return _turned(path, frame)(frame.to_ndarray(format=colours))


def _turned(path: str | Path, frame: Any) -> Callable[[np.ndarray], np.ndarray]:
    """How the file says that a frame is shown: turned by steps of 90° and mirrored.

    By its display matrix, ``(x', y') = (a x + c y, b x + d y)`` of ``(a, b, u, c, d, v, …)``, x to
    the right and y down (ISO/IEC 14496-12, 6.2.2); of sizes only the signs count.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return lambda array: array
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    none = max(map(abs, (a, b, c, d))) / 100
    if min(abs(a), abs(d)) > none >= max(abs(b), abs(c)):
        return lambda array: array[:: 1 if d > 0 else -1, :: 1 if a > 0 else -1]
    if min(abs(b), abs(c)) > none >= max(abs(a), abs(d)):
        return lambda array: array.swapaxes(0, 1)[:: 1 if b > 0 else -1, :: 1 if c > 0 else -1]
    raise Broken.because(
        path, "it is to be shown turned, by no multiple of 90°", "convert it to upright frames"
    )


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
            line = timeline(path, file_fps)
            with opened(path, file_fps) as (container, stream):
                sizes = set()
                for _, frame in _frames(path, line, container, stream):
                    _whole(path, frame)
                    _turned(path, frame)
                    sizes.add((frame.height, frame.width))
                _alike(path, sizes)
        except Broken as error:
            reasons[path] = error.reason
    return reasons
