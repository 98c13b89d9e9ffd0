"""What several models reached on long contexts, each with several seeds, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from mmpos.evaluation.claims import counted, listed, local
from mmpos.evaluation.document import Block, Heading, Table
from mmpos.evaluation.effective import Cell
from mmpos.evaluation.heatmap import heat_map_of_seeds, spread
from mmpos.evaluation.measured import numbers
from mmpos.evaluation.results import ROWS, STATES, Results, kind

Groups = Mapping[str, Mapping[str, Results]]
"""By model, the results of each of its seeds, by what the seed is called."""


def compared(groups: Groups, first: Sequence[Block] = ()) -> list[Block]:
    """Ranges, worst depths, heat maps, acceptance, citations, costs and perplexity of all.

    Numbers of several seeds are their mean, with the lowest and highest in parentheses; ``first``
    is what is said before.
    """
    seeds = listed(f"{len(own)} of {name}" for name, own in groups.items())
    return [
        Heading("Long contexts"),
        *first,
        local(f"Compared are the results of seeds, {seeds}.", "given folders"),
        local(
            "Where there are several seeds, the tables have their mean, with the lowest and "
            "highest in parentheses.",
            "cells.jsonl",
        ),
        *_unequal(groups),
        *_ranges(groups),
        *_worst(groups),
        *_maps(groups),
        *_citations(groups),
        *_acceptance(groups),
        *_measured(groups, "costs", "Costs"),
        *_measured(groups, "perplexity", "Perplexity"),
    ]


def _unequal(groups: Groups) -> list[Block]:
    """What was not tested alike."""
    tested = [
        (name, {(kind(cell), cell.length, cell.depth, cell.n) for cell in results.cells})
        for name, own in groups.items()
        for results in own.values()
    ]
    everywhere = set.intersection(*(cells for _, cells in tested))
    apart = dict.fromkeys(name for name, cells in tested if cells != everywhere)
    text = "All have the same cells, each with as many samples."
    if apart:
        text = (
            f"All have {counted(len(everywhere), 'cell')} with as many samples in common, and "
            f"{listed(apart)} others too."
        )
    settings = [results.settings for own in groups.values() for results in own.values()]
    different = [
        name
        for name in ("needles", "seed", "threshold", "claimed", "trained")
        if len({json.dumps(each.get(name), sort_keys=True) for each in settings}) > 1
    ]
    claims: list[Block] = [local(text, "cells.jsonl")]
    if different:
        text = f"The runs differ in their {listed(different)}, and are not compared cleanly."
        claims.append(local(text, "settings.json"))
    return claims


def _ranges(groups: Groups) -> list[Block]:
    rows = []
    for name, own in groups.items():
        for seed, results in own.items():
            found = results.verdict
            first = found.first_failing.reason if found.first_failing else "none"
            lengths = (found.claimed, found.accepted, found.effective, found.ruler)
            rows.append([name, seed, *map(str, lengths), first])
    text = (
        "The effective length is the longest up to which every tested length has a Wilson lower "
        "bound at the threshold in every cell."
    )
    head = ["model", "seed", "claimed", "accepted", "effective", "by RULER's rule"]
    return [
        Heading("Effective range", 3),
        local(text, "cells.jsonl"),
        *(
            local(f"With {name} it is {_span(own)} tokens.", "cells.jsonl")
            for name, own in groups.items()
        ),
        Table([*head, "first that fails"], rows),
    ]


def _span(own: Mapping[str, Results]) -> str:
    """The effective length, at the least of the seeds and at the most."""
    lengths = sorted(results.verdict.effective for results in own.values())
    if lengths[0] == lengths[-1]:
        return f"{lengths[0]:,}"
    return f"{lengths[0]:,} at the least of the seeds, at the most {lengths[-1]:,}"


def _worst(groups: Groups) -> list[Block]:
    lengths = sorted({cell.length for cell in _cells(groups)})
    rows = []
    for task in _kinds(groups):
        for length in lengths:
            entries = []
            for own in groups.values():
                lowest = [
                    min(rates)
                    for results in own.values()
                    if (rates := [c.right / c.n for c in _of(results, task) if c.length == length])
                ]
                entries.append(spread(lowest) if lowest else "–")
            rows.append([task, str(length), *entries])
    text = (
        "This is the percentage that is right at the worst of all depths, not at the mean of them."
    )
    return [
        Heading("Worst depth", 3),
        local(text, "cells.jsonl"),
        Table(["task", "length", *groups], rows),
    ]


def _maps(groups: Groups) -> list[Block]:
    blocks: list[Block] = []
    for task in _kinds(groups):
        for name, own in groups.items():
            runs = [cells for results in own.values() if (cells := _of(results, task))]
            if runs:
                threshold = next(iter(own.values())).verdict.threshold
                blocks += [Heading(f"{task}: {name}", 3), heat_map_of_seeds(runs, threshold)]
    text = (
        "In the tables of length and depth, ✗ marks where the Wilson lower bound of a seed is "
        "below the threshold."
    )
    return [Heading("Length and depth"), local(text, "cells.jsonl"), *blocks]


def _citations(groups: Groups) -> list[Block]:
    rows = []
    for task in _kinds(groups):
        for name, own in groups.items():
            held = [cells for results in own.values() if (cells := _of(results, task))]
            if held:
                counts = ("right", "keyword", "cited", "refused")
                rates = [
                    spread([sum(getattr(c, what) for c in cells) / _n(cells) for cells in held])
                    for what in counts
                ]
                rows.append([task, name, *rates])
    text = "Only an exact answer counts, and the keyword alone is told beside it."
    head = ["task", "model", "exact", "keyword", "source cited", "refused"]
    return [Heading("Exact answers and keywords"), local(text, "cells.jsonl"), Table(head, rows)]


def _acceptance(groups: Groups) -> list[Block]:
    rows = []
    for row, what in ROWS.items():
        entries = []
        for own in groups.values():
            states = [results.rows[row].status for results in own.values()]
            found = {state: states.count(state) for state in STATES if state in states}
            entries.append(
                ", ".join(
                    f"{number} {state}" if len(own) > 1 else state
                    for state, number in found.items()
                )
            )
        rows.append([row, what, *entries])
    text = f"Of the {counted(len(ROWS), 'check')} each model has these results."
    return [Heading("Acceptance"), local(text, "rows.json"), Table(["row", "check", *groups], rows)]


def _measured(groups: Groups, name: str, title: str) -> list[Block]:
    found = {
        label: [
            numbers(value) for each in own.values() if (value := getattr(each, name)) is not None
        ]
        for label, own in groups.items()
    }
    keys = dict.fromkeys(key for own in found.values() for each in own for key in each)
    if not keys:
        return [Heading(title), local(f"There is nothing measured in {name}.json.", f"{name}.json")]
    rows = []
    for key in keys:
        entries = [[each[key] for each in own if key in each] for own in found.values()]
        rows.append([key, *map(_values, entries)])
    return [
        Heading(title),
        local("The table has what was measured, by its name in the file.", f"{name}.json"),
        Table(["what", *groups], rows),
    ]


def _values(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{sum(values) / len(values):.4g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.4g}–{max(values):.4g})"


def _kinds(groups: Groups) -> list[str]:
    return list(dict.fromkeys(kind(cell) for cell in _cells(groups)))


def _cells(groups: Groups) -> list[Cell]:
    return [cell for own in groups.values() for results in own.values() for cell in results.cells]


def _of(results: Results, task: str) -> list[Cell]:
    return [cell for cell in results.cells if kind(cell) == task]


def _n(cells: Sequence[Cell]) -> int:
    return sum(cell.n for cell in cells)
