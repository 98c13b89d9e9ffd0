"""Numbers, features and axes as they are written."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = {1: ("position",), 2: ("h", "w"), 3: ("t", "h", "w")}


def axis_name(axis: int | None, axes: int) -> str:
    """An axis of so many: ``t``, ``h`` and ``w`` of three, a number of more.

    >>> axis_name(1, 3), axis_name(1, 4), axis_name(None, 3)
    ('h', 'axis 1', 'no axis')
    """
    if axis is None:
        return "no axis"
    return NAMES[axes][axis] if axes in NAMES else f"axis {axis}"


def number(value: float, other: float | None = None) -> str:
    """A number, with as many digits as tell it from ``other``.

    >>> number(1.0), number(0.31622), number(0.31622, 0.31625)
    ('1', '0.32', '0.31622')
    """
    for digits in range(2, 17):
        if other is None or f"{value:.{digits}g}" != f"{other:.{digits}g}":
            return f"{value:.{digits}g}"
    return repr(value)


def ranges(numbers: Sequence[int], most: int = 4) -> str:
    """``0–3, 5`` for 0, 1, 2, 3, 5; only the first and last ones of more runs than ``most``.

    >>> ranges([0, 1, 2, 3, 5]), ranges(range(0, 40, 3))
    ('0–3, 5', '0, 3, 6, … 39 (14)')
    """
    runs: list[list[int]] = []
    for each in numbers:
        if runs and runs[-1][-1] == each - 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    said = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    if len(said) <= most:
        return ", ".join(said)
    return f"{', '.join(said[: most - 1])}, … {said[-1]} ({len(numbers)})"
