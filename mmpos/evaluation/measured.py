"""Costs and perplexities as tables, by the names that their files have for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mmpos.evaluation.claims import local
from mmpos.evaluation.document import Block, Table

COSTS = "Seconds are medians of repetitions, without those that warm up."
PERPLEXITY = "Nats and bits are means over all targets of a method and a length."
_WORDS = {"kv_formula": "kv bytes (formula)", "kv_measured": "kv bytes (local)"}
_PLACES = ("length", "window", "stride")

Record = Mapping[str, Any]
"""Measurements by name, and what they are of."""


def measured(value: Any, name: str, text: str) -> list[Block]:
    """A table of all records in a file that have the same names."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for record in records(value):
        row = [shown(each) for each in record.values()]
        tables.setdefault(tuple(record), []).append(row)
    if not tables:
        return [local("Nothing was measured.", name)]
    heads = {names: [_words(each) for each in names] for names in tables}
    return [local(text, name), *(Table(heads[names], rows) for names, rows in tables.items())]


def records(value: Any, path: tuple[str, ...] = ()) -> Iterator[Record]:
    """All records in a file, with the names that lead to them where they do not tell them.

    >>> list(records({"last": {"64": {"length": 64, "nats": 2.5}}}))
    [{'of': 'last, 64', 'length': 64, 'nats': 2.5}]
    """
    if isinstance(value, list):
        for each in value:
            yield from records(each, path)
        return
    if not isinstance(value, Mapping):
        if value is not None:
            yield {"of": ", ".join(path), "value": value} if path else {"value": value}
        return
    inner = {name: each for name, each in value.items() if isinstance(each, Mapping | list)}
    own = {name: each for name, each in value.items() if name not in inner}
    if own:
        told = {str(each) for each in own.values()}
        yield own if told.issuperset(path) else {"of": ", ".join(path), **own}
    for name, each in inner.items():
        yield from records(each, (*path, name))


def numbers(value: Any) -> dict[str, float]:
    """All measured numbers of a file, each by the words that tell which it is.

    >>> numbers([{"length": 64, "method": "last", "nats": 2.5}])
    {'length 64, last: nats': 2.5}
    """
    out: dict[str, float] = {}
    for record in records(value):
        places = [f"{name} {record[name]}" for name in _PLACES if name in record]
        places += [str(record[name]) for name in ("of", "method") if name in record]
        for name, each in record.items():
            number = isinstance(each, int | float) and not isinstance(each, bool)
            if number and name not in _PLACES:
                out[": ".join(filter(None, (", ".join(places), _words(name))))] = float(each)
    return out


def shown(value: Any) -> str:
    """A value as a table has it.

    >>> shown(None), shown(1234), shown(0.123456), shown([1, 2])
    ('–', '1,234', '0.1235', '[1, 2]')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _words(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))
