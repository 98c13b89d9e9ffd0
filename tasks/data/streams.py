"""Documents of text that are read as they are asked for, in parts that share them out."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import documents
from .splits import SPLITS

BUFFER = 1000
"""Documents of a set among which the next is drawn, in each part."""

Named = tuple[str, bytes]


class Stream(Protocol):
    """Training documents, any number of times, and those that are held out."""

    def passed(self, number: int, part: int, parts: int) -> Iterator[Named]:
        """Names and contents of one of ``parts`` in pass ``number`` over all training documents,
        none of which is in two parts. Empty documents are left out.

        Raises: ValueError for a document with a zero byte; OSError, which names it, for a file that
            cannot be read.
        """
        ...

    def held(self, split: str) -> Iterator[Named]:
        """Those of validation or of test, always in the same order."""
        ...


class FileStream:
    """Files that are opened one by one, in an order drawn from ``(seed, number)`` for each pass.

    Which files are held out is as `documents.complete` has it.

    Raises: FileNotFoundError where there is none; ValueError for a single one, whose parts would be
        held out, or where none is left for training.
    """

    def __init__(self, root: Path, suffixes: Sequence[str], seed: int) -> None:
        found = documents.paths(root, suffixes)
        if len(found) == 1 and len(found["train"]) == 1:
            raise ValueError(
                f"streaming opens one file after another, and {root} has one: cut it into several, "
                "or leave --data.streaming out"
            )
        self._parts, self.seed = documents.shared_out(found), seed
        if not self._parts["train"]:
            raise ValueError(
                f"all files of {root} are held out for val and test: give more, or folders train, "
                "val and test"
            )

    def __len__(self) -> int:
        return len(self._parts["train"])

    def passed(self, number: int, part: int, parts: int) -> Iterator[Named]:
        order = np.random.default_rng((self.seed, number)).permutation(len(self))
        files = self._parts["train"]
        return _texts(files[index] for index in order[part::parts])

    def held(self, split: str) -> Iterator[Named]:
        return _texts(self._parts[split])


class SetStream:
    """Rows of a set of the `datasets` library, without fetching the whole.

    Each pass begins with the files of the set in a drawn order, and draws from a buffer of `BUFFER`
    documents, by ``(seed, number)``. Where the set has at least as many files as there are parts,
    each part reads files of its own; else each reads all, and keeps every so-manieth document. The
    splits that the set lacks are held out: a tenth of its training documents each, by a hash of
    their contents.

    Raises: see `documents.load`; while reading, ValueError for a row without text in ``column``.
    """

    def __init__(self, name: str, subset: str | None, column: str, seed: int) -> None:
        self.name, self.column, self.seed = name, column, seed
        self._sets = documents.load(name, subset, streaming=True)
        self.absent = [split for split in SPLITS if split not in self._sets]

    def passed(self, number: int, part: int, parts: int) -> Iterator[Named]:
        own: Any = self._sets["train"]
        whole = getattr(own, "num_shards", 1) >= parts and hasattr(own, "shard")
        key = (self.seed, number, part) if whole else (self.seed, number)
        own = own.shard(num_shards=parts, index=part) if whole else own
        seed = int(np.random.default_rng(key).integers(2**31))
        rows = self._rows("train", own.shuffle(seed=seed, buffer_size=BUFFER))
        for index, (name, content) in enumerate(rows):
            kept = whole or index % parts == part
            if kept and documents.tenth(content) >= len(self.absent):
                yield name, content

    def held(self, split: str) -> Iterator[Named]:
        if split not in self.absent:
            yield from self._rows(split, self._sets[split])
            return
        own = self.absent.index(split)
        for name, content in self._rows("train", self._sets["train"]):
            if documents.tenth(content) == own:
                yield name, content

    def _rows(self, split: str, rows: Any) -> Iterator[Named]:
        # by `iter`: iterated as it is, the set shares itself out among loader processes once more
        for number, row in enumerate(rows.iter(batch_size=1)):
            (text,) = row.get(self.column, [None])
            if not isinstance(text, str):
                raise ValueError(documents.no_text(self.name, self.column, row))
            if text:
                content = text.encode()
                documents.refuse_binary(f"row {number} of {split} in {self.name}", content)
                yield f"{split} {number}", content


def _texts(files: Iterable[tuple[str, Path]]) -> Iterator[Named]:
    for name, path in files:
        if content := path.read_bytes():
            documents.refuse_binary(name, content)
            yield name, content
