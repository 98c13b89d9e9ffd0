"""Video files that are opened, or said in one line not to be videos that can be read."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BARE = {"h261", "h263", "h264", "hevc", "vvc", "evc", "mjpeg", "mjpeg_2000", "mpegvideo", "m4v"}
BARE |= {"vc1", "cavsvideo", "avs2", "avs3", "dirac", "dnxhd", "obu", "ingenient", "rawvideo"}
"""FFmpeg's formats of frames alone: whatever times it gives them are made up, of 25 a second."""


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
def opened(path: str | Path, file_fps: float | None) -> Iterator[tuple[Any, Any]]:
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
                    raise without_rate(path)
                streams[0].codec_context.thread_count = 1  # loader processes share the cores
                yield container, streams[0]
    except av.FFmpegError as error:
        log = error.log[2] if error.log else ""
        reason = ": ".join(part for part in (error.strerror, log.strip(" .\n")) if part)
        raise Broken.because(path, " ".join(reason.split())) from error
    except OSError as error:
        raise Broken.because(path, error.strerror or "it cannot be opened") from error


def without_rate(path: str | Path) -> Broken:
    """What is said of a file that tells no times."""
    return Broken.because(
        path, "it does not tell when its frames are shown", "give its rate, --data.file_fps FPS"
    )


def check(path: str | Path, file_fps: float | None = None) -> None:
    """Raises `Broken` for what a file's beginning shows to be no video that can be read."""
    with opened(path, file_fps):
        pass
