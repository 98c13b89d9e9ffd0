"""Records in English text, for models with a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mmpos.evaluation.samples import TASKS, Sample, Verdict, check_task

COLOURS = (
    "blue,green,red,white,black,yellow,orange,purple,brown,grey,pink,violet,amber,olive,copper,"
    "silver,golden,crimson,teal,ivory"
)
KINDS = "old,new,small,large,upper,lower,inner,outer"
FILLER = (
    "Near the harbour,In the valley,Behind the mill,On the hill,By the river,In the market,Along "
    "the road,Past the bridge",
    "a gardener,the baker,an old fisherman,a teacher,the postman,two carpenters,a painter,some "
    "children",
    "watched the clouds,spoke of the weather,repaired a wooden fence,carried baskets of apples,"
    "waited for the ferry,sang a slow song,counted the passing carts,looked for a lost dog",
    "before breakfast,all morning,until the bells rang,in the warm afternoon,after the rain,while "
    "the lamps were lit",
)
REFUSALS = (
    "not in the text",
    "not mentioned",
    "not stated",
    "not given",
    "not provided",
    "does not say",
    "does not mention",
    "no record",
    "no such record",
    "cannot be found",
    "cannot be answered",
)
RECORD = "Record {id} of {date}: the code of the {valve} valve is {value}."
QUESTION = (
    "Question: What is the code of the {valve} valve by its latest record, and what is the id of "
    'that record? Answer with both, such as 12345 (R-678), or with "not in the text".\nAnswer:'
)
_CODE = re.compile(r"(?<![\w-])\d{5}(?!\w)")
_ID = re.compile(r"(?<![\w-])R-\d+(?![\w-])")


class _Parts(NamedTuple):
    """All that a prompt is made of but its fillers; places go from 0 to 1."""

    evidence: str
    others: list[tuple[float, str]]
    question: str
    value: str
    source: str


class TextNeedles:
    """Records "R-417 of 2021-03-05: the code of the blue valve is 58213." in an English text.

    A prompt is sentences, each in a line, with records among them, and a question, which asks for a
    code and the id of the record that tells it.

    - ``single``: one record.
    - ``distractors``: one, and records of other valves.
    - ``conflict``: two or three of the same valve; right is the latest date, wherever it is.
    - ``unanswerable``: of other valves alone; right is to say that it is not in the text.

    With the same task, length, seed and number of distractors, only the place of the evidence
    depends on the depth: 0 is the first line, 1 the one before the question. Of an unanswerable
    question it is that of one of the other records.

    A prompt has the length that is asked for, or is below it by less than a sentence:
    ``Sample.length`` is what the tokenizer counts.

    Args:
        encode, decode: text to tokens and back, without tokens of the tokenizer's own.
        before, after: tokens around all prompts, such as those that begin a text or a turn.
        new_tokens: how many an answer has at most.
        refusals: words that refuse, in any case.

    Raises: ValueError for a tokenizer that does not give back what it was given.

    >>> needles = TextNeedles(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
    >>> sample = needles.make("single", 700, 0.0, 3)
    >>> value, source = (needles.decode(part) for part in (sample.value, sample.source))
    >>> first = needles.decode(sample.prompt).splitlines()[0]
    >>> value in first, source in first, 600 < sample.length <= 700
    (True, True, True)
    >>> needles.judge(sample, f" {value} ({source})".encode()).exact
    True
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        new_tokens: int = 32,
        refusals: Sequence[str] = REFUSALS,
    ) -> None:
        probe = "58213 (R-417)"
        given = decode(list(encode(probe)))
        if given.strip() != probe:
            raise ValueError(
                f"the tokenizer gives {given!r} for {probe!r}: pass an encode that adds no tokens "
                "of its own (add_special_tokens=False) and its decode"
            )
        if new_tokens < 1 or not refusals:
            raise ValueError(
                f"an answer has 1 or more tokens, and refusals words, got {new_tokens}, {refusals}"
            )
        self.encode, self.decode, self.new_tokens = encode, decode, new_tokens
        self.before, self.after = tuple(before), tuple(after)
        self.refusals = tuple(word.lower() for word in refusals)
        self._sizes: dict[str, int] = {}
        self._counts: dict[tuple[str, int, int, int], int] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """What, beside the tokenizer, makes the samples what they are."""
        return {
            "kind": "TextNeedles",
            "before": list(self.before),
            "after": list(self.after),
            "new_tokens": self.new_tokens,
            "refusals": list(self.refusals),
            "probe": list(self.encode(RECORD)),
        }

    def make(
        self, task: str, length: int, depth: float, seed: int, *, distractors: int | None = None
    ) -> Sample:
        """A sample with a prompt of ``length`` tokens or just fewer.

        Args:
            distractors: records of other valves; 3 by default in ``distractors``, else none.

        Raises: ValueError for a task or depth that is none, or a length too short for its records.
        """
        if distractors is None:
            distractors = 3 if task == "distractors" else 0
        check_task(task, depth, distractors)
        draw = np.random.default_rng((seed, TASKS.index(task), distractors))
        parts = _parts(task, draw, distractors)
        key = (task, length, seed, distractors)
        if key not in self._counts:
            self._counts[key] = self._count(parts, seed, length)
        lines = _fillers(seed, self._counts[key])
        prompt = self._prompt(_joined(parts, lines, depth))
        while len(prompt) > length and lines:
            lines.pop()
            prompt = self._prompt(_joined(parts, lines, depth))
        if len(prompt) > length:
            raise ValueError(
                f"{length} tokens are too few for the records and the question of {task!r} with "
                f"{distractors} distractors, which have {len(prompt)}: ask for more"
            )
        return Sample(
            task=task,
            length=len(prompt),
            depth=depth,
            seed=seed,
            prompt=prompt,
            value=tuple(self.encode(parts.value)) if parts.value else (),
            source=tuple(self.encode(parts.source)) if parts.source else (),
            distractors=distractors,
        )

    def judge(self, sample: Sample, output: Sequence[int]) -> Verdict:
        """Whether an answer is right: its first line with words, all of it.

        Exact is the right code and no other, with the right id and no other; or a refusal, without
        any code or id, where that is right.
        """
        text = next((line for line in self.decode(list(output)).splitlines() if line.strip()), "")
        codes, ids = set(_CODE.findall(text)), set(_ID.findall(text))
        refused = any(word in text.lower() for word in self.refusals)
        value, source = (self.decode(list(part)).strip() for part in (sample.value, sample.source))
        cited = bool(source) and ids == {source}
        right = codes == {value} and cited and not refused
        return Verdict(
            exact=right if value else refused and not codes and not ids,
            keyword=bool(value) and value in codes,
            cited=cited,
            refused=refused,
            output=tuple(output),
        )

    def _count(self, parts: _Parts, seed: int, length: int) -> int:
        """How many fillers there is room for, with the evidence first, in the middle and last.

        By the whole text, as tokens may reach over the ends of lines.
        """
        draw = np.random.default_rng((seed, len(FILLER)))
        lines: list[str] = []
        guess = self._size(_joined(parts, lines, 0.0))
        while guess <= length:
            lines.append(_filler(draw))
            guess += self._alone(lines[-1])
        while self._fits(parts, lines, length):
            lines.append(_filler(draw))
        while lines and not self._fits(parts, lines, length):
            lines.pop()
        return len(lines)

    def _fits(self, parts: _Parts, lines: Sequence[str], length: int) -> bool:
        return all(self._size(_joined(parts, lines, depth)) <= length for depth in (0.0, 0.5, 1.0))

    def _prompt(self, text: str) -> tuple[int, ...]:
        return (*self.before, *self.encode(text), *self.after)

    def _size(self, text: str) -> int:
        return len(self.before) + len(self.encode(text)) + len(self.after)

    def _alone(self, line: str) -> int:
        """A guess of what a line adds."""
        if line not in self._sizes:
            self._sizes[line] = max(1, len(self.encode(f"{line}\n")))
        return self._sizes[line]


