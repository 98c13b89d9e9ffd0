"""Where sounds with labels come from: folders, SpeechCommands, ESC-50, AudioSet, tables."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torchaudio.datasets import SPEECHCOMMANDS

from .audio_files import audio_files
from .sources import folder_classes, split_folders
from .splits import SPLITS, completed
from .tables import check_folder, number_in, paths_of, rows_of, some, split_tables

SPEECHCOMMANDS_FOLDER = Path("SpeechCommands", "speech_commands_v0.02")
SPEECHCOMMANDS_LISTS = {"val": "validation_list.txt", "test": "testing_list.txt"}
ESC50_COLUMNS = ("filename", "fold", "target", "category")
AUDIOSET_CLASSES = ("index", "mid", "display_name")
AUDIOSET_SEGMENTS = {
    "balanced_train_segments.csv": "train",
    "unbalanced_train_segments.csv": "train",
    "eval_segments.csv": "test",
}


class Clip(NamedTuple):
    """A sound file, and the indices of its classes."""

    path: str
    labels: tuple[int, ...]


class Found(NamedTuple):
    """Classes in the order of labels, and the splits a source comes with, "train" always."""

    classes: list[str]
    splits: dict[str, list[Clip]]
    multilabel: bool


def folder(root: Path) -> Found:
    """``root/<class>/*`` in any depth, or ``root/{train,val,test}/<class>/*``.

    Raises: OSError or ValueError for no training data, fewer than two classes, a class without
        sounds, or other classes in a split than in train.
    """
    check_folder(root, "one with a folder of sounds for each class, or train, val, test of such")
    classes = folder_classes(root, "sounds")
    splits = {
        split: [
            Clip(path, (label,))
            for label, name in enumerate(classes)
            for path in audio_files(base / name)
        ]
        for split, base in split_folders(root, "sounds").items()
    }
    return Found(classes, splits, multilabel=False)


def download_speechcommands(root: Path) -> None:
    """Fetches SpeechCommands, version 2, into ``root`` by torchaudio, unless it is there."""
    if _speechcommands_folder(root) is not None:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        SPEECHCOMMANDS(root, download=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise ConnectionError(
            f"cannot fetch SpeechCommands into {root} ({error}); try again, or unpack "
            f"speech_commands_v0.02.tar.gz in {root / SPEECHCOMMANDS_FOLDER}"
        ) from error


def _speechcommands_folder(root: Path) -> Path | None:
    """Where the folders of words are: below ``root``, or ``root`` itself."""
    if (root / SPEECHCOMMANDS_FOLDER).is_dir():
        return root / SPEECHCOMMANDS_FOLDER
    return root if any((root / name).is_file() for name in SPEECHCOMMANDS_LISTS.values()) else None


def speechcommands(root: Path) -> Found:
    """SpeechCommands as torchaudio lays it out below ``root``, or with its last folder as ``root``:
    ``<word>/<speaker>_nohash_<n>.wav`` and lists of the files that validate and test, whose
    speakers do not train. The noises of ``_background_noise_`` are no word.

    Raises: FileNotFoundError where it is not, or not whole.
    """
    base = _speechcommands_folder(root)
    if base is None:
        raise FileNotFoundError(
            f"SpeechCommands is not in the folder {root}; fetch it with --data.download true"
        )
    paths = [path for path in sorted(base.glob("[!_.]*/*.wav")) if "_nohash_" in path.name]
    left = {f"{path.parent.name}/{path.name}": path for path in paths}
    chosen: dict[str, list[Path]] = {}
    missing: list[str] = []
    for split, name in SPEECHCOMMANDS_LISTS.items():
        listed = (base / name).read_text("utf-8").split() if (base / name).is_file() else [name]
        missing += [each for each in listed if each not in left]
        chosen[split] = [left.pop(each) for each in listed if each in left]
    if missing or not left:
        raise FileNotFoundError(
            f"SpeechCommands in {base} lacks {some(missing) or 'words to train on'}; remove this "
            "folder and fetch it with --data.download true"
        )
    chosen["train"] = list(left.values())
    words = sorted({path.parent.name for path in paths})
    splits = {
        split: [Clip(str(path), (words.index(path.parent.name),)) for path in chosen[split]]
        for split in SPLITS
    }
    return Found(words, splits, multilabel=False)


def esc50(root: Path, fold: int = 5) -> Found:
    """ESC-50: ``root/meta/esc50.csv`` and ``root/audio/*``. Fold ``fold`` tests, the one before it
    (before the first the last) validates, the others train. Classes are in the order of ``target``.

    Raises: OSError or ValueError where it is not so.
    """
    check_folder(root, "that of ESC-50, with meta/esc50.csv and audio")
    rows = rows_of(root / "meta" / "esc50.csv", ESC50_COLUMNS)
    targets = [number_in(row, "target", place) for place, row in rows]
    names: dict[int, str] = {}
    for (place, row), target in zip(rows, targets, strict=True):
        if names.setdefault(target, row["category"]) != row["category"]:
            raise ValueError(f"{place}: target {target} was {names[target]} before: correct one")
    folds = [number_in(row, "fold", place) for place, row in rows]
    known = sorted(set(folds))
    if fold not in known or len(known) < 3:
        raise ValueError(
            f"fold is {fold}, but {root / 'meta' / 'esc50.csv'} has {', '.join(map(str, known))}; "
            "expected three folds or more, and --data.fold one of them"
        )
    order = sorted(names)
    parts = {known[known.index(fold) - 1]: "val", fold: "test"}
    splits: dict[str, list[Clip]] = {split: [] for split in SPLITS}
    for path, part, target in zip(
        paths_of(root / "audio", rows, "filename"), folds, targets, strict=True
    ):
        splits[parts.get(part, "train")].append(Clip(path, (order.index(target),)))
    return Found([names[target] for target in order], splits, multilabel=False)


