"""A folder of results, as it is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from mmpos.evaluation.effective import DEPTHS, Cell, EffectiveRange, effective_range
from mmpos.evaluation.rows import Row, Status
from mmpos.evaluation.samples import TASKS

ROWS = {
    "A1": "interface takes the length",
    "A2": "quality at the trained length",
    "A3": "evidence at any position",
    "A4": "distractors",
    "A5": "conflicting versions",
    "A6": "exact citation",
    "A7": "short contexts, before and after",
    "A8": "training throughput",
    "A9": "prefill and decoding",
    "A10": "memory and KV cache",
    "A11": "failures kept",
    "A12": "effective range",
}
"""The rows of acceptance."""

STATES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Results:
    """All that a report is made of; ``missing`` are the files that are not there."""

    folder: Path
    settings: dict[str, Any]
    cells: list[Cell]
    rows: dict[str, Row]
    failures: list[dict[str, Any]] = field(default_factory=list)
    costs: Any = None
    perplexity: Any = None
    missing: tuple[str, ...] = ()

    @property
    def verdict(self) -> EffectiveRange:
        """The effective range, by the cells and what the run was asked for."""
        regression = self.rows["A7"].status
        return effective_range(
            self.cells,
            self.settings["threshold"],
            claimed=self.settings["claimed"],
            accepted=self.rows["A12"].data["accepted"],
            lengths=self.settings["lengths"],
            depths=self.settings.get("depths", DEPTHS),
            regression=None if regression == "NOT RUN" else regression == "PASS",
        )

    @property
    def model(self) -> str:
        """What its model is called: ``NAME`` of a folder ``NAME-SEED``, else by its settings."""
        name, _, seed = self.folder.resolve().name.rpartition("-")
        return name if name and seed.isdigit() else str(self.settings.get("name", "model"))


def read(folder: str | PathLike[str]) -> Results:
    """Read the folder of a run; what was measured beside the verdict may be missing.

    Raises: ValueError for a folder that is not of a whole run, and for a file that is damaged.
    """
    folder = Path(folder)
    for name in ("settings.json", "cells.jsonl", "rows.json"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder} has no {name}: give the folder of a run of scripts/long_context.py that "
                "was finished"
            )
    more = ("failures.jsonl", "costs.json", "perplexity.json")
    missing = tuple(name for name in more if not (folder / name).is_file())
    settings = _mapping(folder / "settings.json")
    absent = [name for name in ("claimed", "lengths", "threshold") if name not in settings]
    if absent:
        raise ValueError(f"{folder / 'settings.json'} lacks {', '.join(absent)}")
    cells = [_cell(line, folder) for line in _lines(folder / "cells.jsonl")]
    if len({_key(cell) for cell in cells}) < len(cells):
        raise ValueError(f"{folder / 'cells.jsonl'} is damaged: it has a cell twice")
    failures = [] if more[0] in missing else list(_lines(folder / more[0]))
    costs, perplexity = (None if name in missing else _json(folder / name) for name in more[1:])
    rows = _rows(folder / "rows.json")
    cells.sort(key=_key)
    return Results(folder, settings, cells, rows, failures, costs, perplexity, missing)


def kind(cell: Cell) -> str:
    """The task, and with how many distractors where there are any.

    >>> kind(Cell("distractors", 64, 0.5, 20, 19, distractors=3))
    'distractors (3)'
    """
    return f"{cell.task} ({cell.distractors})" if cell.distractors else cell.task


def _key(cell: Cell) -> tuple:
    known = TASKS.index(cell.task) if cell.task in TASKS else len(TASKS)
    return known, cell.task, cell.distractors, cell.length, cell.depth


def _cell(line: Mapping[str, Any], folder: Path) -> Cell:
    known = {each.name for each in fields(Cell)}
    try:
        return Cell(**{name: value for name, value in line.items() if name in known})
    except (TypeError, ValueError) as error:
        reason = str(error).removeprefix("Cell.__init__() ")
        raise ValueError(f"{folder / 'cells.jsonl'} is damaged: {reason}") from None


def _rows(path: Path) -> dict[str, Row]:
    found = _mapping(path)
    if set(found) != set(ROWS):
        raise ValueError(f"{path} is damaged: it has {', '.join(found)}, expected A1 to A12")
    known = {each.name for each in fields(Row)}
    for name, row in found.items():
        status = row.get("status") if isinstance(row, dict) else None
        if status not in STATES or not isinstance(row.get("evidence"), str):
            raise ValueError(
                f"{path} is damaged: {name} is {status!r}, expected {', '.join(STATES)}, with its "
                "evidence"
            )
    rows = {
        name: Row(**{key: value for key, value in found[name].items() if key in known})
        for name in ROWS
    }
    if not isinstance(rows["A12"].data.get("accepted"), int):
        raise ValueError(f"{path} is damaged: A12 has no length that the interface accepts")
    return rows


def _mapping(path: Path) -> dict[str, Any]:
    found = _json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(found).__name__}, expected names")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                found = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is damaged: {error}") from None
            if not isinstance(found, dict):
                raise ValueError(f"{path}, line {number} is damaged: expected names with values")
            yield found
