"""Rows of tokens without an end, from documents as they are read."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmpos.positions import packed

from .module import deaf
from .streams import Stream
from .tokens import Bytes, Encoded, Subwords

Piece = tuple[NDArray[np.integer], NDArray[np.integer]]
"""Tokens of a document and the one after them ``[n + 1]``, and the bytes of the last n."""


class TokenStream(IterableDataset[dict[str, Tensor]]):
    """Rows as those of `Rows`, full of documents one after another; those of a pass go on with the
    next pass.

    Each loader process of each of ``processes`` reads a part of its own; a loader takes batches
    from its W processes by turns. A stream that begins with batch ``first`` of ``batch_size`` rows
    gives what a whole one would from there on: it reads, and drops, what comes before.

    Raises: as `Stream.passed`; ValueError for a part without documents.
    """

    def __init__(
        self,
        documents: Stream,
        tokens: Bytes | Subwords,
        context: int,
        end: int,
        *,
        batch_size: int,
        processes: int = 1,
        rank: int = 0,
    ) -> None:
        self.documents, self.tokens = documents, tokens
        self.context, self.end = context, end
        self.batch_size, self.processes, self.rank = batch_size, processes, rank
        self.first = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info else (0, 1)
        turn = (self.first + number) % workers
        dropped = len(range(turn, self.first, workers)) * self.batch_size
        part, parts = self.rank * workers + turn, self.processes * workers
        return islice(self._rows(self._encoded(part, parts)), dropped, None)

    def _encoded(self, part: int, parts: int) -> Iterator[Encoded]:
        for number in count():
            empty = True
            for name, content in self.documents.passed(number, part, parts):
                empty = False
                yield self.tokens.encode(name, content)
            if empty:
                raise ValueError(
                    f"part {part + 1} of {parts} of the training text has no documents: give more, "
                    "fewer devices or a smaller --data.num_workers"
                )

    def _rows(self, documents: Iterable[Encoded]) -> Iterator[dict[str, Tensor]]:
        pieces: list[Piece] = []
        left = self.context
        for tokens, counts, rest in documents:
            symbols = np.concatenate(([self.end], tokens, [self.end]), dtype=np.int64)
            widths = np.concatenate((counts, [rest]), dtype=np.int64)
            place = 0
            while place < len(widths):
                stop = min(place + left, len(widths))
                pieces.append((symbols[place : stop + 1], widths[place:stop]))
                left -= stop - place
                place = stop
                if not left:
                    yield _row(pieces)
                    pieces, left = [], self.context


def _row(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    lengths = [len(counts) for _, counts in pieces]
    positions, segments = packed(lengths, tokens=sum(lengths))
    columns = {
        "tokens": [symbols[:-1] for symbols, _ in pieces],
        "targets": [symbols[1:] for symbols, _ in pieces],
        "bytes": [counts for _, counts in pieces],
    }
    row = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    return {**row, "positions": positions, "segments": segments}


class EndlessLoader:
    """Batches of a stream, each iterator from the one on that the trainer's progress has reached.

    As long as that follows the last that was taken, the batches are of one iterator, whose loader
    processes live as long: an epoch need not read again what was before it. The length is that of
    an epoch as the trainer limits it, or else of all its steps.

    Raises: ValueError for a trainer that gives neither.
    """

    def __init__(self, rows: TokenStream, num_workers: int, trainer: Trainer | None) -> None:
        self._rows, self._workers, self._trainer = rows, num_workers, trainer
        self._iterator: Iterator[Any] | None = None  # by this name Lightning ends its processes
        self._next = 0
        limited = trainer is None or isinstance(trainer.limit_train_batches, int)
        if trainer is not None and trainer.max_steps == -1 and not limited:
            raise ValueError(
                "a stream of text has no end: give steps, --trainer.max_steps N, or batches of an "
                "epoch, --trainer.limit_train_batches N"
            )

    def __len__(self) -> int:
        if self._trainer is None:
            raise TypeError("a stream has no length")
        if self._trainer.max_steps != -1:
            return self._trainer.max_steps * self._trainer.accumulate_grad_batches
        return int(self._trainer.limit_train_batches)

    def __iter__(self) -> Iterator[Any]:
        first = self._seen()
        if self._iterator is None or first != self._next:
            self._iterator, self._next = self._from(first), first
        for batch in self._iterator:
            self._next += 1
            yield batch

    def _seen(self) -> int:
        """Batches that this process has seen, of all epochs."""
        if self._trainer is None or not self._trainer.training:
            return 0
        return self._trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def _from(self, first: int) -> Iterator[Any]:
        self._rows.first = first
        loader = DataLoader(
            self._rows,
            batch_size=self._rows.batch_size,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=deaf,
            generator=torch.Generator(),  # so that an iterator draws nothing from the global one
        )
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the stream goes on by the trainer's progress."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing; that it is here tells Lightning that the loader can be resumed."""
