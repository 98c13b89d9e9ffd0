"""When the frames of a video are shown, and which of them is on screen at a moment."""

import functools
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .cut_off import frames_told, lacks_its_end, seconds_told
from .video_opening import BARE, Broken, opened, without_rate

ROUNDING = Fraction(1, 1000)
"""Seconds by which a file's clock may be late: Matroska counts milliseconds."""
DECODING_TIMES = {"avi", "asf"}
"""Those that tell when frames are decoded, not when they are shown."""


class Timeline(NamedTuple):
    """When the frames of a file are shown, by its packets; nothing is decoded for it."""

    ticks: np.ndarray
    """When each frame comes on screen, rising, int64 ``[N]``, of the file's own clock."""
    tick: Fraction
    """Seconds of a tick."""
    end: int
    """When the last frame goes, in ticks."""
    keys: np.ndarray
    """When the frames come that decoding can begin at; the first may be before all ``ticks``."""
    counted: bool = False
    """Whether frames have these ticks in the order that they leave the decoder in, from the
    beginning or one of ``keys`` on, as the file does not tell which of them has which."""

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


class _Packet(NamedTuple):
    tick: int
    silent: bool  # tells no tick
    key: bool
    afresh: bool  # after it nothing is shown that was decoded before
    time: int
    hidden: bool  # decoded for others' sake, as by an edit list


def _packet(packet: Any, annex_b: bool) -> _Packet:
    key, silent = packet.is_keyframe, packet.pts is None
    afresh = key and annex_b and _is_idr(bytes(packet))
    tick = 0 if silent else packet.pts
    return _Packet(tick, silent, key, afresh, packet.duration or 0, packet.is_discard)


def _is_idr(data: bytes) -> bool:
    """Whether one of the NAL units of H.264 is of type 5 (ITU-T H.264, 7.4.1 and annex B)."""
    return any(unit[:1] and unit[0] & 31 == 5 for unit in data.split(b"\0\0\1")[1:])


@functools.lru_cache(maxsize=512)
def _timeline(path: str | Path, file_fps: float | None, *version: int) -> Timeline:
    with opened(path, file_fps) as (container, stream):
        context = stream.codec_context
        annex_b = context.name == "h264" and (context.extradata or b"")[:1] != b"\1"
        packets, count, final = [], 0, b""
        for packet in container.demux(stream):
            count += packet.size > 0 or packet.dts is not None  # none for the one that flushes
            if packet.size > 0:
                packets.append(_packet(packet, annex_b))
                final = bytes(packet)[-1:]
        told = frames_told(container, stream)
        if count < told:
            raise Broken.because(path, f"cut off: it has {count} of its {told} frames")
        if lacks_its_end(container, final):
            raise Broken.because(path, f"cut off: nothing tells that frame {count} is its last")
        begin = next((number for number, packet in enumerate(packets) if packet.key), 0)
        packets = packets[begin:]  # what comes before the first key frame cannot be decoded
        if all(packet.hidden for packet in packets):
            raise Broken.because(path, "it has no frames")
        if container.format.name in BARE or any(packet.silent for packet in packets):
            return _by_count(path, packets, file_fps)
        line = _by_times(path, packets, stream, file_fps)
        whole, there = seconds_told(path, container, stream), float(line.end * line.tick)
        last = line.end - int(line.ticks[-1])
        if whole - there > max(0.1, 2 * last * line.tick):
            raise Broken.because(path, f"cut off: it has {there:.2f} of its {whole:.2f} seconds")
        ticks = [packet.tick for packet in packets]
        if _of_decoding(container, stream) and ticks == sorted(set(ticks)):
            keys = np.array([packet.tick for packet in packets if packet.afresh], np.int64)
            return line._replace(keys=keys, counted=True)
        return line


def _by_count(path: str | Path, packets: Sequence[_Packet], file_fps: float | None) -> Timeline:
    silent = sum(packet.silent for packet in packets)
    if file_fps is None and silent < len(packets):
        raise Broken.because(path, f"damaged: {silent} of its {len(packets)} frames have no time")
    if file_fps is None:
        raise without_rate(path)
    ticks = np.arange(sum(not packet.hidden for packet in packets))
    return Timeline(ticks, 1 / Fraction(str(file_fps)), len(ticks), ticks[:0], counted=True)


def _by_times(
    path: str | Path, packets: Sequence[_Packet], stream: Any, file_fps: float | None
) -> Timeline:
    shown = [packet for packet in packets if not packet.hidden]
    keys = [packet.tick for packet in packets if packet.key]  # also hidden ones
    ticks = np.unique([packet.tick for packet in shown])
    if keys:  # nor can leading frames of the first key frame be decoded
        ticks = ticks[ticks >= keys[0]]
    last, rate = max(shown, key=lambda packet: packet.tick).time, stream.average_rate or file_fps
    if not last and len(ticks) > 1:
        last = max(1, round((ticks[-1] - ticks[0]) / (len(ticks) - 1)))
    elif not last and rate:
        last = max(1, round(1 / rate / stream.time_base))
    elif not last:
        raise without_rate(path)
    return Timeline(
        ticks, Fraction(stream.time_base), int(ticks[-1]) + last, np.unique(keys).astype(np.int64)
    )


def _of_decoding(container: Any, stream: Any) -> bool:
    """Whether packets may tell when frames are decoded, which is not the order they are shown in;
    so does Matroska where it holds the codec in the way of AVI, by a tag of four letters.
    """
    name, context = container.format.name, stream.codec_context
    tagged = "matroska" in name and context.codec_tag.strip("\0") != ""
    return bool(context.has_b_frames) and (name in DECODING_TIMES or tagged)
