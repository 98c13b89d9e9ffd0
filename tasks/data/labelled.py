"""Texts and sequences with labels: of Python's standard library, of files, of `datasets`."""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn

from . import documents
from .fasta import SUFFIXES, is_fasta, records
from .sources import SPELLINGS
from .splits import SPLITS

PACKAGES = 8
"""How many packages of the standard library are told apart."""


class Labelled(NamedTuple):
    """A text or sequence."""

    name: str
    content: bytes
    label: int


Found = tuple[list[str], dict[str, list[Labelled]]]
"""The classes in the order of labels, and what each split has."""


def stdlib() -> Found:
    """The sources of the largest packages of Python's standard library (without their tests), by
    bytes; all are of one split, "train".
    """
    packages: dict[str, list[tuple[str, bytes]]] = {}
    for name, content in documents.stdlib()["train"].items():
        package, slash, _ = name.partition("/")
        if slash and package != "pydoc_data":  # the manual
            packages.setdefault(package, []).append((name, content))
    sizes = {name: sum(len(text) for _, text in texts) for name, texts in packages.items()}
    names = sorted(sorted(packages, key=lambda name: -sizes[name])[:PACKAGES])
    return names, {
        "train": [Labelled(*text, label) for label, p in enumerate(names) for text in packages[p]]
    }


def split_folders(root: Path) -> dict[str, Path]:
    """Splits of a folder: its folders train, val and test that have classes in them, in any case
    or also called as `tasks.data.sources.SPELLINGS`, else all of it as train.

    Raises: OSError or ValueError where there is no training data, or two folders for a split.
    """
    if not root.is_dir():
        raise FileNotFoundError(
            f"no folder of classes at {root}: give --data.root a folder with a folder of texts or "
            "a FASTA file for each class, or with train, val and test folders of such"
        )
    found: dict[str, Path] = {}
    for folder in _entries(root):
        split = SPELLINGS.get(folder.name.lower(), folder.name.lower())
        if split in SPLITS and folder.is_dir() and _by_class(folder):
            if split in found:
                raise ValueError(f"{found[split]} and {folder} are both for {split}: remove one")
            found[split] = folder
    if found and "train" not in found:
        raise ValueError(f"{root} has {' and '.join(found)} but no train folder with classes")
    return found or {"train": root}


def class_names(root: Path) -> list[str]:
    """The classes of a folder, sorted, the same in all splits; by its listing alone.

    Raises: as `split_folders`; ValueError for fewer than two classes, or others in a split.
    """
    names = {split: sorted(_by_class(path)) for split, path in split_folders(root).items()}
    if len(names["train"]) < 2:
        raise ValueError(
            f"{root} has {len(names['train'])} classes ({', '.join(names['train'])}); expected "
            f"two or more, each a folder of texts or a file that ends in {' '.join(SUFFIXES)}"
        )
    for split, own in names.items():
        if own != names["train"]:
            missing = sorted(set(names["train"]) - set(own))
            surplus = sorted(set(own) - set(names["train"]))
            raise ValueError(
                f"{split} of {root} has other classes than train: missing {missing}, surplus "
                f"{surplus}; every split needs the same"
            )
    return names["train"]


def files(root: Path, suffixes: Sequence[str]) -> Found:
    """The texts and FASTA records of each class: a folder, in any depth, or a FASTA file.

    Raises: as `class_names`; FileNotFoundError for a class without files.
    """
    names = class_names(root)
    found: dict[str, list[Labelled]] = {}
    for split, folder in split_folders(root).items():
        paths = _by_class(folder)
        found[split] = [
            Labelled(text, content, label)
            for label, name in enumerate(names)
            for text, content in texts(paths[name], suffixes, folder)
        ]
    return names, found


