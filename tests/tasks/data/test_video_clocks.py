"""Files that tell the times, the turn or the end of their frames in a way of their own."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tasks.data import video_files as module
from tasks.data.video_files import Broken, read_frames, timeline, unreadable

av: Any = pytest.importorskip("av")
HEIGHT, WIDTH, COUNT = 48, 64, 60


def write(
    path: Path, codec: str = "libx264", bframes: int = 2, x264: str = "", **files: str
) -> Path:
    """Frame n has the bits of n as eight fields, so that coding it takes frames before and after;
    30 a second, with a key frame every 12 or earlier.
    """
    with av.open(str(path), "w", options=files) as container:
        stream = container.add_stream(codec, rate=30, options={"x264-params": x264} if x264 else {})
        stream.width, stream.height, stream.gop_size = WIDTH, HEIGHT, 12
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        stream.codec_context.max_b_frames = bframes
        for number in range(COUNT):
            frame = av.VideoFrame.from_ndarray(picture(number), "rgb24")
            container.mux(stream.encode(frame.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode())
    return path


def picture(number: int) -> np.ndarray:
    bits = np.array([number >> bit & 1 for bit in range(8)], np.uint8)
    half = np.broadcast_to(
        np.repeat(bits * 255, WIDTH // 8)[None, :, None], (HEIGHT // 2, WIDTH, 3)
    )
    return np.concatenate([half, np.full_like(half, 128)])


def numbers(frames: Tensor) -> list[int]:
    """Which frames these are."""
    bits = frames[:, 0, HEIGHT // 4, WIDTH // 16 :: WIDTH // 8] > 128
    return (bits.int() << torch.arange(8)).sum(1).tolist()


def read(path: Path, file_fps: float | None = None) -> list[int]:
    """The numbers of all frames, which are the same if each of them is sought."""
    every = range(len(timeline(path, file_fps).ticks))
    whole = read_frames(path, every, file_fps=file_fps)
    for number in every:
        assert torch.equal(read_frames(path, [number], file_fps=file_fps)[0], whole[number])
    assert unreadable([str(path)], file_fps) == {}
    return numbers(whole)


def reason(path: Path, file_fps: float | None = None) -> str:
    """Why a file is not read, of an error of one line that names it and the way out."""
    with pytest.raises(Broken) as error:
        read_frames(path, range(len(timeline(path, file_fps).ticks)), file_fps=file_fps)
    text = str(error.value)
    assert text.startswith(f"cannot read the video {path} (") and "\n" not in text
    assert unreadable([str(path)], file_fps) == {str(path): error.value.reason}
    return text


@pytest.mark.parametrize("suffix", ["avi", "asf", "wmv"])
@pytest.mark.parametrize("x264", ["", "b-adapt=0:bframes=3", "open-gop=1:b-adapt=0:bframes=3"])
def test_frames_are_counted_where_only_decoding_has_times(
    tmp_path: Path, suffix: str, x264: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / f"a.{suffix}", x264=x264)
    with av.open(str(path)) as container:  # the fault of the container that this is about
        ticks = [frame.pts for frame in container.decode(video=0)]
    assert ticks != sorted(ticks)
    assert read(path) == list(range(COUNT)) and timeline(path).counted
    decoded, within = [], module._frames

    def counted(*arguments: Any) -> Any:
        for pair in within(*arguments):
            decoded.append(pair)
            yield pair

    monkeypatch.setattr(module, "_frames", counted)
    assert numbers(read_frames(path, [55])) == [55]
    sought = suffix == "avi" and "open" not in x264  # ASF is sought by the byte
    assert len(decoded) < 24 or not sought


def test_times_that_fall_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.avi")
    line = timeline(path)._replace(counted=False)
    monkeypatch.setattr(module, "timeline", lambda *arguments: line)
    assert "is unclear from frame 3 of decoding on); convert it, to .mp4" in reason(path)


def without_times(path: Path, which: list[int]) -> None:
    """Takes the times out of packets (ISO/IEC 13818-1, 2.4.3.7: PTS_DTS_flags)."""
    data = bytearray(path.read_bytes())
    place = -1
    for number in range(COUNT):
        place = data.index(b"\0\0\1\xe0", place + 1)
        if number in which:
            data[place + 7] &= 0x3F
    path.write_bytes(data)


def test_a_packet_without_time_makes_all_be_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ts")
    without_times(path, [20])
    assert "(damaged: 1 of its 60 frames have no time); repair or remove it" in reason(path)
    assert read(path, 10) == list(range(COUNT)) and timeline(path, 10).seconds == 6


def test_frames_that_are_counted_must_all_be_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.m2v", "mpeg2video")
    data = path.read_bytes()
    path.write_bytes(data[len(data) // 3 :])  # within a group of pictures
    assert "(damaged: 36 of its 38 frames can be decoded)" in reason(path, 30)


def boxes(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    """An MP4 of another edit list: milliseconds and the tick, or -1, of each edit (ISO/IEC
    14496-12, 8.6.6); its index is behind the frames, which so stay where they are.
    """
    table = b"".join(struct.pack(">IiI", *edit, 1 << 16) for edit in edits)
    table = struct.pack(">I4sII", len(table) + 16, b"elst", 0, len(edits)) + table
    table = struct.pack(">I4s", len(table) + 8, b"edts") + table
    place = data.index(b"edts") - 4
    (size,) = struct.unpack_from(">I", data, place)
    whole = bytearray(data[:place] + table + data[place + size :])
    for name in (b"moov", b"trak"):
        at = whole.index(name) - 4
        struct.pack_into(
            ">I", whole, at, struct.unpack_from(">I", whole, at)[0] + len(table) - size
        )
    return bytes(whole)


@pytest.mark.parametrize("bframes", [0, 2])
@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ([(5, 12)], [*range(5, 17)]),
        ([(5, 55)], [*range(5, 60)]),
        ([(20, 40)], [*range(20, 60)]),  # more than a group of pictures is left out
        ([(20, 15), (5, 15)], [*range(20, 35), *range(5, 20)]),
        ([(5, 15), (30, 15)], [*range(5, 20), *range(30, 45)]),
        ([(-1, 6), (8, 30)], [*range(8, 38)]),
    ],
)
def test_an_edit_list_shows_what_it_names(
    tmp_path: Path, bframes: int, edits: list[tuple[int, int]], expected: list[int]
) -> None:
    path = write(tmp_path / "a.mp4", bframes=bframes)
    with av.open(str(path)) as container:
        late = 512 * 2 if container.streams.video[0].codec_context.has_b_frames else 0
    listed = [
        (count * 100 // 3 + 1, first if first < 0 else late + 512 * first) for first, count in edits
    ]
    path.write_bytes(boxes(path.read_bytes(), listed))
    with av.open(str(path)) as container:
        times = [frame.pts for frame in container.decode(video=0)]
    assert timeline(path).ticks.tolist() == times  # as a player has them
    found = read(path)
    assert [number for number in found if number in expected][: len(expected)] == expected
    assert len(found) <= len(expected) + len(edits)  # a millisecond of the next one each


MATRICES = {
    (1, 0, 0, 1): lambda a: a,
    (0, 1, -1, 0): lambda a: np.rot90(a, -1),
    (-1, 0, 0, -1): lambda a: np.rot90(a, 2),
    (0, -1, 1, 0): lambda a: np.rot90(a),
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (0, 1, 1, 0): lambda a: a.T,
    (0, -1, -1, 0): lambda a: np.rot90(a, 2).T,
}


def displayed(path: Path, matrix: tuple[float, ...]) -> Path:
    """The file, to be shown by ``x' = a x + c y, y' = b x + d y`` (ISO/IEC 14496-12, 8.3.2)."""
    a, b, c, d = (round(value * 65536) for value in matrix)
    data = bytearray(path.read_bytes())
    struct.pack_into(">9i", data, data.index(b"tkhd") + 44, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("matrix", MATRICES)
def test_frames_are_turned_and_mirrored(tmp_path: Path, matrix: tuple[int, int, int, int]) -> None:
    path = write(tmp_path / "a.mp4")
    upright = read_frames(path, [5], "gray")[0, 0].numpy()
    frame = read_frames(displayed(path, matrix), [5], "gray")[0, 0].numpy()
    assert np.array_equal(frame, MATRICES[matrix](upright))
    assert unreadable([str(path)]) == {}


@pytest.mark.parametrize("matrix", [(0.7071, 0.7071, -0.7071, 0.7071), (0.995, 0.1, -0.1, 0.995)])
def test_other_turns_are_refused(tmp_path: Path, matrix: tuple[float, ...]) -> None:
    path = displayed(write(tmp_path / "a.mp4"), matrix)
    assert "turned, by no multiple of 90°); convert it to upright frames" in reason(path)


FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}


@pytest.mark.parametrize(
    ("name", "codec", "files", "keep", "why"),
    [
        ("a.wmv", "wmv2", {}, 0.5, r"cut off: it has 1\.\d\d of its 2.00 seconds"),
        ("a.gif", "gif", {}, 0.5, r"cut off: nothing tells that frame \d\d is its last"),
        ("a.flv", "flv", {}, 0.5, r"cut off: it has \d.\d\d of its 2.00 seconds"),
        ("a.avi", "libx264", {}, 0.7, r"cut off: it has \d+ of its 60 frames"),
        ("a.mp4", "libx264", FRAGMENTS, 0.9, r"cut off: it has \d+ of its 60 frames"),
    ],
)
def test_a_file_that_is_cut_off_is_noticed_where_it_tells_its_length(
    tmp_path: Path, name: str, codec: str, files: dict[str, str], keep: float, why: str
) -> None:
    path = write(tmp_path / name, codec, bframes=2 if codec == "libx264" else 0, **files)
    assert read(path) == list(range(COUNT))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(Broken, match=why):
        timeline(path)


def test_a_gif_is_cut_off_between_frames_too(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gif", "gif", 0)
    path.write_bytes(path.read_bytes()[:-1])  # all but the trailer
    assert "nothing tells that frame 60 is its last" in reason(path)


def test_asf_that_is_broadcast_tells_no_length(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wmv", "wmv2", 0)
    data = bytearray(path.read_bytes())
    place = data.index(bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")) + 88
    data[place] |= 1  # flags of the file's properties
    path.write_bytes(data[: len(data) // 2])
    assert len(timeline(path).ticks) < COUNT
