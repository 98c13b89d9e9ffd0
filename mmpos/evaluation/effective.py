"""How far a model can be trusted: the conservative effective range."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

CELL_TASKS = ("single", "distractors", "conflict")
DEPTHS = (0.0, 0.5, 1.0)
RULER = 0.856
"""The mean over tasks from which RULER (arXiv:2404.06654, sec. 4) counts a length as effective."""


@dataclass(frozen=True)
class Cell:
    """What became of the samples of one task at one length and depth."""

    task: str
    length: int
    """Tokens that were asked for; a prompt has these or just fewer."""
    depth: float
    n: int
    right: int
    """Exact: value and source, or a refusal where that is right."""
    keyword: int = 0
    cited: int = 0
    refused: int = 0
    distractors: int = 0
    seeds: int = 0
    """How many different seeds the samples have."""

    def __post_init__(self) -> None:
        if self.n < 1 or not all(
            0 <= count <= self.n for count in (self.right, self.keyword, self.cited, self.refused)
        ):
            raise ValueError(f"of 1 or more samples, from 0 to all are right, got {self}")

    @property
    def lower(self) -> float:
        """The 95 % lower bound of the rate of right answers."""
        return wilson_lower(self.right, self.n)


@dataclass(frozen=True)
class Failing:
    """Where a range ends: the worst cell of the first length that does not pass, or the reason."""

    length: int
    reason: str
    depth: float | None = None
    task: str | None = None
    distractors: int = 0
    right: int | None = None
    n: int | None = None
    lower: float | None = None


@dataclass(frozen=True)
class EffectiveRange:
    """What is claimed, what the interface accepts, and what holds; 0 where no length passes."""

    claimed: int
    accepted: int
    effective: int
    ruler: int
    """By RULER's rule: the mean over tasks, no bound, up to the first length below ``0.856``."""
    first_failing: Failing | None
    untested: tuple[str, ...]
    """What is missing for a verdict, and spans of lengths in which nothing was tested."""
    n: dict[str, tuple[int, int]]
    """Fewest and most samples of a cell, by length."""
    threshold: float
    needed: int
    """Samples of a cell from which on a bound can reach the threshold at all."""

    def __str__(self) -> str:
        text = (
            f"claimed {self.claimed}, accepted {self.accepted}, effective {self.effective} "
            f"(RULER's rule: {self.ruler})"
        )
        return text if self.first_failing is None else f"{text}; {self.first_failing.reason}"


def wilson_lower(right: int, n: int, z: float = 1.96) -> float:
    """The lower bound of Wilson's interval for a rate of ``right`` out of ``n``; 95 % by default.

    ``(p + z²/2n - z √(p (1 - p) / n + z²/4n²)) / (1 + z²/n)`` with ``p = right / n`` (Wilson 1927).
    Raises: ValueError for counts that cannot be.

    >>> round(wilson_lower(20, 20), 3), round(wilson_lower(10, 10), 3)
    (0.839, 0.722)
    """
    if n < 1 or not 0 <= right <= n or z < 0:
        raise ValueError(f"0 to n of n samples are right, n and z above 0, got {right}, {n}, {z}")
    rate, square = right / n, z * z
    spread = z * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n))
    return max(0.0, (rate + square / (2 * n) - spread) / (1 + square / n))


def samples_needed(threshold: float, z: float = 1.96) -> int:
    """The fewest samples whose bound reaches a threshold when all are right.

    >>> samples_needed(0.8), samples_needed(0.856)
    (16, 23)
    """
    if not 0 < threshold < 1:
        raise ValueError(f"a threshold is above 0 and below 1, got {threshold}")
    n = max(1, math.floor(threshold * z * z / (1 - threshold)))
    while wilson_lower(n, n, z) < threshold:
        n += 1
    return n


