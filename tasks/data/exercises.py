"""Examples of algorithmic tasks as tokens: symbols from 0 on, marks, and a token for the end."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np

TaskName = Literal["copy", "reverse", "addition", "missing_duplicate", "flip_flop"]
MARKS: dict[TaskName, tuple[str, ...]] = {
    "copy": ("=",),
    "reverse": ("=",),
    "addition": ("+", "="),
    "missing_duplicate": ("?", "="),
    "flip_flop": ("w", "r", "i"),
}
"""The tokens of a task after its symbols and before the end, which is the last."""

_IGNORED = 0.8  # of flip-flop's instructions; the rest writes or reads

Parts = tuple[list[int], list[bool]]
"""The tokens of an example without the end before it, and which are to be predicted."""


def size(task: TaskName, length: int) -> int:
    """The most tokens that an example of a length has, without the last, which is a target only."""
    return 3 * length + 4 if task == "addition" else 2 * length + 2


def drawn(task: TaskName, draw: np.random.Generator, length: int, symbols: int) -> Parts:
    """An example with the end before it, as `tasks.data.Algorithms` describes them."""
    marks = list(range(symbols, symbols + len(MARKS[task]) + 1))
    tokens, answered = _EXAMPLES[task](draw, length, symbols, *marks)
    return [marks[-1], *tokens], [False, *answered]


def _answer(prompt: list[int], answer: list[int]) -> Parts:
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def _copy(draw: np.random.Generator, length: int, symbols: int, equals: int, end: int) -> Parts:
    word = draw.integers(symbols, size=length).tolist()
    return _answer([*word, equals], [*word, end])


def _reverse(draw: np.random.Generator, length: int, symbols: int, equals: int, end: int) -> Parts:
    word = draw.integers(symbols, size=length).tolist()
    return _answer([*word, equals], [*word[::-1], end])


def _addition(
    draw: np.random.Generator, length: int, symbols: int, plus: int, equals: int, end: int
) -> Parts:
    least = np.zeros(length, np.int64)  # of digits, the units first
    least[-1] = length > 1
    first, second = draw.integers(least, symbols, size=(2, length)).tolist()
    total, carry = [], 0
    for one, other in zip(first, second, strict=True):
        carry, digit = divmod(one + other + carry, symbols)
        total.append(digit)
    return _answer([*first, plus, *second, equals], [*total, *[1] * carry, end])


def _missing_duplicate(
    draw: np.random.Generator, length: int, symbols: int, hidden: int, equals: int, end: int
) -> Parts:
    twice = draw.integers(symbols, size=length).tolist() * 2
    place = int(draw.integers(2 * length))
    answer = [twice[place]]
    twice[place] = hidden
    return _answer([*twice, equals], answer)


def _flip_flop(
    draw: np.random.Generator, length: int, symbols: int, write: int, read: int, ignore: int, _: int
) -> Parts:
    rest = (1 - _IGNORED) / 2
    inner = draw.choice([write, read, ignore], size=length - 1, p=[rest, rest, _IGNORED])
    instructions = [write, *inner.tolist(), read]
    bits = draw.integers(symbols, size=length + 1).tolist()
    tokens, held = [], 0
    for instruction, bit in zip(instructions, bits, strict=True):
        if instruction == write:
            held = bit
        tokens += [instruction, held if instruction == read else bit]
    return tokens, [part and each == read for each in instructions for part in (False, True)]


_EXAMPLES: dict[TaskName, Callable[..., Parts]] = dict(
    zip(
        get_args(TaskName),
        (_copy, _reverse, _addition, _missing_duplicate, _flip_flop),
        strict=True,
    )
)