def audioset(root: Path) -> Found:
    """AudioSet: ``class_labels_indices.csv`` and the ``…_segments.csv`` in ``root``, and sounds,
    already cut, below it in any depth: ``<id>``, ``Y<id>``, or either with ``_<start>`` or
    ``_<start>_<end>``. The evaluation set tests, both training sets train. Segments without a file
    are left out, with one warning.

    Raises: OSError or ValueError where it is not so, or has nothing to train on.
    """
    check_folder(root, "that of AudioSet, with class_labels_indices.csv, its segments and sounds")
    rows = rows_of(root / "class_labels_indices.csv", AUDIOSET_CLASSES)
    rows.sort(key=lambda row: number_in(row[1], "index", row[0]))
    label = {row["mid"]: number for number, (_, row) in enumerate(rows)}
    files = _by_video(root)
    splits: dict[str, list[Clip]] = {}
    seen, absent = set(), []
    for name, split in AUDIOSET_SEGMENTS.items():
        for place, video, mids in _segments(root / name) if (root / name).is_file() else ():
            if unknown := [mid for mid in mids if mid not in label]:
                raise ValueError(f"{place}: {unknown[0]} is not in class_labels_indices.csv")
            if video in seen:
                raise ValueError(f"{place}: {video} was in a line before: remove one")
            seen.add(video)
            paths = files.get(video, [])
            if len(paths) > 1:
                raise ValueError(f"{' and '.join(paths)} are both of segment {video}: remove one")
            if not paths:
                absent.append(video)
                continue
            labels = tuple(sorted({label[mid] for mid in mids}))
            splits.setdefault(split, []).append(Clip(paths[0], labels))
    if "train" not in splits:
        raise FileNotFoundError(
            f"{root} has nothing to train on; expected balanced_train_segments.csv or "
            "unbalanced_train_segments.csv, and sounds that are called as its first column"
        )
    if absent:
        rank_zero_warn(
            f"left out {len(absent)} of {len(seen)} segments of AudioSet that have no file below "
            f"{root}: {some(absent)}"
        )
    return Found([row["display_name"] for _, row in rows], splits, multilabel=True)


def _by_video(root: Path) -> dict[str, list[str]]:
    """Sounds by what may be the YouTube id of 11 characters in their names."""
    found: dict[str, list[str]] = {}
    for path in audio_files(root):
        if match := re.match(r"Y?(.{11})(?:_\d[\d._-]*)?$", Path(path).stem):
            found.setdefault(match[1], []).append(path)
    return found


def _segments(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Where it says so, the id, and the labels of each segment."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.startswith("#") or not line.strip():
                continue
            values = next(csv.reader([line], skipinitialspace=True))
            if len(values) != 4:
                raise ValueError(
                    f"line {number} of {path}: {len(values)} values, expected YTID, start_seconds, "
                    'end_seconds, "positive_labels"'
                )
            yield f"line {number} of {path}", values[0], values[3].split(",")


def table(root: Path) -> Found:
    """``root/{train,val,test}.csv`` with the columns ``file``, a path below ``root``, and
    ``labels``, separated by ``,`` (then quoted) or ``;``. Classes are sorted. It is multi-label if
    any row has other than one label.

    Raises: OSError or ValueError for no train.csv, a file that is missing or in two rows, or a
        label that train.csv does not have.
    """
    check_folder(root, "one with train.csv, of the columns file and labels")
    tables = {
        split: rows_of(path, ("file", "labels"))
        for split, path in split_tables(root, "file and labels").items()
    }
    names = {label for _, row in tables["train"] for label in _labels(row)}
    rows = [(split, *row) for split, own in tables.items() for row in own]
    multilabel = any(len(_labels(row)) != 1 for _, _, row in rows)
    bare = [place for _, place, row in rows if not _labels(row)]
    if bare and not any(len(_labels(row)) > 1 for _, _, row in rows):
        rank_zero_warn(
            f"{bare[0]} has no label ({len(bare)} rows have none): clips are taken to have any "
            "number of labels, here one or none"
        )
    if len(names) < 2 - multilabel:
        raise ValueError(
            f"the table train of {root} has {len(names)} labels ({', '.join(names)}); expected two "
            "or more"
        )
    classes = sorted(names)
    number = {name: label for label, name in enumerate(classes)}
    paths = paths_of(root, [row[1:] for row in rows], "file")
    splits: dict[str, list[Clip]] = {split: [] for split in SPLITS if split in tables}
    for path, (split, place, row) in zip(paths, rows, strict=True):
        if unknown := _labels(row) - names:
            raise ValueError(
                f"{place}: no row of the table train has the label {', '.join(sorted(unknown))}"
            )
        labels = tuple(sorted(number[name] for name in _labels(row)))
        splits[split].append(Clip(path, labels))
    return Found(classes, splits, multilabel)


def complete(found: Found, seed: int) -> dict[str, list[Clip]]:
    """All three splits, see `tasks.data.splits.completed`; with several labels a clip, of all
    classes together.
    """
    several = found.multilabel
    labels = [0 if several else clip.labels[0] for clip in found.splits["train"]]
    classes = ["all classes"] if several else found.classes
    return completed(found.splits, labels, classes, seed, "sounds")


def _labels(row: dict[str, str]) -> set[str]:
    return {name.strip() for name in re.split("[,;]", row["labels"])} - {""}
