"""Failed samples once more, as they are."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mmpos.evaluation.judging import outcomes
from mmpos.evaluation.samples import Needles, Sample, Verdict, read_lines, read_samples
from mmpos.evaluation.subjects import Subject


@dataclass(frozen=True)
class Again:
    """A sample that failed, what was answered then, and what is now."""

    sample: Sample
    before: tuple[int, ...]
    verdict: Verdict
    error: str = ""


def rerun(
    folder: str | os.PathLike[str],
    subject: Subject,
    needles: Needles,
    *,
    batch_tokens: int = 2**16,
) -> list[Again]:
    """The failed samples of a folder, token for token, put to a subject once more.

    Nothing is written. Raises: ValueError for a subject with another vocabulary.
    """
    folder = Path(folder)
    known = json.loads((folder / "settings.json").read_text("utf-8"))["vocabulary"]
    if known != subject.vocabulary:
        raise ValueError(
            f"the samples of {folder} are of {known} tokens, and {subject.name} has "
            f"{subject.vocabulary}: they would mean something else"
        )
    path = folder / "failures.jsonl"
    outputs = [tuple(line["output"]) for line in read_lines(path)]
    found = outcomes(subject, needles, read_samples(path), batch_tokens)
    return [
        Again(each.sample, output, each.verdict, each.error)
        for each, output in zip(found, outputs, strict=True)
    ]
