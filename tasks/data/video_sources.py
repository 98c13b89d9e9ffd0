"""Where videos come from: files below a folder; with labels, folders and tables."""

from pathlib import Path
from typing import NamedTuple

from .files import files_below
from .sources import folder_classes, split_folders
from .splits import SPLITS, completed
from .tables import check_folder, paths_of, rows_of, split_tables

SUFFIXES = (".264", ".265", ".3gp", ".asf", ".avi", ".flv", ".gif", ".h264", ".h265", ".hevc")
SUFFIXES += (".ivf", ".m2ts", ".m2v", ".m4v", ".mjpeg", ".mjpg", ".mkv", ".mov", ".mp4", ".mpeg")
SUFFIXES += (".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m")


class Labelled(NamedTuple):
    """A video file, and the index of its class."""

    path: str
    label: int


class Found(NamedTuple):
    """Classes in the order of labels, and the splits a source comes with, "train" always."""

    classes: list[str]
    splits: dict[str, list[Labelled]]


def video_files(folder: Path) -> list[str]:
    """Paths of all video files below ``folder``, see `tasks.data.files.files_below`."""
    return files_below(folder, SUFFIXES, "videos")


def folder(root: Path) -> Found:
    """``root/<class>/*`` in any depth, or ``root/{train,val,test}/<class>/*``.

    Raises: OSError or ValueError for no training data, fewer than two classes, a class without
        videos, or other classes in a split than in train.
    """
    check_folder(root, "one with a folder of videos for each class, or train, val, test of such")
    classes = folder_classes(root, "videos")
    splits = {
        split: [
            Labelled(path, label)
            for label, name in enumerate(classes)
            for path in video_files(base / name)
        ]
        for split, base in split_folders(root, "videos").items()
    }
    return Found(classes, splits)


def table(root: Path) -> Found:
    """``root/{train,val,test}.csv`` with the columns ``file``, a path below ``root``, and
    ``label``. Classes are sorted.

    Raises: OSError or ValueError for no train.csv, fewer than two labels, a file that is missing or
        in two rows, or a label that is empty or that train.csv does not have.
    """
    check_folder(root, "one with train.csv, of the columns file and label")
    tables = {
        split: rows_of(path, ("file", "label"))
        for split, path in split_tables(root, "file and label").items()
    }
    classes = sorted({row["label"].strip() for _, row in tables["train"]} - {""})
    if len(classes) < 2:
        raise ValueError(
            f"the table train of {root} has {len(classes)} labels ({', '.join(classes)}); expected "
            "two or more"
        )
    rows = [(split, row) for split, own in tables.items() for row in own]
    paths = paths_of(root, [row for _, row in rows], "file")
    splits: dict[str, list[Labelled]] = {split: [] for split in SPLITS if split in tables}
    for path, (split, (place, row)) in zip(paths, rows, strict=True):
        name = row["label"].strip()
        if name not in classes:
            reason = f"no row of the table train has the label {name}" if name else "it has none"
            raise ValueError(f"{place}: {reason}; expected one label, of train's")
        splits[split].append(Labelled(path, classes.index(name)))
    return Found(classes, splits)


def complete(found: Found, seed: int) -> dict[str, list[Labelled]]:
    """All three splits, see `tasks.data.splits.completed`."""
    labels = [video.label for video in found.splits["train"]]
    return completed(found.splits, labels, found.classes, seed, "videos")