def effective_range(
    cells: Iterable[Cell],
    threshold: float = 0.8,
    *,
    claimed: int,
    accepted: int,
    lengths: Sequence[int] | None = None,
    tasks: Sequence[str] = CELL_TASKS,
    depths: Sequence[float] = DEPTHS,
    regression: bool | None = None,
) -> EffectiveRange:
    """The longest length up to which all tested lengths pass, and what it stands on.

    A length passes if the interface accepts it and the least Wilson bound of its cells, of all
    tasks and depths, reaches the threshold. The first that does not ends the range, whatever passes
    beyond it. A cell that must be there and is not ends it too.

    Args:
        threshold: 0.8 as for passkeys.
        claimed: the length that the model is said to have.
        accepted: the longest that its interface takes.
        lengths: all that were asked for; by default those of the cells.
        tasks, depths: what must be tested at each length; other cells count as well.
        regression: whether the short contexts passed; False leaves nothing that is effective.

    Raises: ValueError for a cell that is there twice.

    >>> right = {64: 50, 128: 20, 256: 50}  # of 50; what passes at 256 was luck
    >>> cells = [Cell("single", n, depth, 50, right[n]) for n in right for depth in DEPTHS]
    >>> found = effective_range(cells, claimed=256, accepted=256, tasks=["single"])
    >>> found.effective, found.first_failing.length
    (64, 128)
    """
    held: dict[int, dict[tuple[str, int, float], Cell]] = defaultdict(dict)
    for cell in cells:
        place = (cell.task, cell.distractors, cell.depth)
        if place in held[cell.length]:
            raise ValueError(f"a cell is there twice: {place} at {cell.length}")
        held[cell.length][place] = cell
    kinds = {place[:2] for row in held.values() for place in row}
    kinds |= {(task, 0) for task in tasks if all(task != each[0] for each in kinds)}
    wanted = {(*kind, float(depth)) for kind in kinds for depth in {*DEPTHS, *depths}}
    wanted |= {place for row in held.values() for place in row}
    asked = sorted(set(held) if lengths is None else set(lengths) | set(held))
    needed = samples_needed(threshold)
    effective, ruler, first, ended = 0, 0, None, False
    untested = []
    for length in asked:
        row = held.get(length, {})
        missing = sorted(wanted - set(row))
        failing = _failing(length, row, missing, threshold, needed, accepted)
        if regression is False:
            failing = Failing(length, "short contexts became worse (regression)")
        if missing:
            untested.append(f"{len(missing)} cells at {length}, such as {_words(*missing[0])}")
        if first is None and failing is not None:
            first = failing
        if first is None:
            effective = length
        ended = ended or length > accepted or bool(missing) or _mean(row) < RULER
        if not ended:
            ruler = length
    tested = [length for length in asked if held.get(length)]
    spans = list(zip(tested, [*tested[1:], max(claimed, *tested, 0)], strict=bool(tested)))
    untested += [f"lengths between {a} and {b}" for a, b in spans if b > 2 * a]
    untested += [] if not tested or tested[-1] >= claimed else [f"the claimed length {claimed}"]
    return EffectiveRange(
        claimed=claimed,
        accepted=accepted,
        effective=effective,
        ruler=ruler,
        first_failing=first,
        untested=tuple(untested),
        n={
            str(length): (min(c.n for c in row.values()), max(c.n for c in row.values()))
            for length, row in sorted(held.items())
            if row
        },
        threshold=threshold,
        needed=needed,
    )


def _failing(
    length: int,
    row: dict[tuple[str, int, float], Cell],
    missing: list[tuple[str, int, float]],
    threshold: float,
    needed: int,
    accepted: int,
) -> Failing | None:
    if length > accepted:
        return Failing(length, f"the interface does not take {length} tokens")
    if missing:
        return Failing(length, f"{_words(*missing[0])} was not tested at {length}")
    worst = min(row.values(), key=lambda cell: cell.lower)
    if worst.lower >= threshold:
        return None
    place = _words(worst.task, worst.distractors, worst.depth)
    reason = (
        f"{place} at {length}: {worst.right} of {worst.n} right, at least {worst.lower:.3f}, "
        f"below {threshold}"
    )
    if worst.n < needed:
        reason += f" ({worst.n} samples cannot certify it, even all right; {needed} can)"
    return Failing(
        length,
        reason,
        worst.depth,
        worst.task,
        worst.distractors,
        worst.right,
        worst.n,
        worst.lower,
    )


def _words(task: str, distractors: int, depth: float) -> str:
    number = f" ({distractors})" if distractors else ""
    return f"{task}{number} at depth {depth:.0%}"


def _mean(row: dict[tuple[str, int, float], Cell]) -> float:
    """The mean over tasks with an answer of the mean over their cells."""
    rates: dict[str, list[float]] = defaultdict(list)
    for cell in row.values():
        if cell.task != "unanswerable":
            rates[cell.task].append(cell.right / cell.n)
    return fmean(fmean(each) for each in rates.values()) if rates else 0.0
