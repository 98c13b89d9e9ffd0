"""Positions in t, h and w of a batch that says of each token whether it is text, image or sound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Int, Num
from torch import Tensor

from mmpos.positions.counting import Counting
from mmpos.positions.multimodal import Multimodal, laid_out
from mmpos.positions.parts import Audio, Image, Interleaved, Part, Text, Video

TEXT, IMAGE, VIDEO, AUDIO = range(4)
NAMES = ("text", "image", "video", "audio")


def of_types(
    types: Int[Tensor, "batch length"],
    counting: Counting | None = None,
    *,
    mask: Bool[Tensor, "batch length"] | None = None,
    images: Int[Tensor, "images 3"] | None = None,
    videos: Int[Tensor, "videos 3"] | None = None,
    seconds: Sequence[float] | Num[Tensor, " videos"] | None = None,
    audio_rate: float | None = None,
    stamped: bool = False,
    chunk: float | None = None,
) -> Multimodal:
    """Positions of a batch as a collator has it: what each token is, and the grids.

    Args:
        types: 0 text, 1 image, 2 video, 3 audio.
        mask: True for real tokens, wherever padding is; all without it.
        images: grids ``(1, height, width)`` in patches, of all rows in their order.
        videos: grids ``(frames, height, width)`` likewise.
        seconds: for each video, from a frame to the next: needed if there are ticks.
        audio_rate: tokens of sound in a second: needed if there are ticks. A run of them is one
            sound.
        stamped: whether each frame of a video is an image after text of its own (Qwen3-VL).
        chunk: seconds of a turn, where a video and its sound take turns: a run of both is one
            `Interleaved`. Without it they are parts of their own.

    >>> out = of_types(torch.tensor([[0, 1, 1, 0]]), images=torch.tensor([[1, 1, 2]]))
    >>> out.positions[0].tolist()
    [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]

    Raises: ValueError, with both numbers, for image or video tokens that are not those of the
        grids, a run that is no whole number of grids, seconds for other videos, a missing rate,
        turns in another order, or a type above 3.
    """
    counting = counting or Counting()
    found = types.cpu()
    real = torch.ones_like(found, dtype=torch.bool) if mask is None else mask.cpu()
    kept, row_of = _real(found, real)
    grids = {
        IMAGE: _parts_of(IMAGE, images, None, False),
        VIDEO: _parts_of(VIDEO, videos, seconds, stamped),
    }
    for kind, parts in grids.items():
        _check_total(kind, int((kept == kind).sum()), parts, counting)
    mixed = kept if chunk is None else kept.clamp_max(VIDEO)
    runs, counts = torch.unique_consecutive(row_of * len(NAMES) + mixed, return_counts=True)
    rows: list[list[Part]] = [[] for _ in found]
    for run, own in zip(runs.tolist(), kept.split(counts.tolist()), strict=True):
        row, kind = divmod(run, len(NAMES))
        if kind == TEXT:
            rows[row].append(Text(len(own)))
        elif kind == IMAGE:
            rows[row] += _taken(IMAGE, len(own), grids[IMAGE], counting, row)
        else:
            sound = int((own == AUDIO).sum())
            seen = list(_taken(VIDEO, len(own) - sound, grids[VIDEO], counting, row))
            heard = [Audio(sound, rate=audio_rate)] if sound else []
            rows[row] += _in_turns(seen, heard, own, chunk, counting, row)
    return laid_out(rows, real, counting, types.device)


def _real(types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if mask.dtype != torch.bool:
        raise TypeError(f"a mask is True for real tokens, got {mask.dtype}: pass mask.bool()")
    if mask.shape != types.shape:
        raise ValueError(f"types have shape {tuple(types.shape)}, their mask {tuple(mask.shape)}")
    kept = types[mask].long()
    strange = kept[(kept < TEXT) | (kept > AUDIO)]
    if len(strange):
        raise ValueError(
            f"types are 0 for text, 1 image, 2 video and 3 audio, got {int(strange[0])}"
        )
    return kept, torch.arange(len(types), device=types.device).unsqueeze(-1).expand_as(types)[mask]


def _parts_of(
    kind: int, grids: Tensor | None, seconds: Sequence[float] | Tensor | None, stamped: bool
) -> deque[Image | Video]:
    sizes = [] if grids is None else grids.tolist()
    if seconds is not None and len(seconds) != len(sizes):
        raise ValueError(f"there are {len(sizes)} videos, and seconds for {len(seconds)}")
    gaps = [None] * len(sizes) if seconds is None else [float(gap) for gap in seconds]
    parts: deque[Image | Video] = deque()
    for (frames, height, width), gap in zip(sizes, gaps, strict=True):
        if kind == IMAGE and frames != 1:
            raise ValueError(
                f"an image has 1 frame, got a grid of {frames} x {height} x {width}: "
                "pass it in videos"
            )
        if kind == IMAGE or stamped:
            parts += [Image(height, width)] * frames
        else:
            parts.append(Video(frames, height, width, seconds=gap))
    return parts


def _tokens(part: Image | Video, counting: Counting) -> int:
    frames = part.frames if isinstance(part, Video) else 1
    return frames * counting.tokens(part.height, part.width)


def _check_total(
    kind: int, tokens: int, parts: Sequence[Image | Video], counting: Counting
) -> None:
    expected = sum(_tokens(part, counting) for part in parts)
    if tokens != expected:
        raise ValueError(
            f"types have {tokens} {NAMES[kind]} tokens, the grids {expected}, "
            f"with merge={counting.merge}"
        )


def _taken(
    kind: int, tokens: int, parts: deque[Image | Video], counting: Counting, row: int
) -> Iterator[Image | Video]:
    left = tokens
    while left:
        part = parts.popleft()  # there is one: the totals are equal
        left -= _tokens(part, counting)
        if left < 0:
            raise ValueError(
                f"row {row} has a run of {tokens} {NAMES[kind]} tokens, its grids have "
                f"{tokens - left}"
            )
        yield part


def _in_turns(
    seen: Sequence[Image | Video],
    heard: Sequence[Audio],
    types: Tensor,
    chunk: float | None,
    counting: Counting,
    row: int,
) -> Sequence[Part]:
    if chunk is None or not seen or not heard:
        return [*seen, *heard]
    if len(seen) != 1 or not isinstance(video := seen[0], Video):
        raise ValueError(
            f"row {row} has sound in turns with {len(seen)} videos or frames, expected 1 video"
        )
    both = Interleaved(video, heard[0], chunk)
    wrong = (both.kinds(counting).to(types.device) != (types == AUDIO)).nonzero()
    if len(wrong):
        raise ValueError(
            f"row {row} has another order than turns of {chunk} seconds from token "
            f"{int(wrong[0])} of {len(types)} of a video and its sound"
        )
    return [both]
