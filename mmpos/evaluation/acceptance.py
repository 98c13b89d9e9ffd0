"""Acceptance of a model for long contexts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from mmpos.evaluation import rows as row
from mmpos.evaluation.costs import costs_of
from mmpos.evaluation.effective import DEPTHS, Cell, EffectiveRange, effective_range
from mmpos.evaluation.environment import environment
from mmpos.evaluation.interface import Decoded, decoded, taken
from mmpos.evaluation.judging import counted, failure, made, outcomes, settings_of, told
from mmpos.evaluation.limits import Limits
from mmpos.evaluation.perplexity import by_context
from mmpos.evaluation.rows import Row
from mmpos.evaluation.samples import (
    TASKS,
    Needles,
    read_lines,
    write_lines,
    write_text,
)
from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Acceptance:
    """The rows, the range, and the folder that has all of it."""

    folder: Path
    rows: dict[str, Row]
    range: EffectiveRange
    cells: tuple[Cell, ...]

    @property
    def accepted(self) -> bool:
        """Whether no row fails."""
        return all(each.status != "FAIL" for each in self.rows.values())


def accept(
    subject: Subject,
    needles: Needles,
    lengths: Sequence[int],
    *,
    folder: str | os.PathLike[str],
    trained: int | None = None,
    required: int | None = None,
    depths: Sequence[float] = DEPTHS,
    tasks: Sequence[str] = TASKS,
    distractors: Sequence[int] = (1, 3, 7),
    samples: int = 50,
    seed: int = 0,
    threshold: float = 0.8,
    tolerance: float = 0.02,
    reference: Mapping[str, float] | None = None,
    before: str | os.PathLike[str] | None = None,
    texts: Int[Tensor, "batch length"] | None = None,
    targets: int = 256,
    stride: int = 256,
    limits: Limits | None = None,
    repeats: int = 5,
    decode: int = 16,
    train: bool = True,
    batch_tokens: int = 2**16,
) -> Acceptance:
    """Check a subject by all twelve rows, and write the folder of results.

    ``settings.json``, ``cells.jsonl``, ``failures.jsonl``, ``rows.json``, ``costs.json`` and
    ``perplexity.json``; a row without what it needs is NOT RUN, with the reason. Samples at a
    length that the interface does not take are not asked.

    Args:
        lengths: prompts have these tokens, or just fewer.
        trained: the length of training, 1 ×; by default the least.
        required: the length up to which all must hold; by default the claimed one.
        distractors: how many the task of this name has; unanswerable ones have the middle one.
        samples: of each cell, with seeds from ``seed`` on.
        threshold: what the lower bound of each cell must reach.
        tolerance: what may be lost against ``reference`` (perplexity as a part, accuracy in
            absolute terms) and ``before``.
        reference: ``perplexity`` and ``accuracy`` at the trained length.
        before: the folder of an earlier run, for the short contexts.
        texts: tokens of texts for perplexity, as long as the longest length.
        targets, stride: of perplexity; at most half the trained length is taken.
        limits: those around the model, for the settings.
        repeats, decode: of costs; without repeats, none are measured.
        train: whether to measure training.
        batch_tokens: prompts that are answered at once have at most these tokens.

    Raises: ValueError for options that cannot be, lengths too short for the records, or a folder
        that has results already.

    >>> import tempfile
    >>> from mmpos.evaluation.symbols import VOCABULARY, SymbolNeedles
    >>> subject = mmpos.evaluation.CallableSubject(
    ...     torch.nn.Embedding(VOCABULARY, VOCABULARY), VOCABULARY, claimed=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = accept(subject, SymbolNeedles(), [64], folder=folder, samples=16, repeats=0)
    ...     again = mmpos.evaluation.rerun(folder, subject, SymbolNeedles())
    >>> found.range.accepted, found.range.effective, found.rows["A3"].status, len(again) > 0
    (64, 0, 'FAIL', True)
    """
    folder, lengths = Path(folder), sorted(set(lengths))
    if not lengths or lengths[0] < 2 or samples < 1 or not set(tasks) <= set(TASKS):
        raise ValueError(
            f"lengths of 2 or more, 1 or more samples, and tasks among {TASKS} are needed, got "
            f"{lengths}, {samples}, {tuple(tasks)}"
        )
    if "distractors" in tasks and (not distractors or min(distractors) < 1):
        raise ValueError(f"distractors are 1 or more, got {tuple(distractors)}")
    unknown = sorted(set(reference or {}) - {"perplexity", "accuracy"})
    if unknown:
        raise ValueError(f"a reference is of perplexity and accuracy, got {', '.join(unknown)}")
    if (folder / "rows.json").exists():
        raise ValueError(f"{folder} has results already: give another folder")
    trained = lengths[0] if trained is None else trained
    required = subject.claimed if required is None else required
    if trained < 2 or required < 1:
        raise ValueError(f"trained is 2 or more tokens, required 1, got {trained}, {required}")
    middle = sorted(distractors)[len(distractors) // 2] if distractors else 0
    numbers = {"distractors": sorted(set(distractors)), "unanswerable": [middle]}
    kinds = [(task, number) for task in tasks for number in numbers.get(task, [0])]
    probes = _probes(needles, kinds, lengths, depths, seed)
    old = None if before is None else _before(Path(before), needles, seed, subject)
    settings = {
        "name": subject.name,
        "claimed": subject.claimed,
        "vocabulary": subject.vocabulary,
        "parameters": subject.parameters,
        "needles": settings_of(needles),
        "lengths": lengths,
        "trained": trained,
        "required": required,
        "depths": list(depths),
        "tasks": list(tasks),
        "distractors": list(distractors),
        "samples": samples,
        "seed": seed,
        "threshold": threshold,
        "tolerance": tolerance,
        "reference": dict(reference) if reference else None,
        "before": None if before is None else os.fspath(before),
        "texts": None if texts is None else list(texts.shape),
        "targets": targets,
        "stride": stride,
        "limits": None if limits is None else dict(limits.table()),
        "repeats": repeats,
        "decode": decode,
        "train": train,
        "batch_tokens": batch_tokens,
        "environment": environment(subject.device),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "settings.json", settings)

    checks = [taken(subject, probe, seed) for probe in probes]
    refused = next((check.length for check in checks if not check.accepted), None)
    open_lengths = [n for n, check in zip(lengths, checks, strict=True) if check.accepted]
    reached = [
        n
        for n, check in zip(lengths, checks, strict=True)
        if refused is None or check.length < refused
    ]
    seeds = range(seed, seed + samples)
    cells = _answered(subject, needles, folder, kinds, open_lengths, depths, seeds, batch_tokens)
    read = [] if texts is None else by_context(subject, texts, reached, trained, targets, stride)
    said: dict[str, Any] = {}
    for each in read:
        said.setdefault(each.method, {})[str(each.length)] = each.to_dict()
    _write(folder / "perplexity.json", said)
    spent = None
    if repeats and open_lengths:
        spent = costs_of(subject, open_lengths, repeats=repeats, decoded=decode, train=train)
    _write(folder / "costs.json", {str(each.length): asdict(each) for each in spent or ()})

    # a full pass that leaks is nothing to compare with
    good = [check.accepted and check.causal for check in checks]
    same = _decodings(subject, [probe for probe, ok in zip(probes, good, strict=True) if ok])
    short = row.regression(old, cells, trained, tolerance)
    reach = effective_range(
        cells,
        threshold,
        claimed=subject.claimed,
        accepted=max(reached, default=0),
        lengths=lengths,
        depths=depths,
        regression=None if short.status == "NOT RUN" else short.status == "PASS",
    )
    at_trained = next((p for p in read if p.length == trained and p.method == "last tokens"), None)
    rows = {
        "A1": row.interface(checks),
        "A2": row.quality(reference, cells, at_trained, trained, tolerance),
        "A3": row.needles(cells, "single", required, threshold),
        "A4": row.needles(cells, "distractors", required, threshold),
        "A5": row.needles(cells, "conflict", required, threshold),
        "A6": row.citation(cells, required, threshold),
        "A7": short,
        "A8": row.throughput(spent),
        "A9": row.decoding(spent, same, any(good)),
        "A10": row.memory(spent),
        "A11": row.kept(cells, read_lines(folder / "failures.jsonl")),
        "A12": row.reach(reach, required, cells),
    }
    _write(folder / "rows.json", {name: asdict(each) for name, each in rows.items()})
    return Acceptance(folder, rows, reach, tuple(cells))


def _answered(
    subject: Subject,
    needles: Needles,
    folder: Path,
    kinds: Sequence[tuple[str, int]],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: range,
    batch_tokens: int,
) -> list[Cell]:
    """All cells; they and the failures are in files from the beginning, whole at each length."""
    cells: list[Cell] = []
    failures: list[str] = []
    for length in [0, *lengths]:
        places = product(kinds, depths) if length else ()
        for (task, number), depth in places:
            asked = made(needles, task, length, depth, number, seeds)
            found = list(outcomes(subject, needles, asked, batch_tokens))
            cells.append(counted(found, length))
            failures += [failure(each, length) for each in found if not each.verdict.exact]
        write_lines(folder / "cells.jsonl", [json.dumps(asdict(cell)) for cell in cells])
        write_lines(folder / "failures.jsonl", failures)
    return cells


def _write(path: Path, what: dict[str, Any]) -> None:
    write_text(path, json.dumps(what, indent=1))


def _probes(
    needles: Needles,
    kinds: Sequence[tuple[str, int]],
    lengths: Sequence[int],
    depths: Sequence[float],
    seed: int,
) -> list[Tensor]:
    """A prompt of each length, of just that many tokens; makes one of each kind on the way."""
    probes = []
    for length in lengths:
        for task, number in kinds:
            for depth in depths:
                next(made(needles, task, length, depth, number, range(seed, seed + 1)))
        prompt = next(made(needles, "single", length, 0.5, 0, range(seed, seed + 1))).prompt
        probes.append(torch.tensor((prompt * 2)[-length:]))
    return probes


def _before(folder: Path, needles: Needles, seed: int, subject: Subject) -> list[Cell]:
    held = json.loads((folder / "settings.json").read_text("utf-8"))
    own = {"needles": settings_of(needles), "seed": seed, "vocabulary": subject.vocabulary}
    for name, value in own.items():
        if held.get(name) != value:
            raise ValueError(
                f"{folder} has other samples, its {name} is {held.get(name)}, here it is {value}: "
                "only the same ones tell whether it became worse"
            )
    return [Cell(**line) for line in read_lines(folder / "cells.jsonl")]


def _decodings(subject: Subject, probes: Sequence[Tensor]) -> list[Decoded | str]:
    found: list[Decoded | str] = []
    for probe in probes:
        try:
            check = decoded(subject, probe)
        except Exception as raised:
            found.append(f"{len(probe)}: {told(raised)}")
        else:
            found += [] if check is None else [check]
    return found
