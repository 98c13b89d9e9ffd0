"""What a video file lacks of the length that it tells: it was cut off.

MPEG transport and program streams, bare streams, and what is broadcast tell no length.
"""

import os
import struct
from pathlib import Path
from typing import Any

ASF_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
"""What the File Properties Object of an ASF file begins with (specification 1.2, 3.2, 10.2)."""


def frames_told(container: Any, stream: Any) -> int:
    """The packets that a file promises of a stream, when all were read; 0 where it does not.

    Of MP4 its index counts: an edit list leaves out of it what is neither shown nor needed for it,
    and a fragment adds to it.
    """
    return len(stream.index_entries) if "mp4" in container.format.name else stream.frames


def seconds_told(path: str | Path, container: Any, stream: Any) -> float:
    """When the last frame goes by what the file tells, seconds; 0 where it tells nothing.

    That is Matroska's tag ``DURATION`` of the stream; of ASF the play duration, if the file is
    smaller than it says; of FLV the duration, if there is nothing else than this stream.
    """
    if container.format.name == "asf":
        return _asf(path)
    if container.format.name == "flv":
        return (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0
    try:
        hours, minutes, seconds = map(float, stream.metadata.get("DURATION", "").split(":"))
    except ValueError:
        return 0.0
    return 3600 * hours + 60 * minutes + seconds


def _asf(path: str | Path) -> float:
    with open(path, "rb") as file:
        head, there = file.read(1 << 16), os.fstat(file.fileno()).st_size
    place = head.find(ASF_PROPERTIES)
    if place < 0 or len(head) < place + 92:
        return 0.0
    size, _, _, hundreds, _, preroll, flags = struct.unpack_from("<6QI", head, place + 40)
    if flags & 1 or there >= size:  # a broadcast tells nothing
        return 0.0
    return hundreds / 1e7 - preroll / 1000


def lacks_its_end(container: Any, last: bytes) -> bool:
    """Whether the ``last`` packet is no end; a GIF has one of its own (GIF89a, 27), a semicolon."""
    return container.format.name == "gif" and not last.endswith(b";")