def _parts(task: str, draw: np.random.Generator, distractors: int) -> _Parts:
    versions = int(draw.integers(2, 4)) if task == "conflict" else 1
    count = versions + distractors + 1
    valves = [f"{kind} {colour}" for kind in KINDS.split(",") for colour in COLOURS.split(",")]
    names = [valves[each] for each in draw.choice(len(valves), size=count, replace=False)]
    values = [str(10000 + each) for each in draw.choice(90000, size=count, replace=False)]
    ids = [f"R-{100 + each}" for each in draw.choice(900, size=count, replace=False)]
    days = np.datetime64("2015-01-01") + draw.choice(3650, size=count, replace=False)
    if versions > 1:
        days[:versions] = np.sort(days[:versions])[::-1]  # the first is the latest
    asked = names[0]
    if task == "unanswerable":
        names[0] = names[-1]  # the last name has no record of its own
    names[1:versions] = [asked] * (versions - 1)
    records = [
        RECORD.format(id=own, date=day, valve=name, value=value)
        for own, day, name, value in zip(ids, days, names, values, strict=True)
    ][:-1]
    places = [float(place) for place in draw.random(len(records) - 1)]
    others = sorted(zip(places, records[1:], strict=True))
    answered = task != "unanswerable"
    return _Parts(
        records[0],
        others,
        QUESTION.format(valve=asked),
        values[0] if answered else "",
        ids[0] if answered else "",
    )


def _joined(parts: _Parts, fillers: Sequence[str], depth: float) -> str:
    """The text: at depth 0 nothing is before the evidence, at 1 only the question is behind it."""
    ends = [round(place * len(fillers)) for place, _ in parts.others]
    lines: list[str] = []
    for (start, end), (_, record) in zip(pairwise([0, *ends]), parts.others, strict=True):
        lines += [*fillers[start:end], record]
    lines += fillers[ends[-1] if ends else 0 :]
    lines.insert(round(depth * len(lines)), parts.evidence)
    return "\n".join([*lines, parts.question])


def _fillers(seed: int, count: int) -> list[str]:
    draw = np.random.default_rng((seed, len(FILLER)))
    return [_filler(draw) for _ in range(count)]


def _filler(draw: np.random.Generator) -> str:
    parts = [words.split(",") for words in FILLER]
    return f"{' '.join(each[int(draw.integers(len(each)))] for each in parts)}."
