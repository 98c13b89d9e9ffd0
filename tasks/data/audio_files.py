"""Sound files: which there are, how long, their samples at one rate, and which are broken."""

import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from torchaudio.transforms import Resample

from .files import files_below

SUFFIXES = (".aif", ".aifc", ".aiff", ".au", ".caf", ".flac", ".mp3", ".oga", ".ogg", ".opus")
SUFFIXES += (".snd", ".sph", ".voc", ".w64", ".wav")
BLOCK = 2**18
"""Frames decoded at a time."""
PIECE = 2**20
"""Samples resampled at a time."""
KERNEL = 2**24
"""Most weights of a resampling filter: 64 MiB. 44.1 to 16 kHz takes 76,000; 44.101 kHz 7 × 10⁸."""
DENSEST = 2**16
"""No format holds more frames in a byte: a block of FLAC has up to 2¹⁶ of silence."""

OGG_PAGE = 65_307
"""The greatest size of a page, in bytes."""

SIZES = re.compile(r"^\s*(?:data|SSND|Data Size)\s*: (\d+)(?: \(should be (\d+)\))?", re.MULTILINE)
UNKNOWN_SIZE = 2**31 - 2**16
"""What programs that write to a pipe give for the size of the samples is this or more."""


class Broken(ValueError):
    """A sound file that cannot be read as asked: one line that names it, why, and the way out."""

    reason: str

    @classmethod
    def because(cls, path: str | Path, reason: str) -> "Broken":
        error = cls(
            f"cannot read the sound {path} ({reason}); repair or remove it, "
            "or leave out such files with --data.on_error skip"
        )
        error.reason = reason
        return error


def audio_files(folder: Path) -> list[str]:
    """Paths of all sound files below ``folder``, see `tasks.data.files.files_below`."""
    return files_below(folder, SUFFIXES, "sounds")


class _Stream(soundfile.SoundFile):
    """Read in order. What can be sought, soundfile seeks after each read to where it is already;
    in an MP3 file of variable bit rate libsndfile then goes on elsewhere.
    """

    def seekable(self) -> bool:
        return False


def _lie(path: str | Path, file: soundfile.SoundFile, size: int) -> str | None:
    """What shows by the header alone that a file of ``size`` bytes does not hold what it tells."""
    if file.format == "RAW":
        return "it has no header"
    if file.frames < 1:
        return "it has no samples, says its header"
    if file.frames > DENSEST * size:
        return f"its header tells of {file.frames} samples in {size} bytes: encode it anew"
    log = file.extra_info
    for told, there in SIZES.findall(log):
        if int(there or size) + 1 < int(told) < UNKNOWN_SIZE:
            return f"cut off: {there or size} bytes of samples where its header tells of {told}"
    if file.format == "OGG" and not _ends(path, size):
        return "cut off: it has no end of stream"
    return "corrupt in the middle" if "Corrupted bitstream" in log else None


def _ends(path: str | Path, size: int) -> bool:
    """Whether the last page of an Ogg file is whole and says that it is the last (RFC 3533)."""
    with open(path, "rb") as file:
        file.seek(max(0, size - OGG_PAGE - 2**16))
        _, mark, page = file.read().rpartition(b"OggS")
    page = mark + page
    if len(page) < 27 or not page[5] & 4:
        return False
    return len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])


def _open(path: str | Path) -> _Stream:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise Broken.because(path, error.strerror or "it cannot be opened") from error
    if not size:
        raise Broken.because(path, "it has 0 bytes")
    try:
        file = _Stream(os.fsencode(path))  # type: ignore[arg-type] names may be no UTF-8
    except (soundfile.SoundFileError, TypeError) as error:  # TypeError: .raw
        told = getattr(error, "error_string", "it has no header")
        reason = "no sound found in it" if "does not exist" in told else told
        raise Broken.because(path, reason.rstrip(". ")) from error
    if reason := _lie(path, file, size):
        file.close()
        raise Broken.because(path, reason)
    return file


def seconds_of(path: str | Path) -> float:
    """How long a file is, by its header alone; of an MP3 file without a Xing header, as its first
    frame's bit rate has it. Raises `Broken` for what the header shows to be no whole sound: a file
    that is not there, empty, of another type, cut off, or without samples.
    """
    with _open(path) as file:
        return file.frames / file.samplerate


