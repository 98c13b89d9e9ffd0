"""By which rules tokens of text, images, videos and sound are counted, and in which order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int, Num
from torch import Tensor

from mmpos.positions.base import check_size, grid


@dataclass(frozen=True)
class Counting:
    """The rules by which tokens of text, images, videos and sound are counted.

    Args:
        merge: patches of height, and of width, that became one token; grids are given before that.
        follow: where the next part begins: ``"max"``, after the largest position of this one on
            any axis; ``"extent"``, ``max(height, width) // merge`` after its start, whatever its
            time, so that text after a long video shares positions with it. They differ there only.
        decode: what a token decoded after the row follows: ``"max"``, all positions in it;
            ``"follow"``, what a longer row gives, which is less after a long video in ``"extent"``.
        ticks: positions in a second; None counts frames instead, whatever their rate.
        rounding: of times: ``"floor"``, ``⌊frame · (seconds · ticks)⌋``, a product in float32;
            ``"truncate"``, ``⌊frame · ⌊seconds⌋ · ticks⌋``, an old fault that makes a video of
            more than a frame a second stand still; None keeps fractions, in float64.

    Qwen2-VL counts with merge 2, Qwen2.5-VL with 2 ticks besides, Qwen2.5-Omni with 25, and all
    three by ``"max"``; transformers has ``"extent"`` for the first two since version 5, and for
    Qwen3-VL, whose frames come after text of their own: `Video.stamps`.

    Raises: ValueError for a rule of another name, a merge below 1, or ticks that are not above 0.
    """

    merge: int = 1
    follow: Literal["max", "extent"] = "max"
    decode: Literal["max", "follow"] = "max"
    ticks: float | None = None
    rounding: Literal["floor", "truncate"] | None = "floor"

    def __post_init__(self) -> None:
        check_size("merge", self.merge)
        _one_of("follow", self.follow, "max", "extent")
        _one_of("decode", self.decode, "max", "follow")
        _one_of("rounding", self.rounding, "floor", "truncate", None)
        if self.ticks is not None and not 0 < self.ticks < math.inf:
            raise ValueError(f"ticks must be above 0 and finite, in a second, got {self.ticks}")

    def tokens(self, height: int, width: int) -> int:
        """How many tokens a frame of ``height × width`` patches has.

        Raises: ValueError for a grid that does not consist of whole blocks.
        """
        if height % self.merge or width % self.merge:
            raise ValueError(
                f"a grid of {height} x {width} patches has no whole blocks of "
                f"{self.merge} x {self.merge}: merge is {self.merge}"
            )
        return height * width // self.merge**2

    def times(
        self, count: int, seconds: float | Sequence[float] | None, what: str
    ) -> Num[Tensor, " {count}"]:
        """When frames or tokens begin: ``seconds`` is from each to the next, or the time of each.

        Warns: when several fall on the same position.
        Raises: ValueError if there are ticks but no ``seconds``.
        """
        ticks = torch.arange(count)
        if self.ticks is None:
            return ticks
        if seconds is None:
            raise ValueError(
                f"{what} needs its rate or seconds for {self.ticks} ticks a second, got neither"
            )
        if isinstance(seconds, Sequence):
            exact = torch.tensor(seconds, dtype=torch.float64)
            if self.rounding is None:
                return exact * self.ticks
            times = (exact.floor() if self.rounding == "truncate" else exact) * self.ticks
            whole = times.round()  # 0.29 · 100 is just below 29 in floating point
            times = torch.where((times - whole).abs() < 1e-6, whole, times.floor()).long()
        elif self.rounding is None:
            return ticks.double() * (seconds * self.ticks)
        else:
            step = (math.floor(seconds) if self.rounding == "truncate" else seconds) * self.ticks
            times = (ticks.float() * step).floor().long()
        shared = int((times.diff() == 0).sum())
        if shared:
            warnings.warn(
                f"{what} has {shared} at the same time as the one before at {self.ticks:g} "
                "positions a second: take more ticks, or rounding=None",
                stacklevel=2,
            )
        return times


def blocks(
    *sizes: int, merge: int, device: torch.device | str | None = None
) -> Int[Tensor, "length axes"]:
    """Positions of patches in the order of blocks of ``merge × merge`` that become one token.

    Rows and columns are the last two sizes; any before them (time) vary slower. The vision towers
    of Qwen2-VL and what came of it hold patches so.

    >>> blocks(2, 4, merge=2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]

    Raises: ValueError for fewer than two sizes, or a grid without whole blocks.
    """
    check_size("merge", merge)
    if len(sizes) < 2:
        raise ValueError(f"blocks need a height and a width, got sizes {sizes}")
    *outer, height, width = sizes
    Counting(merge).tokens(height, width)
    split = grid(*sizes, device=device).view(
        *outer, height // merge, merge, width // merge, merge, len(sizes)
    )
    return split.transpose(-4, -3).reshape(-1, len(sizes))


def _one_of(name: str, value: object, *known: object) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {known}, got {value!r}")
