"""What is asked of a model, and how an answer was judged; lines of JSON that keep them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

TASKS = ("single", "distractors", "conflict", "unanswerable")


@dataclass(frozen=True)
class Sample:
    """One question about a long prompt, with its right answer."""

    task: str
    """``single``, ``distractors``, ``conflict`` or ``unanswerable``."""
    length: int
    """Tokens of the prompt, by the subject's own tokenizer."""
    depth: float
    """Where the evidence begins: 0 is first of all, 1 the last place before the question."""
    seed: int
    prompt: tuple[int, ...]
    value: tuple[int, ...]
    """Tokens of the right value; none where a refusal is right."""
    source: tuple[int, ...]
    """Tokens that cite the record; none where a refusal is right."""
    distractors: int = 0


@dataclass(frozen=True)
class Verdict:
    """How one answer was judged."""

    exact: bool
    """Value and citation are as they must be, or it refuses where that is right."""
    keyword: bool
    """The value occurs, whatever is cited: reported, never counted."""
    cited: bool
    """The right source is cited, and no other."""
    refused: bool
    output: tuple[int, ...]


@runtime_checkable
class Needles(Protocol):
    """Makes samples, and judges answers to them, for one kind of subject."""

    @property
    def new_tokens(self) -> int:
        """How many tokens an answer has at most."""
        ...

    def make(
        self, task: str, length: int, depth: float, seed: int, *, distractors: int = ...
    ) -> Sample:
        """One sample; with another depth, the same but for the place of the evidence."""
        ...

    def judge(self, sample: Sample, output: Sequence[int]) -> Verdict:
        """What an answer is worth."""
        ...


def check_task(task: str, depth: float, distractors: int) -> None:
    """Raises ValueError for a task, depth or number of distractors that cannot be."""
    if task not in TASKS:
        raise ValueError(f"a task is one of {', '.join(TASKS)}, got {task!r}")
    if not 0 <= depth <= 1:
        raise ValueError(f"a depth is from 0, first, to 1, before the question, got {depth}")
    if distractors < 0 or (task == "distractors" and not distractors):
        raise ValueError(
            f"the task {task!r} takes {'1' if task == 'distractors' else '0'} or more "
            f"distractors, got {distractors}"
        )


def to_json(sample: Sample, **more: Any) -> str:
    """A sample, and what else is to be kept beside it, as one line of JSON.

    >>> from_json(to_json(Sample("single", 3, 0.0, 7, (4, 5, 6), (5,), (6,)), output=[1])).prompt
    (4, 5, 6)
    """
    taken = {field.name for field in fields(Sample)} & set(more)
    if taken:
        raise ValueError(f"a sample has its own {', '.join(sorted(taken))}: use other names")
    return json.dumps(asdict(sample) | more)


def from_json(line: str) -> Sample:
    """The sample of a line, as it was; what is kept beside it is left to `read_lines`.

    Raises: ValueError for a line that lacks a part of a sample.
    """
    held = json.loads(line)
    names = [field.name for field in fields(Sample)]
    missing = [name for name in names if not isinstance(held, dict) or name not in held]
    if missing:
        raise ValueError(f"a sample has {', '.join(names)}; a line lacks {', '.join(missing)}")
    parts: dict[str, Any] = {name: held[name] for name in names}
    for name in ("prompt", "value", "source"):
        parts[name] = tuple(parts[name])
    return Sample(**parts)


def write_lines(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write lines, all or none: a file that was there stays whole until they are on disk."""
    write_text(path, "".join(f"{line}\n" for line in lines))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text, all or nothing."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a file with one in each line.

    Raises: ValueError for a line that is none, with its number.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            held = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from error
        if not isinstance(held, dict):
            raise ValueError(f"line {number} of {path} is a {type(held).__name__}, no object")
        found.append(held)
    return found


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """The samples of a file, as they were."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [from_json(line) for line in lines]