def _blocks(
    path: str | Path, file: soundfile.SoundFile, first: int, count: int
) -> Iterator[np.ndarray]:
    """``count`` frames from ``first`` on, in parts, channels averaged: float32 ``[frames]``."""
    left, skip = count, 0
    try:
        if file.format == "MP3":  # libsndfile seeks to elsewhere, see _Stream
            left, skip = first + count, first
        elif first:
            file.seek(first)
        while left and len(block := file.read(min(left, BLOCK), "float32", always_2d=True)):
            if not np.isfinite(block).all():
                raise Broken.because(path, "it has samples that are NaN or infinite")
            yield block[skip:].mean(axis=1)
            left -= len(block)
            skip = max(0, skip - len(block))
    except soundfile.SoundFileError as error:
        told = getattr(error, "error_string", str(error))
        raise Broken.because(
            path, f"cut off or corrupt: {told.removeprefix('Error : ')}"
        ) from error
    if left:
        raise Broken.because(path, f"cut off or corrupt: {left} of its samples are missing")


def read_audio(
    path: str | Path, rate: int, start: float = 0.0, seconds: float | None = None
) -> Float[Tensor, " samples"]:
    """The sound of a file, or ``seconds`` of it from ``start`` on, at ``rate`` Hz, its channels
    averaged.

    Integers of b bits are divided by 2^(b − 1), so that they are in -1 … 1; floats are as they
    are. What is sought is found by seeking, but in MP3 files by decoding all before it. A part at
    the end that is shorter than ``seconds`` is given as it is.

    A part of n samples at another rate is resampled by torchaudio, by itself (as if silence were
    around it), to exactly ceil(n · rate / its rate) samples; torchaudio's own count is of float32,
    and may be off beyond 2¹⁶ samples.

    Raises: `Broken` for a file that cannot be read whole, has NaN or infinite samples or ends
        before ``start``, or whose rate is so odd that the filter has more than `KERNEL` weights;
        ValueError for options out of range.
    """
    if rate < 1:
        raise ValueError(f"rate is {rate} Hz; expected at least 1")
    if not 0 <= start < math.inf:
        raise ValueError(f"start is {start} s; expected 0 or more")
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}; expected more than 0, or none for all to the end")
    with _open(path) as file:
        own = file.samplerate
        _check_rates(path, own, rate)
        first = round(start * own)
        if first >= file.frames:
            raise Broken.because(
                path, f"it ends at {file.frames / own:g} s, but a part from {start:g} s is asked"
            )
        count = file.frames - first
        if seconds is not None:
            count = min(count, max(1, round(seconds * own)))
        sound = np.concatenate(list(_blocks(path, file, first, count)))
    return resample(torch.from_numpy(sound), own, rate)


def unreadable(paths: Sequence[str], rate: int | None = None) -> dict[str, str]:
    """Those of ``paths`` that `read_audio` cannot read whole (at ``rate``, if given), and why;
    decodes every file once.
    """
    reasons: dict[str, str] = {}
    for path in paths:
        try:
            with _open(path) as file:
                _check_rates(path, file.samplerate, rate or file.samplerate)
                for _ in _blocks(path, file, 0, file.frames):
                    pass
        except Broken as error:
            reasons[path] = error.reason
    return reasons


def _check_rates(path: str | Path, old: int, new: int) -> None:
    common = math.gcd(old, new)
    if old * new > KERNEL * common**2:
        raise Broken.because(
            path,
            f"to resample {old} to {new} Hz takes a filter of {old * new // common**2:,} weights, "
            f"expected {KERNEL:,} or fewer: convert it, as by ffmpeg -i FILE -ar {new} NEW",
        )


@functools.lru_cache(maxsize=4)
def _resampler(old: int, new: int) -> Resample:
    return Resample(old, new, dtype=torch.float64).float()  # a filter made in float32 errs by 1e-5


def resample(sound: Tensor, old: int, new: int) -> Tensor:
    """What torchaudio makes of the whole, in pieces that overlap by more than its filter is wide:
    in less memory, and of a length that float32 does not round.
    """
    if old == new:
        return sound
    resampler, common = _resampler(old, new), math.gcd(old, new)
    old, new = old // common, new // common
    context = old * math.ceil(7 / min(old, new))  # the filter has 6 / 0.99 periods of the lower
    step = old * max(1, PIECE // max(old, new))
    padded = pad(sound, (context, context))
    pieces = [
        resampler(padded[at : at + step + 2 * context])[context // old * new :][: step // old * new]
        for at in range(0, len(sound), step)
    ]
    return torch.cat(pieces)[: -(-len(sound) * new // old)]
