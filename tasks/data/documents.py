"""Documents of text as bytes, by name: of Python's standard library, of files, of `datasets`."""

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .splits import SPLITS

Documents = dict[str, bytes]
"""Name → content, in any order."""

Content = TypeVar("Content")

_TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib() -> dict[str, Documents]:
    """The sources of Python's standard library without its tests, and each text of its reference
    manual in ``pydoc_data.topics``; all are of one split, "train".

    Raises: FileNotFoundError for a Python without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        top = name.parts[0].removesuffix(".py")
        known = top in sys.stdlib_module_names and not top.startswith("_sysconfigdata")
        if known and not _TESTS.intersection(name.parts) and top != "pydoc_data":
            found[name.as_posix()] = path.read_bytes()
    if not found:
        raise FileNotFoundError(
            f"this Python has no sources of its standard library at {root}: use a text of your "
            "own, --data.source files --data.root PATH"
        )
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    found |= {f"pydoc_data/topics/{name}": text.encode() for name, text in topics.items()}
    return {"train": found}


def files(root: Path, suffixes: Sequence[str]) -> dict[str, Documents]:
    """A file, or those of a folder, see `paths`."""
    return {
        split: {name: path.read_bytes() for name, path in found.items()}
        for split, found in paths(root, suffixes).items()
    }


def paths(root: Path, suffixes: Sequence[str]) -> dict[str, dict[str, Path]]:
    """A file, or those in any depth of a folder that end in one of ``suffixes``, by split if the
    folder has a folder ``train``.

    Raises: FileNotFoundError where there is none.
    """
    if root.is_file():
        return {"train": {root.name: root}}
    if not root.is_dir():
        raise FileNotFoundError(f"no file or folder of text at {root}: give --data.root PATH")
    parts = {"train": root}
    if (root / "train").is_dir():
        parts = {split: root / split for split in SPLITS if (root / split).is_dir()}
    found = {
        split: {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file() and path.name.endswith(tuple(suffixes))
        }
        for split, folder in parts.items()
    }
    for split, documents in found.items():
        if not documents:
            raise FileNotFoundError(
                f"no file in {parts[split]} ends in {' or '.join(suffixes)}: "
                "name the endings of yours, such as --data.suffixes [.md,.rst]"
            )
    return found


def refuse_binary(name: str, content: bytes) -> None:
    """Raise ValueError for a zero byte."""
    if b"\0" in content:
        raise ValueError(
            f"{name} has a zero byte, so it is binary or no UTF-8: expected text; "
            "leave it out, or convert it"
        )


def load(name: str, subset: str | None, **options: Any) -> dict[str, Any]:
    """The splits of a set of the `datasets` library by their names here.

    Raises: ImportError without that library; ValueError for a set without training rows.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "source datasets needs the library of this name: pip install 'mmpos[datasets]'"
        ) from error
    sets = library.load_dataset(name, subset, **options)
    given = {split: sets.get(split) for split in SPLITS}
    given["val"] = given["val"] or sets.get("validation")
    found = {split: own for split, own in given.items() if own}
    if "train" not in found:
        raise ValueError(f"{name} has the splits {', '.join(sets)}, expected one called train")
    return found


def datasets(name: str, subset: str | None, column: str) -> dict[str, Documents]:
    """The rows of a set of the `datasets` library, which fetches what is not there.

    Raises: see `load`; ValueError for rows without text in ``column``.
    """
    found = {}
    for split, own in load(name, subset).items():
        texts: list[Any] = list(own[column]) if column in own.column_names else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(no_text(name, column, own.column_names))
        found[split] = {f"{index:09}": text.encode() for index, text in enumerate(texts)}
    return found


def no_text(name: str, column: str, columns: Iterable[str]) -> str:
    """What to say of a set without text in a column."""
    return (
        f"{name} has no text in a column {column!r}: name one of {', '.join(columns)} by "
        "--data.column"
    )


def complete(found: dict[str, Documents]) -> dict[str, list[tuple[str, bytes]]]:
    """All three splits, each in the order of a hash of the names, which mixes them.

    Of those that are absent, each has a tenth of the training documents, by the same hash; a single
    document is cut at ends of lines, its last two tenths for val and test.
    """
    absent = [split for split in SPLITS if split not in found]
    if len(absent) == 2 and len(found["train"]) == 1:
        ((name, content),) = found["train"].items()
        first, second = (_line_end(content, len(content) * tenths // 10) for tenths in (8, 9))
        parts = content[:first], content[first:second], content[second:]
        return {s: [(name, part)] * bool(part) for s, part in zip(SPLITS, parts, strict=True)}
    return shared_out(found)


def shared_out(found: Mapping[str, Mapping[str, Content]]) -> dict[str, list[tuple[str, Content]]]:
    """All three splits as `complete` has them, whatever stands for the documents; none is cut."""
    absent = [split for split in SPLITS if split not in found]
    out: dict[str, list[tuple[str, Content]]] = {split: [] for split in SPLITS}
    for split, documents in found.items():
        for name in sorted(documents, key=_hashed):
            number = tenth(_bytes(name))
            held = split == "train" and number < len(absent)
            out[absent[number] if held else split].append((name, documents[name]))
    return out


def tenth(content: bytes) -> int:
    """A number from 0 to 9, by a hash."""
    return hashlib.sha256(content).digest()[-1] * 10 // 256


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _hashed(name: str) -> bytes:
    return hashlib.sha256(_bytes(name)).digest()


def _line_end(content: bytes, near: int) -> int:
    """Where to cut: after the last line that ends before ``near``, else between two characters."""
    line = content.rfind(b"\n", 0, near) + 1
    if line:
        return line
    while near and near < len(content) and content[near] & 0xC0 == 0x80:
        near -= 1
    return near
