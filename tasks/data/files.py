"""Files of any kind below a folder, and those that cannot be read."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn


def files_below(folder: Path, suffixes: tuple[str, ...], what: str) -> list[str]:
    """Paths of all files with one of ``suffixes`` below ``folder`` in any depth, sorted, without
    hidden ones; of a file itself. Raises FileNotFoundError if none; it says ``what`` is expected.
    """
    if folder.is_file():
        return [str(folder)]
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder or file at {folder}; expected one with {what}")
    found: list[str] = []
    for base, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.join(base, name)
            for name in names
            if not name.startswith(".") and name.lower().endswith(suffixes)
        ]
    if not found:
        raise FileNotFoundError(
            f"no {what} in the folder {folder}, in any depth; expected files of type "
            f"{' '.join(suffixes)}: add some, or give another folder"
        )
    return sorted(found)


def without_broken(
    items: Sequence[Any],
    broken: Mapping[str, str],
    labels: Callable[[Any], Sequence[int]],
    *,
    what: str,
    where: str = "",
    classes: Sequence[str] = (),
) -> list[Any]:
    """The items, each with a ``path``, whose files are not ``broken`` (path → why); one warning
    counts and names the others.

    Raises: ValueError if none is left, or none of one of ``classes``.
    """
    paths = dict.fromkeys(item.path for item in items)
    kept = [item for item in items if item.path not in broken]
    if not kept:
        raise ValueError(f"none of the {len(paths)} files{where} can be read: {_listed(broken)}")
    had, have = ({label for item in some for label in labels(item)} for some in (items, kept))
    if classes and (lost := sorted(had - have)):
        raise ValueError(
            f"no {what} of class {classes[lost[0]]}{where} can be read ({_listed(broken)}): "
            "repair them, or remove the class"
        )
    if broken:
        rank_zero_warn(
            f"left out {len(broken)} of {len(paths)} files{where} that cannot be read: "
            f"{_listed(broken, len(broken))}"
        )
    return kept


def _listed(broken: Mapping[str, str], most: int = 5) -> str:
    more = f" and {len(broken) - most} more" if len(broken) > most else ""
    return ", ".join(f"{path} ({why})" for path, why in list(broken.items())[:most]) + more
