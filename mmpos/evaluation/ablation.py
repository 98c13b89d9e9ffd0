"""Runs that differ in their encoding alone: what may be compared, and a report that compares it.

The protocol has six steps: everything but the encoding fixed, quality at the trained length first,
the same evidence at 1, 2 and 4 times that and at beginning, middle and end, distractors and
conflicting versions with exact citation, costs, and short contexts before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmpos.evaluation import document, fingerprint
from mmpos.evaluation.checklist import checked
from mmpos.evaluation.claims import counted, formula, listed, local, paper
from mmpos.evaluation.comparison import compared
from mmpos.evaluation.document import Block, Heading, Table
from mmpos.evaluation.runs import Groups, Run, grouped, shared

SEEDS = 3
"""How many are asked for."""


def ablation(runs: Sequence[Run], *, tolerance: float = 0.02) -> tuple[str, str]:
    """A report of what the encoding alone changes, in Markdown and in HTML.

    Compared are the seeds that every encoding has. ``tolerance`` is by how much, relative to the
    best, the loss at the trained length may differ for lengths beyond to be compared cleanly.

    Raises: ValueError for runs that may not be compared, see `grouped`.
    """
    groups = grouped(runs)
    seeds = shared(groups)
    fair = {name: [own[seed] for seed in seeds] for name, own in groups.items()}
    blocks: list[Block] = [*_fixed(groups), Heading("The six steps")]
    blocks += checked(groups, seeds, SEEDS, tolerance)
    blocks += [Heading("At the trained length"), *_metrics(fair)]
    blocks += [*_long(fair, seeds), *_limits(seeds)]
    title = f"Ablation: {' / '.join(groups)}"
    return document.markdown(title, blocks), document.html(title, blocks)


def _long(fair: Mapping[str, Sequence[Run]], seeds: Sequence[str]) -> list[Block]:
    """The results of the seeds of which every encoding has some."""
    held = {
        name: {run.seed: run.results for run in own if run.results is not None}
        for name, own in fair.items()
    }
    common = [seed for seed in seeds if all(seed in own for own in held.values())]
    lacking = [run.name for own in fair.values() for run in own if run.results is None]
    claims: list[Block] = []
    if lacking:
        text = f"There are no results of {_every(lacking, sum(map(len, fair.values())))}"
        text += f", and compared is what every encoding has of {listed(common)}." if common else "."
        claims.append(local(text, "given folders"))
    if not common:
        return [Heading("Long contexts"), *claims]
    return compared(
        {name: {seed: own[seed] for seed in common} for name, own in held.items()}, claims
    )


def _every(names: Sequence[str], number: int) -> str:
    return "every run" if len(names) == number else listed(names)


def _fixed(groups: Groups) -> list[Block]:
    runs = [run for own in groups.values() for run in own.values()]
    sizes = {
        name: sorted({run.parameters for run in own.values() if run.parameters is not None})
        for name, own in groups.items()
    }
    least = min((min(own) for own in sizes.values() if own), default=0)
    rows = []
    for name, own in groups.items():
        first = next(iter(own.values()))
        known = ", ".join(f"{count:,}" for count in sizes[name]) or "not known"
        more = ", ".join(f"+{count - least:,}" for count in sizes[name]) or "–"
        spelt = fingerprint.spelt(fingerprint.encoding(first.config))
        rows.append([name, spelt, ", ".join(own), known, more])
    mark = fingerprint.fingerprint(runs[0].config)
    blocks: list[Block] = [
        Heading("What is compared"),
        local(
            f"All {counted(len(runs), 'run')} have the fingerprint {mark}, of all settings but the "
            "encoding, the seeds and the places that results are written to.",
            "config.yaml",
        ),
        *_parameters(sizes),
        *_environments(runs),
        Table(["encoding", "its settings", "seeds", "parameters", "more than the fewest"], rows),
        local("The runs are those of the following table.", "given folders"),
    ]
    rows = [[name, seed, run.name] for name, own in groups.items() for seed, run in own.items()]
    return [*blocks, Table(["encoding", "seed", "run"], rows)]


def _parameters(sizes: Mapping[str, Sequence[int]]) -> list[Block]:
    unknown = [name for name, own in sizes.items() if not own]
    if unknown:
        text = f"How many parameters {listed(unknown)} has learned is not known."
        return [local(text, "checkpoints")]
    counts = {count for own in sizes.values() for count in own}
    if len(counts) == 1:
        return [local(f"Every model has {counts.pop():,} parameters.", "checkpoints")]
    least, most = min(counts), max(counts)
    larger = [name for name, own in sizes.items() if max(own) == most]
    return [
        local(
            f"The models differ in size by up to {most - least:,} parameters, "
            f"{100 * (most - least) / least:.3g} % of the smallest, and {listed(larger)} has the "
            "most.",
            "checkpoints",
        )
    ]


def _environments(runs: Sequence[Run]) -> list[Block]:
    """What else differs."""
    unknown = [run.name for run in runs if not run.environment]
    blocks: list[Block] = []
    if unknown:
        blocks.append(
            local(
                f"The environment of {_every(unknown, len(runs))} was not recorded.",
                "environment.json",
            )
        )
    known = [_environment(run.environment) for run in runs if run.environment]
    names = sorted({name for each in known for name in each})
    found = {name: sorted({each.get(name, "none") for each in known}) for name in names}
    blocks += [
        local(f"The runs differ in {name}, {listed(values)}.", "environment.json")
        for name, values in found.items()
        if len(values) > 1
    ]
    return blocks


def _environment(told: Mapping[str, Any]) -> dict[str, str]:
    flat = {
        name: told[name]
        for name in ("mmpos", "python", "device", "processes", "precision")
        if name in told
    }
    flat |= {name: told[name] for name in ("platform", "threads", "strategy") if name in told}
    flat |= {f"the package {name}": version for name, version in told.get("packages", {}).items()}
    git = told.get("git") or {}
    if git.get("commit"):
        flat["the commit"] = git["commit"] + (" with changes" if git.get("changed") else "")
    return {name: str(value) for name, value in flat.items()}


def _metrics(fair: Mapping[str, Sequence[Run]]) -> list[Block]:
    names = sorted({name for own in fair.values() for run in own for name in run.metrics})
    if not names:
        return [local("No run was tested at the trained length.", "metrics.csv")]
    rows = []
    for label, own in fair.items():
        cells = []
        for name in names:
            values = [run.metrics[name] for run in own if name in run.metrics]
            cells.append(_spread(values, len(own)))
        rows.append([label, *cells])
    count = len(next(iter(fair.values())))
    text = f"The table has the mean of {counted(count, 'seed')}, lowest and highest in parentheses."
    return [local(text, "metrics.csv"), Table(["encoding", *names], rows)]


def _spread(values: Sequence[float], wanted: int) -> str:
    if not values:
        return "–"
    mean = f"{sum(values) / len(values):.4g}"
    lacking = f", {len(values)} of {wanted} seeds" if len(values) < wanted else ""
    if len(values) == 1:
        return mean + lacking
    return f"{mean} ({min(values):.4g}–{max(values):.4g}){lacking}"


def _limits(seeds: Sequence[str]) -> list[Block]:
    return [
        Heading("Limits"),
        local(
            f"What is said of an encoding holds for this model, this data and "
            f"{counted(len(seeds), 'seed')}, and for no other.",
            "this report",
        ),
        formula(
            "That the fingerprints are equal says that the settings are, and not that these "
            "settings are equally good for every encoding, such as a learning rate that was chosen "
            "with one of them.",
            "definition of the fingerprint",
        ),
        paper(
            "How well a model goes on to longer inputs varies much with the random seed of its "
            "weights and of the order of its data.",
            "Zhou et al., arXiv:2402.09371",
        ),
    ]