def texts(path: Path, suffixes: Sequence[str], base: Path) -> Iterator[tuple[str, bytes]]:
    """The texts and records of a file, or of those of a folder in any depth that end in one of
    ``suffixes`` or as FASTA does. Names are paths below ``base``, of records ``path:record``.

    Raises: FileNotFoundError where there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file or folder at {path}")
    below = sorted(path.rglob("*")) if path.is_dir() else [path]
    below = [p for p in below if p.is_file() and not _hidden(p.relative_to(path))]
    own = [p for p in below if p == path or is_fasta(p) or p.name.endswith(tuple(suffixes))]
    if not own:
        raise FileNotFoundError(
            f"no file in {path} ends in {' or '.join(suffixes)}, or as FASTA in "
            f"{' '.join(SUFFIXES)}: name the endings of yours, such as --data.suffixes [.md,.rst]"
        )
    for file in own:
        name = file.relative_to(base).as_posix()
        if is_fasta(file):
            yield from ((f"{name}:{record}", content) for record, content in records(file))
        else:
            yield name, file.read_bytes()


def datasets(name: str, subset: str | None, column: str, label_column: str) -> Found:
    """The rows of a set of the `datasets` library, which fetches what is not there.

    Raises: as `tasks.data.documents.datasets`; ValueError for rows without a label, or with one
    that training does not have. A split whose labels are all hidden (−1) is left out with a
    warning.
    """
    texts = documents.datasets(name, subset, column)
    library: Any = importlib.import_module("datasets")
    sets = library.load_dataset(name, subset)
    if label_column not in sets["train"].column_names:
        raise ValueError(
            f"{name} has no column {label_column!r}: name that of its labels, one of "
            f"{', '.join(sets['train'].column_names)}, by --data.label"
        )
    labels = {
        split: list(sets["validation" if split not in sets else split][label_column])
        for split in texts
    }
    for split, own in labels.items():
        if wrong := [label for label in own if not isinstance(label, str | int)]:
            raise ValueError(
                f"{split} of {name} has {wrong[0]!r} in the column {label_column!r}, expected one "
                "label, a number or a name: choose another by --data.label"
            )
    names: list[Any] | None = getattr(sets["train"].features[label_column], "names", None)
    known = range(len(names)) if names else sorted(set(labels["train"]), key=_order)
    found = {}
    for split, own in labels.items():
        if split != "train" and set(own) == {-1} and -1 not in known:
            rank_zero_warn(f"{name} hides the labels of {split}: it is held out of train instead")
            continue
        unknown = [label for label in own if label not in known]
        if unknown:
            raise ValueError(
                f"{split} of {name} has the label {unknown[0]!r}, expected one of "
                f"{', '.join(map(str, known))}"
            )
        rows = zip(texts[split].items(), own, strict=True)
        found[split] = [Labelled(*text, known.index(label)) for text, label in rows]
    return [str(label) for label in names or known], found


def complete(
    names: Sequence[str], found: dict[str, list[Labelled]], *, by_bytes: bool = False
) -> dict[str, list[Labelled]]:
    """All three splits: each that is absent has a tenth of every class of the training texts, or
    ``by_bytes`` of their bytes: in the order of a hash of their names, those that still fit.

    Raises: ValueError for a class without texts, or too few to hold some out.
    """
    absent = [split for split in SPLITS if split not in found]
    out: dict[str, list[Labelled]] = {split: [] for split in SPLITS}
    for split, own in found.items():
        for label, name in enumerate(names):
            members = sorted((each for each in own if each.label == label), key=_hashed)
            held = absent if split == "train" else []
            if len(members) <= len(held):
                why = f" to hold out {' and '.join(held)}: give more, or such folders"
                raise ValueError(
                    f"class {name} has {len(members)} texts in {split}, expected {1 + len(held)} "
                    f"or more{why if held else ''}"
                )
            sizes = {each: len(each.content) if by_bytes else 1 for each in members}
            share = sum(sizes[each] for each in members) / 10
            for other in held:
                room, rest = max(share, min(sizes[each] for each in members)), []
                for each in members:
                    fits = sizes[each] <= room
                    (out[other] if fits else rest).append(each)
                    room -= sizes[each] * fits
                members = rest
            out[split] += members
    return out


def _entries(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not _hidden(Path(path.name))]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _by_class(folder: Path) -> dict[str, Path]:
    """The folder or FASTA file of each class. Raises ValueError for a class with two of them."""
    found: dict[str, Path] = {}
    for path in _entries(folder):
        if not path.is_dir() and not is_fasta(path):
            continue
        name = path.name if path.is_dir() else path.stem
        if name in found:
            raise ValueError(
                f"{found[name]} and {path} are both of class {name}: rename one, or put both into "
                "a folder"
            )
        found[name] = path
    return found


def _order(label: Any) -> tuple[bool, Any]:
    return (True, label) if isinstance(label, int) else (False, str(label))


def _hashed(text: Labelled) -> bytes:
    return hashlib.sha256(text.name.encode("utf-8", "surrogateescape")).digest()
