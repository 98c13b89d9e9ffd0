"""Tables of files: the CSVs that tell where sounds are, read with the line of each mistake."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path


def check_folder(root: Path, expected: str) -> None:
    """Raises FileNotFoundError for what is no folder."""
    if not root.is_dir():
        what = "is a file" if root.is_file() else "does not exist"
        raise FileNotFoundError(f"the data folder {root} {what}; give --data.root {expected}")


def some(names: Sequence[str]) -> str:
    """The first three of names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


Row = tuple[str, dict[str, str]]
"""Which line of which table, and its values by column."""


def rows_of(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a CSV. Raises OSError or ValueError for one without them or these columns."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; expected it there")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            rows = [(f"line {reader.line_num} of {path}", row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV of UTF-8 ({error}): save it as such") from error
    if not set(columns) <= set(names):
        raise ValueError(
            f"{path} has the columns {names}, expected {', '.join(columns)}, separated by commas"
        )
    for place, row in rows:
        if None in row or None in row.values():
            raise ValueError(
                f"{place} has other than {len(names)} values; put values that have commas in "
                'quotes, "a,b"'
            )
    if not rows:
        raise ValueError(f"{path} has no rows: add some, or remove it")
    return rows


def number_in(row: dict[str, str], column: str, place: str) -> int:
    """The whole number in a column. Raises ValueError for another value."""
    if not row[column].strip().isdecimal():
        raise ValueError(f"{place}: {column} is {row[column]!r}, expected a whole number")
    return int(row[column])


def paths_of(base: Path, rows: Sequence[Row], column: str) -> list[str]:
    """The file of each row below ``base``. Raises OSError or ValueError for one not there, or in
    two rows.
    """
    places: dict[str, str] = {}
    for place, row in rows:
        path = os.path.normpath(base / row[column].strip())
        if path in places:
            raise ValueError(f"{place} and {places[path]} are both of {path}: remove one")
        places[path] = place
    if missing := [path for path in places if not os.path.isfile(path)]:
        raise FileNotFoundError(
            f"{places[missing[0]]}: there is no {missing[0]} ({len(missing)} of {len(rows)} files "
            "are missing): put them there, or remove their lines"
        )
    return list(places)
