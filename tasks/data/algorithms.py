"""Algorithmic tasks for length generalisation: trained on short examples, tested on longer ones."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .exercises import MARKS, TaskName, drawn, size
from .module import DataModule

Split = Literal["train", "val", "test"]


class Algorithms(DataModule):
    """Examples of a task that a short program solves, of chosen lengths n.

    ========================  ====================================================================
    ``copy``                  ``x₁ … xₙ =``, then ``x₁ … xₙ END`` (Kazemnejad et al.,
                              arXiv:2305.19466, sec. 3)
    ``reverse``               ``x₁ … xₙ =``, then ``xₙ … x₁ END`` (the same)
    ``addition``              ``a + b =``, then ``a + b END``: two numbers of n digits, the first
                              of which is not 0 where n > 1, and their sum of n or n + 1 digits (the
                              same). All three are written from the last digit to the first, since
                              then each digit of the sum follows from two digits and a carry that
                              are known when it is written (arXiv:2307.03381, sec. 4; 2402.09371)
    ``missing_duplicate``     ``x₁ … xₙ x₁ … xₙ =`` with ``?`` in place of one of the 2n symbols,
                              then this symbol (Delétang et al., arXiv:2207.02098, app. A: binary,
                              and their length is our 2n)
    ``flip_flop``             ``w x₀``, then n pairs of an instruction and a symbol, the last with
                              ``r``; after each ``r`` the symbol of the last ``w`` (Liu et al.,
                              arXiv:2306.00946, def. 2: binary, 2n + 2 tokens). Before the last,
                              the instruction is ``i`` with a chance of 0.8, ``w`` and ``r`` with
                              0.1 each; the symbols of ``w`` and ``i`` mean nothing before
    ========================  ====================================================================

    Symbols are drawn uniformly, and before each example stands the token ``END``. What stands after
    "then" is the answer: its tokens, and in flip-flop the symbols after ``r``, are the targets. The
    rest, the prompt, has targets of -100.

    A batch is a dict of int64: ``tokens``, ``targets`` and ``segments`` ``[B, L]``, ``positions``
    ``[B, L, 1]`` and ``length``, the n of each row, ``[B]``. A row is one example, a segment with
    positions from 0, padded at its end to the longest of the batch by another segment without
    targets, which no token of the example sees.

    Training examples are drawn anew in each epoch, from ``(seed, epoch, index)`` alone, of lengths
    ``min_length`` to ``length`` with equal chances: R processes with batches of B see those of one
    process with batches of R·B. Those of validation (``eval_samples`` of each trained length) and
    of test (of each of ``test_lengths``) are the same whatever the seed, and each is seen exactly
    once on any number of processes. The three are drawn independently: a test example of a length
    beyond ``length`` is never one of training, while a short one may be, since there are few.

    Args:
        task: which of the five.
        length: the longest training examples.
        min_length: the shortest.
        test_lengths: 1, 1.2, 1.4 and 2 times ``length`` by default.
        symbols: how many there are, which is the base of the numbers; by default 10, and 2 in
            missing_duplicate and flip_flop.
        train_samples: examples of an epoch.
        eval_samples: examples of each length in validation and in test.
        context: tokens that the model is made for, by default those of the longest training
            example. A learned table needs those of the longest test example, to have rows there.
        batch_size: rows of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
    """

    def __init__(
        self,
        task: TaskName = "copy",
        length: int = 20,
        min_length: int = 1,
        test_lengths: list[int] | None = None,
        symbols: int | None = None,
        train_samples: int = 20000,
        eval_samples: int = 100,
        context: int | None = None,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if task not in get_args(TaskName):
            raise ValueError(f"task is {task!r}; expected one of {get_args(TaskName)}")
        self.save_hyperparameters()
        self.task: TaskName = task
        self.length, self.min_length = length, min_length
        if test_lengths is None:
            test_lengths = list(dict.fromkeys(round(length * k) for k in (1, 1.2, 1.4, 2)))
        self.test_lengths = test_lengths
        binary = task in ("missing_duplicate", "flip_flop")
        self.symbols = symbols if symbols is not None else 2 if binary else 10
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._check(context)
        self.context = size(task, length) if context is None else context

    def _check(self, context: int | None) -> None:
        least = {"min_length": 1, "length": self.min_length, "symbols": 2, "train_samples": 1}
        least |= {"eval_samples": 1, "batch_size": 1, "num_workers": 0, "seed": 0}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name} is {value}; expected at least {bound}")
        lengths = self.test_lengths
        if not lengths or min(lengths) < 1 or len(set(lengths)) < len(lengths):
            raise ValueError(
                f"test_lengths is {lengths}; expected different lengths of 1 or more, or null"
            )
        needed = size(self.task, self.length)
        if context is not None and context < needed:
            raise ValueError(
                f"context is {context}, and training examples of length {self.length} have "
                f"{needed} tokens: give --data.context {needed} or more, or null"
            )

    @property
    def words(self) -> list[str]:
        """What each token is called: symbols by their numbers, the marks of the task, ``END``."""
        return [*map(str, range(self.symbols)), *MARKS[self.task], "END"]

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.end + 1

    @property
    def end(self) -> int:
        """The token before each example and after an answer."""
        return self.symbols + len(MARKS[self.task])

    def decode(self, tokens: Tensor) -> str:
        """The words of tokens ``[L]``."""
        return " ".join(self.words[token] for token in tokens.tolist())

    def samples(self, split: str) -> Dataset:
        lengths = self.test_lengths
        if split != "test":
            lengths = range(self.min_length, self.length + 1)
        count = self.train_samples if split == "train" else self.eval_samples
        return _Examples(self.task, self.symbols, lengths, count, cast("Split", split), self.seed)

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        name = "train_samples" if split == "train" else "eval_samples"
        return (
            f"{name} {getattr(self, name)} makes {len(data)} {split} examples, and {needed} are "
            f"needed for {processes} processes with batches of {self.batch_size}: raise "
            f"--data.{name}"
        )

    def predict_dataloader(self) -> DataLoader:
        """Raise ValueError: what is asked is known, and `test` tells how much is right."""
        raise ValueError(
            "tasks.data.Algorithms has nothing to predict: its examples have answers, which "
            "mmpos test --ckpt_path FILE compares"
        )

    def collate(self, data: Any) -> Any:
        return partial(padded, self.end)


class _Examples(Dataset):
    """Tokens, targets and length of each: in training of a drawn length, from ``(seed, index)``;
    else ``count`` of each length in turn, from ``(split, length, index)``.
    """

    def __init__(
        self,
        task: TaskName,
        symbols: int,
        lengths: Sequence[int],
        count: int,
        split: Split,
        seed: int,
    ) -> None:
        self.task: TaskName = task
        self.symbols, self.lengths, self.count = symbols, lengths, count
        self.key = {"train": (0, seed), "val": (1,), "test": (2,)}[split]
        self.training = split == "train"

    def __len__(self) -> int:
        return self.count * (1 if self.training else len(self.lengths))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if self.training:
            draw = np.random.default_rng((*self.key, index))
            length = self.lengths[int(draw.integers(len(self.lengths)))]
        else:
            length = self.lengths[index // self.count]
            draw = np.random.default_rng((*self.key, length, index % self.count))
        sequence, answered = map(torch.tensor, drawn(self.task, draw, length, self.symbols))
        return sequence[:-1], sequence[1:].where(answered[1:], -100), length


def padded(end: int, rows: list[tuple[Tensor, Tensor, int]]) -> dict[str, Tensor]:
    """A batch; what pads a row is a segment of its own, at position 0."""
    sizes = torch.tensor([[len(tokens)] for tokens, _, _ in rows])
    places = torch.arange(int(sizes.max()))
    beyond = places >= sizes
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "tokens": pad([tokens for tokens, _, _ in rows], padding_value=end),
        "targets": pad([targets for _, targets, _ in rows], padding_value=-100),
        "positions": places.where(~beyond, 0).unsqueeze(-1),
        "segments": beyond.long(),
        "length": torch.tensor([length for _, _, length in rows]),
    }
