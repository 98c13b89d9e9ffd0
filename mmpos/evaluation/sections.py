"""The sections of a report on one run."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmpos.evaluation.claims import Claim, counted, formula, listed, local, paper
from mmpos.evaluation.document import Block, Entry, Heading, Quote, Table
from mmpos.evaluation.effective import RULER
from mmpos.evaluation.heatmap import FAILS, heat_map, percent
from mmpos.evaluation.measured import COSTS, PERPLEXITY, measured, shown
from mmpos.evaluation.results import ROWS, STATES, Results, kind

QUOTED = 5
"""How many failures a report quotes; all of them are in the file that it links."""


def told(results: Results, link: str = "", level: int = 2) -> list[Block]:
    """The sections of one run; ``link`` leads to its folder."""
    sections = {
        "Verdict": _verdict(results),
        "Acceptance": _acceptance(results, link),
        "Length and depth": _maps(results),
        "Cells": _cells(results),
        "Exact answers, keywords and refusals": _answers(results),
        "Failures": _failures(results, link),
        "Costs": measured(results.costs, _file(results, "costs.json"), COSTS),
        "Perplexity": [
            *measured(results.perplexity, _file(results, "perplexity.json"), PERPLEXITY),
            formula(
                "A model that sees no farther than the trained length can have the same at all "
                "lengths, so that what does not rise shows no use of what is far.",
                "sliding windows",
            ),
        ],
        "Limits of length": _limits_of_length(results),
        "Settings": _settings(results),
        "Limits": _limits(results),
    }
    blocks: list[Block] = []
    for title, own in sections.items():
        inner = (
            replace(x, level=x.level + level - 2) if isinstance(x, Heading) else x for x in own
        )
        blocks += [Heading(title, level), *inner] if own else []
    return blocks


def _verdict(results: Results) -> list[Block]:
    found = results.verdict
    claims = [
        local(f"The model is claimed to take {found.claimed:,} tokens.", "settings.json"),
        local(f"The interface accepts {found.accepted:,} tokens.", "rows.json, A1"),
        local(f"The effective length is {found.effective:,} tokens.", "cells.jsonl"),
        local(f"By RULER's rule it would be {found.ruler:,} tokens.", "cells.jsonl"),
    ]
    if found.first_failing is None:
        claims.append(local("No tested cell fails.", "cells.jsonl"))
    else:
        claims.append(local(f"The first that fails: {found.first_failing.reason}.", "cells.jsonl"))
    claims += [local(f"Not tested: {gap}.", "cells.jsonl") for gap in found.untested]
    claims += [
        formula(
            "A length is effective if the Wilson lower bound of every task and depth, at it and at "
            f"every shorter one that was tested, is at least {found.threshold:g}, so that a longer "
            "one that passes by luck does not count.",
            "conservative range",
        ),
        formula(
            f"That needs {found.needed} samples in a cell, since n right of n have the bound "
            "n / (n + 3.84).",
            "Wilson, 1927",
        ),
    ]
    if found.threshold == 0.8:
        text = "A context counts as usable from 80 % of passkeys on."
        claims.append(paper(text, "YaRN, arXiv:2309.00071"))
    text = f"RULER takes the mean over tasks, and {100 * RULER:.3g} %, what Llama-2-7B has at 4K."
    return [*claims, paper(text, "RULER, arXiv:2404.06654")]


def _acceptance(results: Results, link: str) -> list[Block]:
    rows = [
        [
            name,
            what,
            Entry(row.status, fails=row.status == "FAIL"),
            row.evidence,
            row.tag,
            Entry(row.file, link=posixpath.join(link, row.file)),
        ]
        for name, what in ROWS.items()
        for row in [results.rows[name]]
    ]
    states = [row.status for row in results.rows.values()]
    passed, failed, not_run = map(states.count, STATES)
    text = f"Of {len(ROWS)} checks {passed} pass, {failed} fail and {not_run} were not run."
    head = ["row", "check", "status", "evidence", "kind", "file"]
    return [local(text, "rows.json"), Table(head, rows)]


def _maps(results: Results) -> list[Block]:
    threshold = results.verdict.threshold
    text = (
        "An entry is the percentage that is right, its Wilson lower bound in parentheses, and "
        f"{FAILS} where that is below {100 * threshold:g}."
    )
    blocks: list[Block] = [local(text, "cells.jsonl")]
    for task in _kinds(results):
        own = [cell for cell in results.cells if kind(cell) == task]
        blocks += [Heading(task, 3), heat_map(own, threshold)]
    return blocks


def _cells(results: Results) -> list[Block]:
    threshold = results.verdict.threshold
    rows = [
        [
            kind(cell),
            str(cell.length),
            f"{100 * cell.depth:.4g} %",
            str(cell.n),
            str(cell.right),
            Entry(
                f"{cell.lower:.3f}{f' {FAILS}' * (cell.lower < threshold)}",
                fails=cell.lower < threshold,
            ),
        ]
        for cell in results.cells
    ]
    samples = sum(cell.n for cell in results.cells)
    text = f"There are {samples:,} samples in {counted(len(rows), 'cell')}."
    head = ["task", "length", "depth", "samples", "right", "lower bound"]
    return [local(text, "cells.jsonl"), Table(head, rows)]


def _answers(results: Results) -> list[Block]:
    rows = []
    for task in _kinds(results):
        for length in sorted({cell.length for cell in results.cells}):
            own = [c for c in results.cells if kind(c) == task and c.length == length]
            if own:
                n = sum(cell.n for cell in own)
                names = ("right", "keyword", "cited", "refused")
                rates = [percent(sum(getattr(c, name) for c in own) / n) for name in names]
                rows.append([task, str(length), *rates])
    claims = [
        local("The table has percentages, over all depths.", "cells.jsonl"),
        formula(
            "Only exact answers count: value and source, or a refusal where there is no answer, so "
            "that a keyword without its source is no right answer.",
            "definition of exact",
        ),
    ]
    unanswerable = [cell for cell in results.cells if cell.task == "unanswerable"]
    others = [cell for cell in results.cells if cell.task != "unanswerable"]
    for own, what in ((unanswerable, "without an answer"), (others, "that have an answer")):
        if own:
            refused, n = sum(cell.refused for cell in own), sum(cell.n for cell in own)
            text = f"Of {n:,} questions {what} {refused:,} were refused."
            claims.append(local(text, "cells.jsonl"))
    if not unanswerable:
        claims.append(local("No question without an answer was asked.", "cells.jsonl"))
    head = ["task", "length", "exact", "keyword", "source cited", "refused"]
    return [*claims, Table(head, rows)]


def _failures(results: Results, link: str) -> list[Block]:
    name = "failures.jsonl"
    if name in results.missing:
        return [local("The failed samples were not kept.", f"no {name}")]
    count = len(results.failures)
    wrong = sum(cell.n - cell.right for cell in results.cells)
    text = f"Of {wrong:,} failed samples {count:,} are kept as they were, to be run again."
    text = text if wrong or count else "No sample failed."
    blocks: list[Block] = [local(text, name, posixpath.join(link, name))]
    if count != wrong:
        blocks.append(local("The file is not complete.", f"cells.jsonl, {name}"))
    if count:
        quoted = counted(min(count, QUOTED), "sample")
        blocks.append(local(f"The first {quoted} of the file follow, without prompts.", name))
    return [*blocks, *(Quote(_quoted(each)) for each in results.failures[:QUOTED])]


def _quoted(failure: Mapping[str, Any]) -> str:
    """A failure in lines, without its prompt."""
    places = ("task", "length", "depth", "distractors", "seed")
    lines = [", ".join(f"{name} {failure[name]}" for name in places if name in failure)]
    for name, value in failure.items():
        if name not in (*places, "prompt") and value not in ("", None):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines.append(f"{name}: {text}")
    return "\n".join(lines)


def _limits_of_length(results: Results) -> list[Block]:
    limits = results.settings.get("limits")
    if not isinstance(limits, Mapping):
        return []
    places = {name: value for name, value in limits.items() if name != "minimum"}
    known = {name: value for name, value in places.items() if value is not None}
    rows = [
        [name, "not known" if value is None else shown(value)] for name, value in places.items()
    ]
    text = "No limit around the model is known."
    if known:
        least = min(known.values())
        where = listed(name for name, value in known.items() if value == least)
        text = f"The least that is known is {shown(least)} tokens, by the {where}."
    return [local(text, "settings.json"), Table(["limit of", "tokens"], rows)]


def _settings(results: Results) -> list[Block]:
    rows = [
        [name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
        for name, value in _flat(results.settings)
    ]
    return [local("The run had these settings.", "settings.json"), Table(["name", "value"], rows)]


def _limits(results: Results) -> list[Claim]:
    not_run = [name for name, row in results.rows.items() if row.status == "NOT RUN"]
    claims = [
        local(
            "The effective length is that of these tasks, this model and this implementation, and "
            "of no other.",
            "settings.json",
        ),
        paper(
            "That a model takes a length does not say that it uses it: Llama-3.1-70B claims 128K "
            "and holds to 64K.",
            "RULER, arXiv:2404.06654",
        ),
    ]
    if not_run:
        claims.append(local(f"Nothing is known of {listed(not_run)}.", "rows.json"))
    if results.missing:
        claims.append(local(f"The folder lacks {listed(results.missing)}.", "this folder"))
    return claims


def _file(results: Results, name: str) -> str:
    return f"no {name}" if name in results.missing else name


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _kinds(results: Results) -> Sequence[str]:
    return list(dict.fromkeys(kind(cell) for cell in results.cells))
