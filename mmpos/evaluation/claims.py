"""Sentences that claim something, each with the one kind of evidence that it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["formula", "paper", "local"]


@dataclass(frozen=True)
class Claim:
    """One sentence, and what it rests on; the three kinds are never mixed in one.

    Args:
        kind: ``formula``, what holds by algebra, wherever it is used; ``paper``, what others
            measured in their setting; ``local``, what was measured or recorded here.
        text: the sentence, with its full stop.
        source: the formula's name, the paper, or the file with the measurement.
        link: where the source is found, as a relative path or an address.

    Raises: ValueError for another kind, no sentence, or no source.

    >>> str(Claim("formula", "A rotation keeps the norm.", "RoFormer, sec. 3.2"))
    'A rotation keeps the norm. (formula: RoFormer, sec. 3.2)'
    """

    kind: Kind
    text: str
    source: str
    link: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"a claim is of the kind {', '.join(get_args(Kind))}, got {self.kind!r} for "
                f"{self.text!r}"
            )
        if not self.text.strip().endswith("."):
            raise ValueError(f"a claim is a sentence with its full stop, got {self.text!r}")
        if not self.source.strip():
            raise ValueError(f"a claim names its source, got none for {self.text!r}")

    def __str__(self) -> str:
        return f"{self.text} ({self.kind}: {self.source})"


def formula(text: str, source: str) -> Claim:
    """What holds by algebra."""
    return Claim("formula", text, source)


def paper(text: str, source: str, link: str = "") -> Claim:
    """What others measured."""
    return Claim("paper", text, source, link)


def local(text: str, source: str, link: str = "") -> Claim:
    """What was measured or recorded here."""
    return Claim("local", text, source, link)


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Names as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
