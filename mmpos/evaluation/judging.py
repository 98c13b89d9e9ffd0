"""Samples put to a subject, its answers judged and counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmpos.evaluation.effective import Cell
from mmpos.evaluation.samples import Needles, Sample, Verdict, to_json
from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Outcome:
    """A sample, what became of it, and the error that kept an answer from coming, if any."""

    sample: Sample
    verdict: Verdict
    error: str = ""


def outcomes(
    subject: Subject, needles: Needles, samples: Iterable[Sample], batch_tokens: int = 2**16
) -> Iterator[Outcome]:
    """Each sample with what the subject's answer is worth, in their order.

    An error of the subject counts as an empty answer, and is kept.

    Args:
        batch_tokens: as many prompts go at once as have no more tokens than these; one at least.
    """
    for batch in _batches(samples, batch_tokens):
        error = ""
        try:
            answers = subject.answer([sample.prompt for sample in batch], needles.new_tokens)
        except Exception as raised:
            error = told(raised)
            answers = [[] for _ in batch]
        for sample, output in zip(batch, answers, strict=True):
            yield Outcome(sample, needles.judge(sample, output), error)


def made(
    needles: Needles, task: str, length: int, depth: float, number: int, seeds: range
) -> Iterator[Sample]:
    """Samples of one cell, with ``number`` distractors.

    Raises: ValueError for what is not what was asked for.
    """
    for seed in seeds:
        sample = needles.make(task, length, depth, seed, distractors=number)
        if not 0 < len(sample.prompt) <= length or sample.distractors != number:
            raise ValueError(
                f"{type(needles).__name__} was asked for {length} tokens and {number} distractors, "
                f"and made a prompt of {len(sample.prompt)} with {sample.distractors}"
            )
        yield sample


def settings_of(needles: Needles) -> dict[str, Any]:
    """What makes samples what they are, beside task, length, depth and seed."""
    return getattr(needles, "settings", {"kind": type(needles).__name__})


def counted(found: Sequence[Outcome], length: int) -> Cell:
    """The cell of samples of one task and depth, for which ``length`` tokens were asked.

    Raises: ValueError for samples that are not of one cell.
    """
    kinds = {(each.sample.task, each.sample.distractors, each.sample.depth) for each in found}
    if len(kinds) != 1:
        raise ValueError(f"a cell has samples of one task and depth, got {sorted(kinds)}")
    ((task, distractors, depth),) = kinds
    return Cell(
        task=task,
        length=length,
        depth=depth,
        n=len(found),
        right=sum(each.verdict.exact for each in found),
        keyword=sum(each.verdict.keyword for each in found),
        cited=sum(each.verdict.cited for each in found),
        refused=sum(each.verdict.refused for each in found),
        distractors=distractors,
        seeds=len({each.sample.seed for each in found}),
    )


def failure(outcome: Outcome, asked: int) -> str:
    """The line that keeps a failed sample: all of it, the output, how it was judged."""
    verdict = outcome.verdict
    return to_json(
        outcome.sample,
        asked=asked,
        output=list(verdict.output),
        keyword=verdict.keyword,
        cited=verdict.cited,
        refused=verdict.refused,
        error=outcome.error,
    )


def told(error: Exception) -> str:
    """An error in one line.

    >>> told(ValueError("too  long"))
    'ValueError: too long'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    tokens = 0
    for sample in samples:
        if batch and tokens + len(sample.prompt) > batch_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += len(sample.prompt)
    if batch:
        yield batch
