"""Text for language models: Python's own, files, or sets of `datasets`, packed into rows."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from . import documents
from .splits import SPLITS
from .streams import FileStream, SetStream, Stream
from .token_stream import EndlessLoader, TokenStream
from .tokens import Rows, Tokens

Source = Literal["stdlib", "files", "datasets"]


class Text(Tokens):
    """Documents of text, packed into rows of ``context`` tokens.

    A batch is a dict of int64: ``tokens``, ``targets``, ``segments`` and ``bytes`` ``[B, L]``,
    ``positions`` ``[B, L, 1]``. A target is the token that follows in the same document, -100 where
    a row is padded (there at position 0); ``bytes`` counts those of its text. Before each document
    stands the token ``end``, the last of the ``vocabulary``, also the target after its last: every
    byte is predicted once. Documents follow one another without gaps; each is a segment with
    positions from 0, by the rule of `mmpos.positions.packed`. Where a row ends within a document,
    as it must in one longer than the context, the rest goes on in the next row as a new segment,
    which sees nothing of what came before.

    ``source`` is ``stdlib``, the sources of this Python's standard library without tests, and its
    reference manual: real text on every machine, which differs between versions of Python;
    ``files``, a file ``root`` or those of a folder; or ``datasets``, a set of that library, which
    fetches it. The documents of val and test are those of folders or splits of these names
    (``validation``), else a tenth of the documents each by a hash of their names; a single document
    is cut. Bytes are taken as they are, also where they are no UTF-8; a tokenizer needs UTF-8. A
    file with a zero byte is binary and refused; empty ones are left out with one warning.

    Training documents and rows are shuffled anew in each epoch, from ``seed`` and the epoch alone:
    R processes with batches of B see the rows of one process with batches of R·B, and what does not
    fill a row at the end is left out. Each token of validation and test is seen exactly once on any
    number of processes, the documents in the same order whatever the seed.

    With ``streaming`` training documents, of files or of a set, are read as the steps ask for them,
    and no more than one (of a set a buffer of a thousand) is in memory; those of validation and
    test are as they were. Each loader process of each process reads documents of its own, which
    together are all, each once, and begins anew in another order when they end. All follows from
    ``seed`` for a given number of processes and loader processes, and a resumed run goes on with
    the row that would have come, for which it reads once more what was before. The stream has no
    end: steps, or batches of an epoch, are the trainer's ``max_steps`` or ``limit_train_batches``;
    an epoch goes on where the one before it stopped. Of a set without a split for validation or
    test, a tenth of the documents is held out by a hash of their contents, and ``eval_tokens``
    limits how far it is read to find them.

    Args:
        root: file or folder of the text, for "files".
        suffixes: endings of files in a folder; ``.txt`` by default.
        dataset: name of a set, or its folder, for "datasets".
        subset: of its configurations.
        column: where its text is.
        tokenizer: a file of the `tokenizers` library; each byte is a token by default.
        context: tokens of a row.
        batch_size: rows of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_tokens: use this many tokens of training, those of the first documents by the hash;
            all there are by default.
        eval_tokens: the same of validation and test each, or all there are, if fewer.
        streaming: whether training text is read as it is needed, instead of before.
        prompts: texts that ``predict`` goes on with; surrogates, as Python has of bytes that are no
            UTF-8, stand for these bytes, and are shown as �.
    """

    def __init__(
        self,
        source: Source = "stdlib",
        root: str | Path | None = None,
        suffixes: list[str] | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        column: str = "text",
        tokenizer: str | Path | None = None,
        context: int = 128,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        train_tokens: int | None = None,
        eval_tokens: int | None = None,
        streaming: bool = False,
        prompts: list[str] | None = None,
    ) -> None:
        super().__init__()
        # plain strings, so that a checkpoint stays readable with weights_only=True
        root = None if root is None else str(root)
        tokenizer = None if tokenizer is None else str(tokenizer)
        if source not in get_args(Source):
            raise ValueError(f"source is {source!r}; expected one of {get_args(Source)}")
        self.save_hyperparameters()
        self.source = source
        self.root = None if root is None else Path(root)
        self.suffixes = [".txt"] if suffixes is None else suffixes
        self.dataset, self.subset, self.column = dataset, subset, column
        self.tokenizer = tokenizer
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.train_tokens, self.eval_tokens = train_tokens, eval_tokens
        self.streaming = streaming
        self.prompts = prompts
        self._check()
        self._warned = False

    def _check(self) -> None:
        for name, source in (("root", "files"), ("dataset", "datasets")):
            given = getattr(self, name)
            if self.source == source and given is None:
                raise ValueError(f"source {source} needs --data.{name}: what to read")
            if self.source != source and given is not None:
                raise ValueError(
                    f"{name} {given} is given, but source {self.source} needs none; "
                    f"to read it add --data.source {source}"
                )
        if not self.suffixes:
            raise ValueError("suffixes is empty; expected endings such as ['.txt'], or null")
        least = {"context": 1, "batch_size": 1, "num_workers": 0, "seed": 0}
        least |= {"train_tokens": 1, "eval_tokens": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ValueError(f"{name} is {value}; expected at least {bound}")

        if self.streaming and self.source == "stdlib":
            raise ValueError(
                "streaming is of text of your own: give --data.source files or datasets, or leave "
                "it out"
            )
        if self.streaming and self.train_tokens is not None:
            raise ValueError(
                f"train_tokens is {self.train_tokens}, but with streaming the steps say how much "
                "is read: expected --data.train_tokens null"
            )

    @property
    def end(self) -> int:
        """The token between documents."""
        return self.tokens.size

    @property
    def vocabulary(self) -> int:
        """The number of tokens, ``end`` included."""
        return self.tokens.size + 1

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens ``[L]``, without ``end``."""
        return self.tokens.decode([token for token in tokens.tolist() if token != self.end])

    def prepare_data(self) -> None:
        if self.source == "datasets":
            _ = self._stream if self.streaming else self._found()

    def _found(self) -> dict[str, documents.Documents]:
        if self.source == "files":
            assert self.root is not None
            return documents.files(self.root, self.suffixes)
        if self.source == "datasets":
            assert self.dataset is not None
            return documents.datasets(self.dataset, self.subset, self.column)
        return documents.stdlib()

    @cached_property
    def _stream(self) -> Stream:
        if self.source == "files":
            assert self.root is not None
            return FileStream(self.root, self.suffixes, self.seed)
        assert self.dataset is not None
        return SetStream(self.dataset, self.subset, self.column, self.seed)

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.prompts is not None):
            self._data["predict"] = self._prompts()
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if not needed:
            return
        if self.streaming:
            for split in needed:
                self._data[split] = self._stream if split == "train" else self._held(split)
            return
        found = self._found()
        self._leave_out_empty(found)
        if not found["train"]:
            raise ValueError(
                f"there is no text to train on in {self.root or self.dataset or self.source}: all "
                "of its documents are empty"
            )
        parts = documents.complete(found)
        for split in needed:
            self._data[split] = self._rows(split, parts[split])

    def _leave_out_empty(self, found: dict[str, documents.Documents]) -> None:
        empty = []
        for split, contents in found.items():
            empty += [name for name, content in contents.items() if not content]
            found[split] = {name: content for name, content in contents.items() if content}
            for name, content in found[split].items():
                documents.refuse_binary(name, content)
        if empty and self.source != "stdlib" and not self._warned:
            more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
            rank_zero_warn(f"left out {len(empty)} empty documents: {', '.join(empty[:10])}{more}")
        self._warned = True

    def _held(self, split: str) -> Rows:
        stream = self._stream
        if isinstance(stream, SetStream) and split in stream.absent and self.eval_tokens is None:
            raise ValueError(
                f"{self.dataset} has no split for {split}, and all of it would be read to hold "
                "some out: give --data.eval_tokens N"
            )
        return self._rows(split, stream.held(split))

    def _rows(self, split: str, chosen: Iterable[tuple[str, bytes]]) -> Rows:
        training = split == "train"
        most = self.train_tokens if training else self.eval_tokens
        encoded, count = [], 0
        for name, content in chosen:
            if most is not None and count >= most:
                break
            encoded.append(self.tokens.encode(name, content))
            count += 1 + len(encoded[-1][0])
        if training and most is not None and count < most:
            raise ValueError(
                f"train_tokens is {most}, and the training text has {count} tokens: give fewer, or "
                "--data.train_tokens null to use all"
            )
        seed = self.seed if training else None
        return Rows(encoded, self.context, self.end, seed=seed, most=most)

    def _prompts(self) -> list[dict]:
        if not self.prompts:
            raise ValueError("no prompts to go on with: give texts, --data.prompts '[def main]'")
        ends = torch.tensor([self.end])
        given = [prompt.encode("utf-8", "surrogateescape") for prompt in self.prompts]
        encoded = [self.tokens.encode("a prompt", content)[0] for content in given]
        rows = [torch.cat((ends, torch.from_numpy(each.astype("int64")))) for each in encoded]
        shown = [content.decode("utf-8", "replace") for content in given]
        return [{"prompt": p, "tokens": t} for p, t in zip(shown, rows, strict=True)]

    def loader(self, split: str) -> Any:
        """The batches of a split, see `DataModule.loader`; of a training stream without an end."""
        if split != "train" or not self.streaming:
            return super().loader(split)
        stream = self.samples(split)
        processes = self.trainer.world_size if self.trainer else 1
        parts = processes * max(1, self.num_workers)
        if isinstance(stream, FileStream) and len(stream) < parts:
            raise ValueError(
                f"{len(stream)} training files are too few for {parts} loader processes that each "
                "read files of their own: give more, fewer devices or a smaller --data.num_workers"
            )
        rows = TokenStream(
            stream,
            self.tokens,
            self.context,
            self.end,
            batch_size=self.batch_size,
            processes=processes,
            rank=self.trainer.global_rank if self.trainer else 0,
        )
        return EndlessLoader(rows, self.num_workers, self.trainer)

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        have = f"{data.total} tokens, which" if isinstance(data, Rows) else "prompts, which"
        return (
            f"the {split} text has {have} make {len(data)} rows of {self.context}, and "
            f"{needed} are needed for {processes} processes with batches of {self.batch_size}: "
            "give more text, a smaller --data.batch_size or --data.context, or fewer devices"
        )

    def size_of_batches(self, split: str) -> int:
        return 1 if split == "predict" else self.batch_size  # prompts have any lengths

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")
