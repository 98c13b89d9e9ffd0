from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpos.evaluation.samples import Sample, Verdict

SYMBOLS = 16
KEY, DISTRACTOR, ASK, NONE, END = range(SYMBOLS, SYMBOLS + 5)
"""The tokens after the symbols: what begins a record, what begins one that looks like it, the
question, the answer that there is no record, and the end of an answer."""

VOCABULARY = END + 1
RECORD = 4
TASKS = ("single", "distractors", "conflict", "unanswerable")


class SymbolNeedles:
    """Records among fillers, in tokens without a text, for models that are trained on them.

    A prompt is ``END``, fillers with records ``KEY a b r`` among them, and ``ASK``; the answer is
    ``a b r END``: the value and its source. The fillers, the values and the sources are symbols.

    - ``single``: one record.
    - ``distractors``: one, and others ``DISTRACTOR a b r`` that look like it.
    - ``conflict``: two records; that which comes later is right, as a later date is.
    - ``unanswerable``: distractors alone; the answer is ``NONE END``.

    A depth of 0 is a record at the very beginning, 1 one that ends before the question; in
    ``conflict``, the right one has the older one before it at any depth. With the same task, length
    and seed, only the place of the evidence depends on the depth.

    >>> sample = SymbolNeedles().make("single", 12, 0.0, 0)
    >>> len(sample.prompt), sample.prompt[1] == KEY, sample.prompt[-1] == ASK
    (12, True, True)
    >>> SymbolNeedles().judge(sample, [*sample.value, *sample.source, END]).exact
    True
    """

    new_tokens = 4
    tasks = TASKS

    def make(
        self, task: str, length: int, depth: float, seed: int, *, distractors: int = 3
    ) -> Sample:
        """A sample with a prompt of ``length`` tokens.

        Raises: ValueError for an unknown task, a depth that is not from 0 to 1, or a length into
            which its records do not go.
        """
        if task not in TASKS:
            raise ValueError(f"task must be one of {TASKS}, got {task!r}")
        if not 0 <= depth <= 1:
            raise ValueError(f"depth is from 0 to 1, got {depth}")
        others = distractors if task in ("distractors", "unanswerable") else 0
        before = RECORD if task == "conflict" else 0
        body = length - 2
        if body < before + RECORD * (1 + others):
            raise ValueError(
                f"{1 + others + before // RECORD} records of {RECORD} tokens do not go into a "
                f"prompt of {length}"
            )
        draw = np.random.default_rng((seed, TASKS.index(task)))
        tokens = draw.integers(SYMBOLS, size=body).tolist()
        contents = draw.integers(SYMBOLS, size=(2 + others, RECORD - 1)).tolist()
        place = before + round(depth * (body - RECORD - before))
        right, old, rest = contents[0], contents[1], contents[2:]
        starts = [place] if task != "unanswerable" else []
        if task == "conflict":
            starts.append(int(draw.integers(place - RECORD + 1)))
            tokens[starts[1] : starts[1] + RECORD] = [KEY, *old]
        if starts:
            tokens[place : place + RECORD] = [KEY, *right]
        places = _places(draw, _gaps(starts, body), len(rest))
        for at, other in zip(places, rest, strict=True):
            tokens[at : at + RECORD] = [DISTRACTOR, *other]
        answered = task != "unanswerable"
        return Sample(
            task=task,
            length=length,
            depth=depth,
            seed=seed,
            prompt=(END, *tokens, ASK),
            value=tuple(right[:2]) if answered else (),
            source=tuple(right[2:]) if answered else (),
            distractors=others,
        )

    def answer(self, sample: Sample) -> tuple[int, ...]:
        """The tokens of the right answer."""
        return (*sample.value, *sample.source, END) if sample.value else (NONE, END)

    def judge(self, sample: Sample, output: Sequence[int]) -> Verdict:
        """Whether an output is right: its tokens up to the first ``END`` count, and no more."""
        said = tuple(output)
        told = said[: said.index(END)] if END in said else said
        value = sample.value
        keyword = bool(value) and any(told[at : at + 2] == value for at in range(len(told) - 1))
        refused = NONE in told
        return Verdict(
            exact=END in said and told == self.answer(sample)[:-1],
            keyword=keyword,
            cited=bool(value) and told[2:3] == sample.source,
            refused=refused,
            output=said,
        )


def _gaps(starts: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Where fillers begin, and how many there are, around records."""
    ends = [0, *(start + RECORD for start in sorted(starts))]
    return [(end, start - end) for end, start in zip(ends, [*sorted(starts), size], strict=True)]


def _places(draw: np.random.Generator, gaps: list[tuple[int, int]], count: int) -> list[int]:
    """Where ``count`` more records begin in gaps, none touching another.

    Raises: ValueError where they do not go in.
    """
    held = [0] * len(gaps)
    for _ in range(count):
        room = [
            max(size - RECORD * own - RECORD + 1, 0)
            for (_, size), own in zip(gaps, held, strict=True)
        ]
        if not sum(room):
            raise ValueError(f"{count} distractors do not go into a prompt with gaps of {gaps}")
        held[int(draw.choice(len(gaps), p=np.array(room) / sum(room)))] += 1
    found = []
    for (begin, size), own in zip(gaps, held, strict=True):
        offsets = np.sort(draw.integers(size - RECORD * own + 1, size=own))
        found += [begin + int(offset) + RECORD * n for n, offset in enumerate(offsets)]
    return found
