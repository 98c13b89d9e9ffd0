"""Tables of files: the CSVs that tell where sounds are, read with the line of each mistake."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from .sources import SPELLINGS
from .splits import SPLITS


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
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, expected a table, a CSV file")
    if not path.is_file():
        raise FileNotFoundError(f"no {path.name} in {path.parent}; expected it there")
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            end = reader.line_num
            for row in reader:
                rows.append((f"line {end + 1} of {path}", row))
                end = reader.line_num
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV of UTF-8 ({error}): save it as such") from error
    if len(set(names)) < len(names):
        raise ValueError(f"{path} has two columns of one name, of {names}: rename or remove one")
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


def split_tables(root: Path, columns: str) -> dict[str, Path]:
    """``root/{train,val,test}.csv`` as far as there are, in any case or also called as
    `tasks.data.sources.SPELLINGS`. Raises OSError or ValueError for no train.csv, or two tables for
    a split.
    """
    found: dict[str, Path] = {}
    for path in sorted(root.glob("*.csv")):
        split = SPELLINGS.get(path.stem.lower(), path.stem.lower())
        if split in found:
            raise ValueError(f"{root} has two tables for {split}, {path.name} is one: remove one")
        if split in SPLITS:
            found[split] = path
    if "train" not in found:
        raise FileNotFoundError(f"no train.csv in {root}; expected it with the columns {columns}")
    return {split: found[split] for split in SPLITS if split in found}


def number_in(row: dict[str, str], column: str, place: str) -> int:
    """The whole number in a column. Raises ValueError for another value."""
    if not row[column].strip().isdecimal():
        raise ValueError(f"{place}: {column} is {row[column]!r}, expected a whole number")
    return int(row[column])


def paths_of(base: Path, rows: Sequence[Row], column: str, *, shared: bool = False) -> list[str]:
    """The file of each row below ``base``. Raises OSError or ValueError for one not there, or in
    two rows, unless they may be ``shared``.
    """
    places: dict[str, str] = {}
    paths: list[str] = []
    for place, row in rows:
        path = os.path.normpath(base / row[column].strip())
        if path in places and not shared:
            raise ValueError(f"{place} and {places[path]} are both of {path}: remove one")
        places.setdefault(path, place)
        paths.append(path)
    if missing := [path for path in places if not os.path.isfile(path)]:
        raise FileNotFoundError(
            f"{places[missing[0]]}: there is no {missing[0]} ({len(missing)} of {len(places)} "
            "files are missing): put them there, or remove their lines"
        )
    return paths
