"""Frames of files whose every frame tells its number, against the times they were written with."""

import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tasks.data import video_files as module
from tasks.data.video_files import Broken, Timeline, check, read_frames, timeline, unreadable

av: Any = pytest.importorskip("av")
SIZE = (32, 48)
COUNT = 50
KINDS = [
    *[("libx264", "mp4"), ("libx264", "mov"), ("libx264", "mkv"), ("libx264", "ts")],
    *[("libx264", "avi"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("libvpx-vp9", "webm")],
    *[("mpeg2video", "mpg"), ("wmv2", "wmv"), ("flv", "flv"), ("rawvideo", "y4m")],
]


def write(
    path: Path,
    count: int = COUNT,
    codec: str = "libx264",
    rate: Any = 30,
    times: Sequence[int] | None = None,
    tick: Fraction = Fraction(1, 600),
    size: tuple[int, int] = SIZE,
    **options: str,
) -> Path:
    """Frame n is grey of the level 10 + 4 n; with a key frame every 12 or earlier."""
    with av.open(str(path), "w", options=options) as container:
        exact = {} if codec in ("libx264", "libvpx-vp9", "ffv1") else {"qmin": "1", "qmax": "1"}
        stream = container.add_stream(codec, rate=rate, options=exact)
        (stream.height, stream.width), stream.pix_fmt, stream.gop_size = size, "yuv420p", 12
        if times:
            stream.codec_context.time_base = tick
        for number in range(count):
            picture = np.full((*size, 3), 10 + 4 * number, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            if times:
                frame.pts, frame.time_base = times[number], tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def numbers(frames: Tensor) -> list[int]:
    """Which frames these are."""
    levels = frames.double().mean((1, 2, 3))
    found = ((levels - 10) / 4).round()
    assert (levels - 10 - 4 * found).abs().max() < 1.5
    return found.int().tolist()


def shown(path: Path, fps: Any, seconds: int = 1, start: Any = 0) -> list[int]:
    """What is on screen at so many moments a second."""
    moments = [Fraction(start) + k / Fraction(fps) for k in range(int(seconds * Fraction(fps)))]
    return numbers(read_frames(path, timeline(path).at(moments)))


def reason(path: Path, file_fps: float | None = None) -> str:
    """Why a file is not read, of an error of one line that names it and the way out."""
    with pytest.raises(Broken) as error:
        read_frames(path, range(len(timeline(path, file_fps).ticks)), file_fps=file_fps)
    text = str(error.value)
    assert text.startswith(f"cannot read the video {path} (") and "\n" not in text
    assert "--data.on_error skip" in text
    assert str(pickle.loads(pickle.dumps(error.value))) == text  # as loader processes send it
    assert unreadable([str(path)], file_fps) == {str(path): error.value.reason}
    return text


@pytest.mark.parametrize(("codec", "suffix"), KINDS)
def test_a_frame_that_is_sought_is_that_of_decoding_all(
    tmp_path: Path, codec: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = 25 if suffix == "mpg" else 30
    path = write(tmp_path / f"a.{suffix}", codec=codec, rate=rate)
    line = timeline(path)
    assert len(line.ticks) == COUNT and float(line.rate) == pytest.approx(rate, rel=5e-4)
    assert float(line.seconds) == pytest.approx(COUNT / rate, abs=2e-3)
    whole = read_frames(path, range(COUNT))
    assert whole.shape == (COUNT, 3, *SIZE) and whole.dtype == torch.uint8
    assert numbers(whole) == list(range(COUNT))
    decoded, within = [0], module._frames

    def counted(*arguments: Any) -> Any:
        for pair in within(*arguments):
            decoded[0] += 1
            yield pair

    monkeypatch.setattr(module, "_frames", counted)
    for number in range(COUNT):
        decoded[0] = 0
        assert torch.equal(read_frames(path, [number])[0], whole[number])
        key = int(np.searchsorted(line.keys, line.ticks[number], side="right")) - 1
        first = int(np.searchsorted(line.ticks, line.keys[key]))
        if suffix not in ("mpg", "wmv"):  # which are sought by the byte
            assert decoded[0] <= number - first + 13  # or from the key frame before
    assert decoded[0] < COUNT - 12 or suffix == "wmv"  # else not from the beginning on
    some = [3, 3, 20, 41]
    assert torch.equal(read_frames(path, some), whole[some])
    grey = read_frames(path, some, "gray")
    assert grey.shape == (4, 1, *SIZE) and numbers(grey) == some


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi", "ts"])
@pytest.mark.parametrize("rate", [30, Fraction(30000, 1001), 24, Fraction(25, 2)])
def test_a_moment_shows_the_same_frame_at_any_rate_of_sampling(
    tmp_path: Path, suffix: str, rate: Any
) -> None:
    codec = "mpeg4" if suffix == "avi" else "libx264"
    path = write(tmp_path / f"a.{suffix}", 60, codec=codec, rate=rate)
    finest = shown(path, 30, 2)
    for fps in (1, 2, 5, 6, 15):
        assert shown(path, fps, 2) == finest[:: 30 // fps]
    # k / 30 seconds is in frame floor(k / 30 · rate); clocks of milliseconds may err by 1.5
    exact = [
        [int(Fraction(k, 30) * rate + late) for k in range(60)] for late in (0, rate * 3 / 2000)
    ]
    assert all(number in pair for number, *pair in zip(finest, *exact, strict=True))
    if rate in (30, 24):
        assert finest == exact[0]
    assert shown(path, 30, 1, start=Fraction(1, 2)) == finest[15:45]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_times_of_a_varying_rate_are_those_of_its_frames(tmp_path: Path, suffix: str) -> None:
    times = [number * number for number in range(COUNT)]  # of 600 in a second
    path = write(tmp_path / f"a.{suffix}", times=times)
    for fps in (1, 7, 30, 100):
        truth = [sum(t <= 600 * k / fps + 1e-9 for t in times) - 1 for k in range(4 * fps)]
        found = shown(path, fps, 4)
        assert found[0] in (0, 1) and found[1:] == truth[1:]  # a tick of 1/600 may be forgiven
    line = timeline(path)
    assert float(line.rate) == pytest.approx(49 / (49 * 49 / 600), rel=1e-3)
    assert float(line.seconds) == pytest.approx(49 * 49 / 600, abs=0.05)


def test_moments_and_rounded_clocks() -> None:
    thirtieths = np.round(np.arange(100) * 1000 / 30).astype(np.int64)
    line = Timeline(thirtieths + 1234, Fraction(1, 1000), 1234 + 3333, thirtieths[:1])
    assert line.at([Fraction(k, 30) for k in range(100)]) == list(range(100))
    assert line.at([Fraction(k, 30) - Fraction(2, 1000) for k in range(1, 100)]) == list(range(99))
    assert line.at([Fraction(1000)]) == [99] and line.seconds == Fraction(3333, 1000)
    fast = Timeline(np.arange(100), Fraction(1, 1000), 100, np.arange(1))  # 1,000 frames a second
    assert (
        fast.at([Fraction(k, 1000) for k in range(100)]) == list(range(100)) and fast.rate == 1000
    )
    slow = Timeline(np.arange(10), Fraction(1), 10, np.arange(1))  # nearly a whole tick is early
    assert slow.at([Fraction(99, 100), Fraction(1), Fraction(3, 2)]) == [0, 1, 1]
    one = Timeline(np.array([7]), Fraction(1, 10), 9, np.array([7]))
    assert (one.seconds, one.rate, one.at([Fraction(0)])) == (Fraction(1, 5), 5, [0])


def test_a_file_without_times_asks_for_its_rate_and_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h264")
    for asked in (lambda: check(path), lambda: timeline(path)):
        with pytest.raises(Broken, match=r"a.h264 \(it does not tell when.*--data.file_fps FPS"):
            asked()
    for fps, seconds in ((25, 2), (12.5, 4)):
        line = timeline(path, fps)
        assert line.seconds == seconds and line.rate == fps and len(line.ticks) == COUNT
    found = read_frames(
        path, timeline(path, 25).at([Fraction(k, 5) for k in range(10)]), "gray", 25
    )
    assert numbers(found) == list(range(0, 50, 5))
    assert timeline(write(tmp_path / "b.mp4"), 5).rate == 30  # which tells its own


def test_what_is_before_the_first_key_frame_is_not_there(tmp_path: Path) -> None:
    data = write(tmp_path / "whole.ts").read_bytes()
    whole = timeline(tmp_path / "whole.ts")
    path = tmp_path / "a.ts"
    path.write_bytes(data[len(data) // 188 // 3 * 188 :])  # whole packets of 188 bytes
    line = timeline(path)
    found = numbers(read_frames(path, range(len(line.ticks))))
    assert found == list(range(found[0], COUNT)) and whole.ticks[found[0]] in whole.keys[1:]
    assert shown(path, 10) == found[::3][:10] and line.seconds == Fraction(len(found), 30)


def test_a_single_frame_is_shown_for_its_time(tmp_path: Path) -> None:
    line = timeline(write(tmp_path / "a.mp4", 1, rate=20))
    assert (line.rate, line.seconds, len(line.ticks)) == (20, Fraction(1, 20), 1)
    Image.new("L", (9, 7), 90).save(tmp_path / "b.gif")
    assert timeline(tmp_path / "b.gif").rate == 10 and read_frames(
        tmp_path / "b.gif", [0]
    ).unique().tolist() == [90]


def test_frames_are_turned_as_the_file_says(tmp_path: Path) -> None:
    path, one = tmp_path / "a.mp4", 1 << 16
    picture = np.zeros((*SIZE, 3), np.uint8)
    picture[:, :24] = 255  # the left half
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        (stream.height, stream.width), stream.pix_fmt = SIZE, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    data = path.read_bytes()
    place = data.index(b"tkhd") + 44  # ISO 14496-12, 8.3.2: the matrix of a track
    for matrix, bright in (
        ((one, 0, 0, 0, one, 0), np.s_[:, :16]),
        ((0, one, 0, -one, 0, 0), np.s_[:16]),  # clockwise: x to y, y to -x
        ((-one, 0, 0, 0, -one, 0), np.s_[:, -16:]),
        ((0, -one, 0, one, 0, 0), np.s_[-16:]),
    ):
        turned = struct.pack(">9i", *matrix, 0, 0, 1 << 30)
        path.write_bytes(data[:place] + turned + data[place + 36 :])
        frame = read_frames(path, [0], "gray")[0, 0].numpy()
        upright = matrix[0] != 0
        assert frame.shape == (SIZE if upright else SIZE[::-1])
        assert frame[bright].min() > 250 and frame.mean() == pytest.approx(127, abs=3)


@pytest.mark.parametrize(("matrix", "red"), [(1, (63, 102, 240)), (6, (81, 90, 240))])
def test_colours_are_by_the_matrix_that_the_file_names(
    tmp_path: Path, matrix: int, red: tuple[int, int, int]
) -> None:
    path = tmp_path / "a.mp4"  # Y, Cb, Cr of pure red by BT.709 and BT.601, of limited range
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        (stream.height, stream.width), stream.pix_fmt = SIZE, "yuv420p"
        stream.codec_context.colorspace = matrix
        frame = av.VideoFrame(SIZE[1], SIZE[0], "yuv420p")
        for plane, value in zip(frame.planes, red, strict=True):
            plane.update(bytes([value]) * plane.buffer_size)
        frame.colorspace = matrix
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    pixel = read_frames(path, [0])[0, :, 5, 5].int()
    assert (pixel - torch.tensor([255, 0, 0])).abs().max() < 4


@pytest.mark.parametrize("size", [(33, 47), (1, 1), (17, 32)])
def test_odd_sizes(tmp_path: Path, size: tuple[int, int]) -> None:
    path = write(tmp_path / "a.mkv", 5, codec="ffv1", size=size)
    assert read_frames(path, [1, 4]).shape == (2, 3, *size)
    levels = read_frames(path, [1, 4]).double().mean((1, 2, 3))
    assert (levels - torch.tensor([14, 26])).abs().max() < 3  # chroma at the edge


def broken(folder: Path, name: str) -> Path:
    """A file that is called as what is wrong with it."""
    path = folder / name
    if name.startswith("text"):
        path.write_text("no video, though it may be called one; " * 20)
    elif name.startswith("picture"):
        Image.new("RGB", (48, 32)).save(path, format="png")
    elif name.startswith("sound"):
        with av.open(str(path), "w") as container:
            stream = container.add_stream("aac", rate=8000)
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
            sound.sample_rate = 8000
            container.mux(stream.encode(sound))
            container.mux(stream.encode())
    elif name.startswith("sizes"):
        sizes = [(32, 48), (64, 64)]
        parts = [write(folder / f"{n}.h264", 5, size=size) for n, size in enumerate(sizes)]
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
    elif name.startswith("empty"):
        path.touch()
    elif not name.startswith("missing"):
        codec = "libvpx-vp9" if name.endswith("webm") else "libx264"
        options: Any = {"movflags": "faststart"} if "early" in name else {}
        data = bytearray(write(path, codec=codec, **options).read_bytes())
        half = len(data) // 2
        if name.startswith("hole"):
            place = data.index(b"mdat") + 1000
            data[place : place + 200] = b"\xff" * 200
        elif name.startswith("part"):
            data = data[: int(len(data) * 0.95)]
        else:
            data = data[:half]
        path.write_bytes(data)
    return path


WHY = {
    "missing.mp4": "No such file",
    "empty.mkv": "it has 0 bytes",
    "text.mp4": "Invalid data",
    "text.h264": "Invalid data",
    "picture.mp4": "it is a picture",
    "sound.mp4": "it has no video",
    "sizes.h264": "its frames are of several sizes); convert it to one size",
    "cut.mp4": "Invalid data",
    "part_early.mp4": "cut off: it has 4",
    "cut.mkv": r"cut off: it has 0.",
    "cut.webm": r"cut off: it has 0.",
    "hole.mp4": "Invalid data",
}


@pytest.mark.parametrize("name", WHY)
def test_broken_files_are_named_with_the_reason(tmp_path: Path, name: str) -> None:
    path = broken(tmp_path, name)
    assert WHY[name] in reason(path, 25 if name.startswith("sizes") else None)


def test_frames_before_the_fault_are_read(tmp_path: Path) -> None:
    assert numbers(read_frames(broken(tmp_path, "hole.mp4"), [0, 5])) == [0, 5]


def test_good_files_are_not_unreadable(tmp_path: Path) -> None:
    names = ["a.mp4", "http:b.mp4", "Ω naïve 日本.mp4"]
    paths = [str(write(tmp_path / "a.mp4").rename(tmp_path / name)) for name in names[1:]]
    paths.append(str(write(tmp_path / "a.mp4")))
    paths.append(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.mp4"))  # no UTF-8
    os.link(paths[-2], paths[-1])
    assert unreadable(paths) == {}
    assert all(numbers(read_frames(path, [7])) == [7] for path in paths)


def test_a_file_that_is_replaced_is_looked_at_anew(tmp_path: Path) -> None:
    assert len(timeline(write(tmp_path / "a.mp4")).ticks) == COUNT
    assert len(timeline(write(tmp_path / "a.mp4", 20)).ticks) == 20


def test_times_are_told_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*arguments: Any) -> None:
        raise AssertionError("decoded")

    path: Any = write(tmp_path / "a.mkv")
    monkeypatch.setattr(module, "_frames", decode)
    assert len(timeline(path).ticks) == COUNT
    check(path)


Ask = Callable[[Path], Any]


@pytest.mark.parametrize("ask", [check, timeline, lambda path: read_frames(path, [0])])
def test_without_the_library_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    path = write(tmp_path / "a.mp4")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ImportError, match=r"the library av: pip install 'mmpos\[video\]'"):
        ask(path)
