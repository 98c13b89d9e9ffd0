"""The rows of acceptance A1 to A12: what each says, by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from mmpos.evaluation.costs import Cost
from mmpos.evaluation.effective import Cell, EffectiveRange, samples_needed, wilson_lower
from mmpos.evaluation.interface import Decoded, Taken
from mmpos.evaluation.perplexity import Perplexity

Status = Literal["PASS", "FAIL", "NOT RUN"]


@dataclass(frozen=True)
class Row:
    """What became of one check, and by what evidence."""

    status: Status
    evidence: str
    file: str = "rows.json"
    """Where in the folder the evidence is."""
    tag: str = "local"
    """What kind of evidence it is: measured here."""
    data: dict[str, Any] = field(default_factory=dict)


def interface(checks: Sequence[Taken]) -> Row:
    """A1: each length is taken, its logits are finite and depend on nothing that comes later."""
    told = []
    for check in checks:
        if check.error:
            told.append(f"{check.length}: {check.error}")
        elif not check.finite:
            told.append(f"{check.length}: logits are not finite")
        elif not check.causal:
            told.append(
                f"{check.length}: later tokens change earlier logits by {check.leak:.3g} "
                f"(rounding: {check.allowed:.3g}), the mask leaks"
            )
    lengths = ", ".join(str(check.length) for check in checks)
    text = "; ".join(told) or f"finite and causal at {lengths} tokens"
    return Row("FAIL" if told else "PASS", text)


def quality(
    reference: Mapping[str, float] | None,
    cells: Sequence[Cell],
    found: Perplexity | None,
    trained: int,
    tolerance: float,
) -> Row:
    """A2: at the trained length it is as good as a reference."""
    if not reference:
        return Row("NOT RUN", "no reference of perplexity or accuracy was given")
    parts, good = [], True
    if "perplexity" in reference:
        if found is None:
            return Row("NOT RUN", "a reference of perplexity was given, and no texts that long")
        most = reference["perplexity"] * (1 + tolerance)
        good &= found.perplexity <= most
        parts.append(f"perplexity {found.perplexity:.4g}, at most {most:.4g}")
    if "accuracy" in reference:
        short = [cell for cell in cells if cell.length <= trained]
        if not short:
            return Row("NOT RUN", f"no sample has the trained length {trained} or less")
        rate, least = fmean(c.right / c.n for c in short), reference["accuracy"] - tolerance
        good &= rate >= least
        parts.append(f"accuracy {rate:.3f}, at least {least:.3f}")
    return Row("PASS" if good else "FAIL", f"up to {trained} tokens: {'; '.join(parts)}")


def needles(
    cells: Sequence[Cell],
    task: str,
    required: int,
    threshold: float,
    counts: Callable[[Cell], int] = lambda cell: cell.right,
) -> Row:
    """A3 to A5: at each depth and required length, the bound of one task is at the threshold."""
    return _bounded(
        [cell for cell in cells if cell.task == task], required, threshold, counts, task
    )


def citation(cells: Sequence[Cell], required: int, threshold: float) -> Row:
    """A6: the record is cited, and nothing where there is none; the value alone never counts."""
    row = _bounded(
        cells,
        required,
        threshold,
        lambda cell: cell.right if cell.task == "unanswerable" else cell.cited,
        "citation",
    )
    answered = [cell for cell in cells if cell.task != "unanswerable"]
    n = sum(cell.n for cell in answered)
    if row.status == "NOT RUN" or not n:
        return row
    rates = {
        "exact": sum(cell.right for cell in answered) / n,
        "keyword": sum(cell.keyword for cell in answered) / n,
        "cited": sum(cell.cited for cell in answered) / n,
    }
    told = ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items())
    return Row(row.status, f"{row.evidence}; of all with an answer: {told}", row.file, data=rates)


def _bounded(
    cells: Sequence[Cell],
    required: int,
    threshold: float,
    counts: Callable[[Cell], int],
    what: str,
) -> Row:
    cells = [cell for cell in cells if cell.length <= required]
    if not cells:
        return Row("NOT RUN", f"no sample of {what} up to the required {required} tokens")
    few, needed = min(cell.n for cell in cells), samples_needed(threshold)
    if few < needed:
        text = f"{few} samples cannot certify {threshold}, even all right: {needed} can"
        return Row("NOT RUN", text, "cells.jsonl")
    bounds = {cell: wilson_lower(counts(cell), cell.n) for cell in cells}
    worst = min(cells, key=lambda cell: bounds[cell])
    by_depth = {
        depth: fmean(counts(c) / c.n for c in cells if c.depth == depth)
        for depth in sorted({cell.depth for cell in cells})
    }
    lengths = ", ".join(str(length) for length in sorted({cell.length for cell in cells}))
    gap = max(by_depth.values()) - min(by_depth.values())
    text = (
        f"worst of {len(cells)} cells at {lengths} tokens: {counts(worst)} of {worst.n} "
        f"({worst.task}, {worst.length} tokens, depth {worst.depth:.0%}, {worst.distractors} "
        f"distractors), at least {bounds[worst]:.3f}; gap between depths {gap:.3f}"
    )
    data = {"gap": gap, "by_depth": {str(depth): rate for depth, rate in by_depth.items()}}
    status: Status = "PASS" if bounds[worst] >= threshold else "FAIL"
    return Row(status, text, "cells.jsonl", data=data)


def regression(
    before: Sequence[Cell] | None, cells: Sequence[Cell], trained: int, tolerance: float
) -> Row:
    """A7: on the same short samples it is no worse than before."""
    if before is None:
        return Row("NOT RUN", "no results of before were given; these are saved to compare with")
    places = {_place(cell): cell for cell in before if cell.length <= trained}
    now = {_place(cell): cell for cell in cells}
    common = [place for place in now if place in places and now[place].n == places[place].n]
    if not common:
        return Row("NOT RUN", f"no cell up to {trained} tokens is in both with as many samples")
    pairs = [
        (places[place].right / places[place].n, now[place].right / now[place].n) for place in common
    ]
    was, rate = (fmean(each) for each in zip(*pairs, strict=True))
    text = f"{len(common)} cells up to {trained} tokens: accuracy {was:.3f} before, {rate:.3f} now"
    return Row("FAIL" if was - rate > tolerance else "PASS", text, "cells.jsonl")


def throughput(costs: Sequence[Cost] | None) -> Row:
    """A8: what training costs, which is reported."""
    if costs is None:
        return Row("NOT RUN", "costs were not asked for", "costs.json")
    known = [(c.length, c.train_tokens_per_second) for c in costs if c.train_tokens_per_second]
    errors = "; ".join(f"{c.length}: {c.error}" for c in costs if c.error)
    if not known:
        why = errors or "it has no weights to train, or was not asked to"
        return Row("NOT RUN", why, "costs.json")
    told = ", ".join(f"{rate:.0f} at {length}" for length, rate in known)
    told += f"; not measured at {errors}" if errors else ""
    return Row("PASS", f"tokens per second, forward and backward: {told}", "costs.json")


def decoding(
    costs: Sequence[Cost] | None, checks: Sequence[Decoded | str], causal: bool = True
) -> Row:
    """A9: what prefill and decoding cost, and that the cache gives what a full pass does.

    ``causal`` says whether there was a full pass to compare with, that does not leak.
    """
    known = [check for check in checks if isinstance(check, Decoded)]
    errors = [check for check in checks if isinstance(check, str)]
    wrong = [check for check in known if not check.same]
    told = errors + [
        f"{check.length}: decoding differs from a full pass by {check.difference:.3g} "
        f"(allowed: {check.allowed:.3g})"
        for check in wrong
    ]
    if told:
        return Row("FAIL", "; ".join(told))
    times = "; ".join(
        f"{c.length} tokens: prefill {c.prefill_seconds:.3g} s, decoding "
        f"{c.decode_ms_per_token:.3g} ms per token"
        for c in costs or ()
    )
    if not known:
        why = "it has no cache to compare" if causal else "no full pass to compare with (see A1)"
        return Row("NOT RUN", f"{why}; {times or 'no times'}", "costs.json")
    most = max(check.difference for check in known)
    same = f"decoding with the cache is a full pass within {most:.2g}"
    return Row("PASS", f"{same}; {times or 'times were not asked for'}", "costs.json")


def memory(costs: Sequence[Cost] | None) -> Row:
    """A10: peak memory is reported, and the cache holds what the formula says."""
    if costs is None:
        return Row("NOT RUN", "costs were not asked for", "costs.json")
    peaks = f"peak {costs[-1].peak_bytes} bytes ({costs[-1].peak_of}) at {costs[-1].length}"
    known = [c for c in costs if c.kv_measured is not None and c.kv_formula is not None]
    if not known:
        which = "measured" if costs[-1].kv_measured is None else "known by a formula"
        return Row("NOT RUN", f"{peaks}; the cache is not {which}", "costs.json")
    wrong = [c for c in known if c.kv_measured != c.kv_formula]
    told = "; ".join(
        f"{c.length} tokens: {c.kv_measured} bytes measured, {c.kv_formula} by the formula"
        for c in wrong or known[-1:]
    )
    return Row("FAIL" if wrong else "PASS", f"{peaks}; cache at {told}", "costs.json")


def kept(cells: Sequence[Cell], lines: Sequence[Mapping[str, Any]]) -> Row:
    """A11: each failed sample is in the file once."""
    wanted = {_place(cell): cell.n - cell.right for cell in cells}
    found = dict.fromkeys(wanted, 0)
    for line in lines:
        place = (line["task"], line["distractors"], line["asked"], line["depth"])
        found[place] = found.get(place, 0) + 1
    names = ("task", "distractors", "asked", "depth", "seed")
    once = len({tuple(line[name] for name in names) for line in lines}) == len(lines)
    good = found == wanted and once
    text = f"{len(lines)} of {sum(wanted.values())} failed samples are kept as they were"
    return Row("PASS" if good else "FAIL", text, "failures.jsonl")


def reach(found: EffectiveRange, required: int, cells: Sequence[Cell]) -> Row:
    """A12: the effective range has the required length."""
    few = min((cell.n for cell in cells), default=0)
    data = {
        "claimed": found.claimed,
        "accepted": found.accepted,
        "effective": found.effective,
        "ruler": found.ruler,
        "required": required,
        "untested": list(found.untested),
    }
    if found.first_failing is not None:
        data["first_failing"] = vars(found.first_failing)
    untested = f"; untested: {', '.join(found.untested)}" if found.untested else ""
    if not cells and found.accepted:
        return Row("NOT RUN", "no task was asked for", "cells.jsonl", data=data)
    if cells and few < found.needed:
        text = f"{few} samples cannot certify {found.threshold}, even all right: {found.needed} can"
        return Row("NOT RUN", text, "cells.jsonl", data=data)
    status: Status = "PASS" if found.effective >= required else "FAIL"
    return Row(status, f"{found}; required {required}{untested}", "cells.jsonl", data=data)


def _place(cell: Cell) -> tuple[str, int, int, float]:
    return cell.task, cell.distractors, cell.length, cell.depth
