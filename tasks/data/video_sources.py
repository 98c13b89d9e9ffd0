"""Where videos come from: files below a folder; with labels, folders and tables."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .sources import folder_classes, split_folders
from .splits import SPLITS, hold_out
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
    """Paths of all video files below ``folder`` in any depth, sorted, hidden ones left out; of a
    file itself. Raises FileNotFoundError if none.
    """
    if folder.is_file():
        return [str(folder)]
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder or file at {folder}; expected one with videos")
    found: list[str] = []
    for base, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.join(base, name)
            for name in names
            if not name.startswith(".") and name.lower().endswith(SUFFIXES)
        ]
    if not found:
        raise FileNotFoundError(
            f"no videos in the folder {folder}, in any depth; expected files of type "
            f"{' '.join(SUFFIXES)}: add some, or give another folder"
        )
    return sorted(found)


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
    tables = {split: rows_of(path, ("file", "label")) for split, path in split_tables(root).items()}
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
    """All three splits: each that is absent has a tenth of the training videos of every class, at
    least one, chosen by ``seed``.

    Raises: ValueError for a class with too few training videos.
    """
    absent = [split for split in SPLITS if split not in found.splits]
    train = found.splits["train"]
    targets = np.array([video.label for video in train])
    counts = np.bincount(targets, minlength=len(found.classes))
    for name, count in zip(found.classes, counts, strict=True):
        if count <= len(absent):
            raise ValueError(
                f"train has {count} videos of {name}, expected {1 + len(absent)} or more, to hold "
                f"out {' and '.join(absent)}: give more, or such splits"
            )
    held = hold_out(targets, absent, seed)
    splits = found.splits | {split: [train[i] for i in own] for split, own in held.items()}
    return {split: splits[split] for split in SPLITS}
