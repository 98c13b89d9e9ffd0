"""The six steps of an ablation: which are done, and what the others lack."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mmpos.evaluation.claims import Claim, counted, listed, local
from mmpos.evaluation.document import Block, Entry, Table
from mmpos.evaluation.measured import numbers
from mmpos.evaluation.results import Results
from mmpos.evaluation.runs import Groups, Run

STEPS = (
    "All but the encoding is fixed, with the same seeds",
    "Quality at the trained length",
    "The same evidence at 1, 2 and 4 times the length, at beginning, middle and end",
    "Distractors and conflicting versions, with exact citation",
    "Training throughput, prefill, decoding, peak memory and KV cache",
    "Short contexts before and after",
    "Failed samples kept, to be run again",
)
COSTS = ("train", "prefill", "decode", "peak", "kv")
"""What names of measured costs contain."""


def checked(groups: Groups, seeds: Sequence[str], wanted: int, tolerance: float) -> list[Block]:
    """A table of the steps, and what they mean for the comparison.

    ``groups`` are runs by encoding and seed, ``seeds`` those that all encodings have.
    """
    runs = [run for own in groups.values() for run in own.values()]
    lacking = [
        _seeds(groups, seeds, wanted),
        _of_runs(runs, lambda run: [] if run.metrics else ["a test"]),
        _of_results(runs, _evidence),
        _of_results(runs, _tasks),
        _of_results(runs, _costs),
        _of_results(runs, _regression),
        _of_results(runs, lambda results: _absent(results, "failures.jsonl")),
    ]
    rows = []
    for number, (step, missing) in enumerate(zip(STEPS, lacking, strict=True), 1):
        name = str(number) if number < len(STEPS) else "then"
        state = Entry("incomplete", fails=True) if missing else "done"
        rows.append([name, step, state, "; ".join(missing) or "nothing"])
    done = sum(not missing for missing in lacking[:6])
    text = f"Of the six steps {done} are done for every run."
    return [
        local(text, "given folders"),
        *_said_of_seeds(groups, seeds, wanted),
        *_clean(groups, seeds, tolerance),
        Table(["step", "what", "state", "what is missing"], rows),
    ]


def _seeds(groups: Groups, seeds: Sequence[str], wanted: int) -> list[str]:
    union = {seed for own in groups.values() for seed in own}
    missing = [
        f"seed {seed} of {name}"
        for name, own in groups.items()
        for seed in sorted(union - set(own))
    ]
    few = [f"{wanted - len(seeds)} of {wanted} seeds"] if len(seeds) < wanted else []
    return missing + few


def _said_of_seeds(groups: Groups, seeds: Sequence[str], wanted: int) -> list[Claim]:
    claims = []
    if any(set(own) != set(seeds) for own in groups.values()):
        each = "; ".join(f"{name}: {', '.join(own)}" for name, own in groups.items())
        text = f"The seeds differ ({each}), and compared are only {listed(seeds)}."
        claims.append(local(text, "config.yaml"))
    if len(seeds) < wanted:
        text = (
            f"The encodings have {counted(len(seeds), 'seed')} in common where {wanted} are asked "
            "for, so that chance is not told from the encoding."
        )
        claims.append(local(text, "config.yaml"))
    return claims


def _clean(groups: Groups, seeds: Sequence[str], tolerance: float) -> list[Claim]:
    """Whether the encodings are equally good at the trained length."""
    runs = {name: [own[seed] for seed in seeds] for name, own in groups.items()}
    pooled = [_lengths(run) for own in runs.values() for run in own if len(_lengths(run)) > 1]
    if pooled:
        text = (
            f"The test pools examples of {listed(pooled[0])} tokens, so whether the encodings are "
            "equally good at the trained length is not known by its loss: see the cells of results."
        )
        return [local(text, "metrics.csv")]
    for metric in ("test/perplexity", "test/loss"):
        if all(metric in run.metrics for own in runs.values() for run in own):
            means = {
                name: sum(run.metrics[metric] for run in own) / len(own)
                for name, own in runs.items()
            }
            best, worst = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
            apart = (means[worst] - means[best]) / max(abs(means[best]), 1e-12)
            verdict = (
                "so that lengths beyond are compared cleanly"
                if apart <= tolerance
                else "so that lengths beyond are not compared cleanly"
            )
            text = (
                f"At the trained length the mean {metric} is {means[best]:.4g} with {best} and "
                f"{means[worst]:.4g} with {worst}, {100 * apart:.3g} % apart where "
                f"{100 * tolerance:.3g} % is allowed, {verdict}."
            )
            return [local(text, "metrics.csv")]
    text = "Whether the encodings are equally good at the trained length is not known."
    return [local(text, "metrics.csv")]


def _lengths(run: Run) -> list[str]:
    """Of the examples that the test of a run has, where it tells them apart."""
    names = (re.fullmatch(r"test/exact_match_(\d+)", name) for name in run.metrics)
    return [str(n) for n in sorted(int(found[1]) for found in names if found)]


def _of_runs(runs: Sequence[Run], lacks: Callable[[Run], list[str]]) -> list[str]:
    """What is missing, with the runs that lack it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for what in lacks(run):
            found.setdefault(what, []).append(run.name)
    everywhere = len(runs)
    return [
        f"{what} of {'every run' if len(names) == everywhere else listed(names)}"
        for what, names in found.items()
    ]


def _of_results(runs: Sequence[Run], lacks: Callable[[Results], list[str]]) -> list[str]:
    return _of_runs(runs, lambda run: ["results"] if run.results is None else lacks(run.results))


def _evidence(results: Results) -> list[str]:
    """Lengths are counted by the trained one."""
    cells = [cell for cell in results.cells if cell.task == "single"]
    if not cells:
        return ["the task single"]
    trained = results.settings.get("trained", min(cell.length for cell in cells))
    missing = []
    for times in (1, 2, 4):
        depths = {cell.depth for cell in cells if cell.length == times * trained}
        if not depths:
            missing.append(f"length {times * trained}")
            continue
        places = {
            "beginning": 0.0 in depths,
            "middle": any(0.25 <= depth <= 0.75 for depth in depths),
            "end": 1.0 in depths,
        }
        lacking = [place for place, there in places.items() if not there]
        missing += [f"{place} at length {times * trained}" for place in lacking]
    return missing


def _tasks(results: Results) -> list[str]:
    tasks = {cell.task for cell in results.cells}
    return [f"the task {task}" for task in ("distractors", "conflict") if task not in tasks]


def _costs(results: Results) -> list[str]:
    if results.costs is None:
        return _absent(results, "costs.json")
    known = " ".join(numbers(results.costs)).lower()
    return [f"{name} in costs.json" for name in COSTS if name not in known]


def _regression(results: Results) -> list[str]:
    return ["row A7"] if results.rows["A7"].status == "NOT RUN" else []


def _absent(results: Results, name: str) -> list[str]:
    return [name] if name in results.missing else []
