"""How much is right by length and depth: a table whose cells are darker the more it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mmpos.evaluation.document import Entry, Table
from mmpos.evaluation.effective import Cell

FAILS = "✗"
UNTESTED = "–"
Place = tuple[int, float]
"""A length and a depth."""


def heat_map(cells: Iterable[Cell], threshold: float) -> Table:
    """A row for each length, a column for each depth.

    An entry is the percentage that is right, the Wilson lower bound of it in parentheses, and ✗
    where that is below ``threshold``; so it is read in black and white too.
    """
    found = {(cell.length, cell.depth): cell for cell in cells}

    def entry(place: Place) -> Entry:
        cell = found[place]
        fails, rate = cell.lower < threshold, cell.right / cell.n
        text = f"{percent(rate)} ({percent(cell.lower)}){f' {FAILS}' * fails}"
        return Entry(text, rate, fails)

    return _grid(found, entry)


def heat_map_of_seeds(runs: Sequence[Iterable[Cell]], threshold: float) -> Table:
    """As `heat_map`, of several seeds: their mean, with the lowest and highest in parentheses, and
    ✗ where the Wilson lower bound of any of them is below ``threshold``.
    """
    found: dict[Place, list[Cell]] = {}
    for cell in (cell for cells in runs for cell in cells):
        found.setdefault((cell.length, cell.depth), []).append(cell)

    def entry(place: Place) -> Entry:
        own = found[place]
        rates = [cell.right / cell.n for cell in own]
        fails = any(cell.lower < threshold for cell in own)
        few = f", {len(own)} of {len(runs)} seeds" if len(own) < len(runs) else ""
        text = f"{spread(rates)}{few}{f' {FAILS}' * fails}"
        return Entry(text, sum(rates) / len(rates), fails)

    return _grid(found, entry)


def percent(rate: float) -> str:
    """In percent, rounded down, so that only all is 100 and nothing below a threshold reaches it.

    >>> percent(0.999), percent(1.0), percent(0.57)
    ('99', '100', '57')
    """
    return str(int(100 * rate + 1e-9))


def spread(rates: Sequence[float]) -> str:
    """The mean in percent, the lowest and highest in parentheses.

    >>> spread([0.5, 1.0])
    '75 (50–100)'
    """
    mean = percent(sum(rates) / len(rates))
    return f"{mean} ({percent(min(rates))}–{percent(max(rates))})" if len(rates) > 1 else mean


def _grid(found: Iterable[Place], entry: Callable[[Place], Entry]) -> Table:
    tested = set(found)
    lengths, depths = (sorted(set(axis)) for axis in zip(*tested, strict=True))
    rows = [
        [
            str(length),
            *(
                entry((length, depth)) if (length, depth) in tested else UNTESTED
                for depth in depths
            ),
        ]
        for length in lengths
    ]
    return Table(["length", *(f"depth {100 * depth:.4g} %" for depth in depths)], rows)
