"""From documents to tokens, and from tokens to rows of packed documents."""

import functools
import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mmpos.positions import packed

from .module import DataModule

Encoded = tuple[NDArray[np.integer], NDArray[np.integer], int]
"""The tokens of a document, the bytes of text that each stands for, and those that none does."""


class Bytes:
    """Each byte is a token: 256, whatever the encoding of the text."""

    size = 256
    kind = "bytes"

    def encode(self, name: str, content: bytes) -> Encoded:
        """The bytes as they are."""
        tokens = np.frombuffer(content, np.uint8)
        return tokens, np.ones(len(tokens), np.uint8), 0

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, with � for what is no UTF-8."""
        return bytes(tokens).decode("utf-8", "replace")


class Subwords:
    """Tokens of a file of the `tokenizers` library; its truncation, padding and special tokens
    around a text are left out.

    Raises: ImportError without that library; ValueError for a file that it cannot read; where text
        is read, for what is no UTF-8.
    """

    def __init__(self, path: str) -> None:
        try:
            library: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ImportError(
                f"tokenizer {path} needs the library tokenizers: pip install 'mmpos[tokenizers]'"
            ) from error
        if not Path(path).is_file():
            kind = "a folder" if Path(path).is_dir() else "not there"
            raise FileNotFoundError(
                f"the tokenizer file {path} is {kind}: give one that the library tokenizers wrote, "
                "--data.tokenizer FILE"
            )
        try:
            self._tokenizer = library.Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path} is not a file that tokenizers.Tokenizer.save writes ({error})"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def kind(self) -> str:
        """A hash of what each number stands for."""
        vocabulary = sorted(self._tokenizer.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()

    def encode(self, name: str, content: bytes) -> Encoded:
        """The tokens, and the bytes from the end of the one before to the end of each."""
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name} is not UTF-8 (byte {error.start}): convert it, leave it out, or read "
                "bytes, without a tokenizer"
            ) from error
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        code = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000).astype(np.int64)
        after = np.concatenate(([0], np.cumsum(widths)))
        ends = after[np.array([end for _, end in encoding.offsets], np.int64)]
        covered = np.concatenate(([0], ends))
        return np.array(encoding.ids, np.int64), np.diff(covered), len(content) - int(covered[-1])

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


class Tokens(DataModule):
    """Data of tokens: `Bytes`, or `Subwords` of the file ``tokenizer``.

    A checkpoint records what its tokens stand for.
    """

    tokenizer: str | None

    @functools.cached_property
    def tokens(self) -> Bytes | Subwords:
        """What makes tokens of text."""
        return Bytes() if self.tokenizer is None else Subwords(self.tokenizer)

    def state_dict(self) -> dict[str, Any]:
        """What tokens stand for."""
        return {"tokens": self.tokens.kind}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError for a checkpoint of a model to which tokens stand for something else."""
        if state_dict["tokens"] != self.tokens.kind:
            now = self.tokenizer or "bytes (tokenizer is null)"
            raise ValueError(
                f"the checkpoint was trained with other tokens than those of {now}: give the "
                "tokenizer that it was trained with, --data.tokenizer FILE"
            )


class Rows(Dataset):
    """Rows of ``context`` tokens with the one that follows each, from documents one after another.

    The token ``end`` stands before each document and after the last. Item ``i`` of epoch e, by the
    index ``i + e · len``, is row i of the documents in an order drawn from ``(seed, e)``; in the
    given order if ``seed`` is None, where the last row is padded instead of left out, and a single
    one is no longer than its tokens.

    Args:
        documents: as `Bytes.encode` gives them, one or more.
        most: how many tokens are used; the last document is cut there.
    """

    def __init__(
        self,
        documents: Sequence[Encoded],
        context: int,
        end: int,
        *,
        seed: int | None = None,
        most: int | None = None,
    ) -> None:
        narrow = np.uint16 if end < 2**16 else np.int32
        lengths = np.array([1 + len(tokens) for tokens, _, _ in documents], np.int64)
        starts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        self.tokens = np.full(total + 1, end, narrow)
        self.bytes = np.zeros(total + 1, np.int32)
        for start, (tokens, counts, rest) in zip(starts, documents, strict=True):
            inside = slice(start + 1, start + 1 + len(tokens))
            self.tokens[inside], self.bytes[inside] = tokens, counts
            self.bytes[inside.stop] = rest  # of the end after it
        self.total = total if most is None else min(most, total)
        self.starts = starts[starts < self.total]
        self.lengths = np.diff(self.starts, append=self.total)
        self.context = context if seed is not None else max(1, min(context, self.total))
        self.end, self.seed = end, seed
        self._epoch = -1
        self._order = np.arange(len(self.starts))
        self._after = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return (
            self.total // self.context if self.seed is not None else -(-self.total // self.context)
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``targets``, ``segments`` and ``bytes`` ``[L]``, ``positions`` ``[L, 1]``."""
        epoch, row = divmod(int(index), len(self))
        if self.seed is not None and epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.starts))
            self._after = np.cumsum(self.lengths[self._order])
            self._epoch = epoch
        begin, stop = row * self.context, min((row + 1) * self.context, self.total)
        tokens = np.full(self.context, self.end, np.int64)
        targets, counts = np.full(self.context, -100), np.zeros(self.context, np.int64)
        lengths, filled = [], 0
        place = int(np.searchsorted(self._after, begin, side="right"))
        while filled < stop - begin:
            document = self._order[place]
            left = int(self._after[place]) - (begin + filled)
            count = min(left, stop - begin - filled)
            start = int(self.starts[document] + self.lengths[document]) - left
            here = slice(filled, filled + count)
            tokens[here] = self.tokens[start : start + count]
            targets[here] = self.tokens[start + 1 : start + 1 + count]
            counts[here] = self.bytes[start + 1 : start + 1 + count]
            lengths.append(count)
            filled, place = filled + count, place + 1
        if filled < self.context:
            lengths.append(self.context - filled)
        positions, segments = packed(lengths, tokens=self.context)
        positions[filled:] = 0  # the longest document is as long as its last position says
        return {
            "tokens": torch.from_numpy(tokens),
            "targets": torch.from_numpy(targets),
            "positions": positions,
            "segments": segments,
            "bytes": torch.from_numpy(counts),
        }
