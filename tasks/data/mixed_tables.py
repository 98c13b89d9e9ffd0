"""Tables whose rows have a text, an image, a sound, or some of them."""

import difflib
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from PIL import Image
from torch import Tensor, tensor
from torch.utils.data import Dataset

from .audio_files import Broken, read_audio, seconds_of
from .features import Features
from .mixed import MODALITIES, Item, Parts
from .pictures import read_image
from .splits import completed
from .tables import Row, check_folder, paths_of, rows_of, split_tables

COLUMNS = "label and any of text, image, audio"


class Entry(NamedTuple):
    """A row of a table: where it stands, its label, and what it has."""

    place: str
    label: str
    text: bytes | None
    image: str | None
    audio: str | None


class Found(NamedTuple):
    """Classes in the order of labels, and the splits that have a table, "train" always."""

    classes: list[str]
    splits: dict[str, list[Entry]]


def entries(
    path: Path, context: int, blank: Collection[str] = (), *, labelled: bool = True
) -> list[Entry]:
    """The rows of a table: a text as it stands, an image and a sound by their paths below its
    folder; one file may be in many rows. A cell of spaces is empty.

    Raises: OSError or ValueError, with the line, for columns of other names, files that are not
        there, text of more bytes than ``context``, a row that has nothing outside ``blank``, and,
        where rows are ``labelled``, one without label.
    """
    rows = rows_of(path, ())
    _check_columns(path, list(rows[0][1]), labelled)
    rows = [(place, {k: v for k, v in row.items() if k not in blank}) for place, row in rows]
    files = {name: _files(path.parent, rows, name) for name in ("image", "audio")}
    found: list[Entry] = []
    for number, (place, row) in enumerate(rows):
        text = row.get("text", "").encode() if row.get("text", "").strip() else None
        if text and len(text) > context:
            raise ValueError(
                f"{place}: text has {len(text)} bytes, and the model is made for {context}: "
                "shorten it, or make another model with --data.context"
            )
        label = row.get("label", "").strip()
        if labelled and not label:
            raise ValueError(f"{place} has no label: give one, or remove the line")
        image, audio = files["image"][number], files["audio"][number]
        if not (text or image or audio):
            left_out = (
                f" besides {', '.join(blank)}, which --data.blank leaves out" if blank else ""
            )
            raise ValueError(
                f"{place} has no text, image or audio{left_out}: give one, or remove the line"
            )
        found.append(Entry(place, label, text, image, audio))
    return found


def _check_columns(path: Path, names: list[str], labelled: bool) -> None:
    known = ("label", *MODALITIES)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name.strip().lower(), known, 1)
            way = f"did you mean {near[0]}?" if near else f"expected {COLUMNS}: rename or remove it"
            raise ValueError(f"{path} has a column {name!r}; {way}")
    if (labelled and "label" not in names) or not set(names) & set(MODALITIES):
        expected = COLUMNS if labelled else "any of text, image, audio"
        raise ValueError(f"{path} has the columns {', '.join(names)}; expected {expected}")


def _files(base: Path, rows: Sequence[Row], column: str) -> list[str | None]:
    """Of each row the file in a column, None for an empty cell."""
    given = [number for number, (_, row) in enumerate(rows) if row.get(column, "").strip()]
    paths = paths_of(base, [rows[number] for number in given], column, shared=True)
    found: list[str | None] = [None] * len(rows)
    for number, path in zip(given, paths, strict=True):
        found[number] = path
    return found


def read(root: Path, context: int, blank: Collection[str] = ()) -> Found:
    """``root/{train,val,test}.csv``. Classes are the sorted labels of train.csv.

    Raises: as `entries`; OSError or ValueError for no train.csv, fewer than two classes, or a label
        that train.csv does not have.
    """
    check_folder(root, f"one with train.csv, of the columns {COLUMNS}")
    splits = {
        split: entries(path, context, blank)
        for split, path in split_tables(root, "label and text, image or audio").items()
    }
    classes = sorted({entry.label for entry in splits["train"]})
    if len(classes) < 2:
        raise ValueError(
            f"the table train of {root} has one label ({classes[0]}); expected two or more"
        )
    for entry in (entry for own in splits.values() for entry in own):
        if entry.label not in classes:
            near = difflib.get_close_matches(entry.label, classes, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{entry.place}: no row of the table train has the label {entry.label}{hint}"
            )
    return Found(classes, splits)


def complete(found: Found, seed: int) -> dict[str, list[Entry]]:
    """All three splits, see `tasks.data.splits.completed`. Rows that share a file may come to two
    sides.
    """
    labels = [found.classes.index(entry.label) for entry in found.splits["train"]]
    return completed(found.splits, labels, found.classes, seed, "rows")


class Rows(Dataset[Item]):
    """Item ``i`` is what row ``i`` (modulo their number) has, and ``{"class": label}``, or where it
    stands if there are no ``classes``.

    Args:
        transform: from a PIL image of ``mode`` to ``[C, H, W]``.
        seconds: of the longest sound that may be.

    Raises: ValueError, with the line, for a sound that is longer, or cannot be read by its header;
    in the item for an image or sound that cannot be decoded, or has less than a frame.
    """

    def __init__(
        self,
        found: Sequence[Entry],
        classes: Sequence[str],
        transform: Callable[[Image.Image], Tensor],
        mode: str,
        features: Features,
        seconds: float,
    ) -> None:
        self.entries, self.classes = found, classes
        self.transform, self.mode = transform, mode
        self.features, self.seconds = features, seconds
        length = functools.cache(seconds_of)
        for entry in found:
            if entry.audio:
                try:
                    self._check_length(entry, length(entry.audio))
                except Broken as error:
                    _unreadable(entry.place, "sound", entry.audio, error.reason, error)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Item:
        entry = self.entries[index % len(self)]
        parts = Parts(
            tensor(list(entry.text)) if entry.text else None,
            self._image(entry, entry.image) if entry.image else None,
            self._frames(entry, entry.audio) if entry.audio else None,
        )
        labels: Any = entry.place
        if self.classes:
            labels = {"class": self.classes.index(entry.label)}
        return parts, labels

    def _image(self, entry: Entry, path: str) -> Tensor:
        try:
            image = read_image(path, self.mode)
        except ValueError as error:
            _unreadable(entry.place, "image", path, error.__cause__, error)
        return self.transform(image)

    def _frames(self, entry: Entry, path: str) -> Tensor:
        try:
            sound = read_audio(path, self.features.rate)
        except Broken as error:
            _unreadable(entry.place, "sound", path, error.reason, error)
        self._check_length(entry, len(sound) / self.features.rate)
        if not self.features.frames(len(sound)):
            reason = f"its {len(sound)} samples are less than a frame"
            _unreadable(entry.place, "sound", path, reason)
        return self.features(sound)

    def _check_length(self, entry: Entry, seconds: float) -> None:
        if seconds > self.seconds + 1 / self.features.rate:
            raise ValueError(
                f"{entry.place}: {entry.audio} is {seconds:.2f} seconds long, and the model is "
                f"made for {self.seconds:g}: shorten it, or make another with --data.seconds"
            )


def _unreadable(
    place: str, what: str, path: str, reason: object, cause: Exception | None = None
) -> NoReturn:
    raise ValueError(
        f"{place}: cannot read the {what} {path} ({reason}); repair it, or remove the line"
    ) from cause
