"""Records among fillers that a question asks for, to train what long contexts are tested by."""

from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mmpos.evaluation.symbols import END, TASKS, VOCABULARY, SymbolNeedles

from .algorithms import padded
from .module import DataModule

Split = Literal["train", "val", "test"]
_SHARES = (0.4, 0.25, 0.2, 0.15)  # of the tasks, in their order
_ENDS = 0.1  # of the depths that are 0, and that are 1


class Needles(DataModule):
    """Prompts with records, and questions, as `mmpos.evaluation.SymbolNeedles` makes them.

    A row is one prompt with its answer; the tokens of the answer are the targets, and all others
    have -100. Batches are those of `tasks.data.Algorithms`, whose ``length`` is that of the prompt.

    Training prompts are drawn anew in each epoch, from ``(seed, epoch, index)`` alone: lengths from
    ``min_length`` to ``length``, all four tasks, 1 to 3 distractors, and all depths, of which a
    tenth are 0 and a tenth 1 exactly. Those of validation (of ``length``) and of test (of each of
    ``test_lengths``) are the same whatever the seed.

    Args:
        length: the longest training prompts.
        min_length: the shortest; 20 tokens are needed for a record and three distractors.
        test_lengths: 1, 2 and 4 times ``length`` by default.
        train_samples: prompts of an epoch.
        eval_samples: prompts of each length in validation and in test.
        batch_size: rows of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
    """

    vocabulary = VOCABULARY

    def __init__(
        self,
        length: int = 64,
        min_length: int = 24,
        test_lengths: list[int] | None = None,
        train_samples: int = 20000,
        eval_samples: int = 400,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.length, self.min_length = length, min_length
        self.test_lengths = (
            [length, 2 * length, 4 * length] if test_lengths is None else test_lengths
        )
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.batch_size, self.num_workers, self.seed = batch_size, num_workers, seed
        least = {"min_length": 20, "length": min_length, "train_samples": 1, "eval_samples": 1}
        least |= {"batch_size": 1, "num_workers": 0, "seed": 0}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name} is {value}; expected at least {bound}")
        lengths = self.test_lengths
        if not lengths or min(lengths) < 20 or len(set(lengths)) < len(lengths):
            raise ValueError(
                f"test_lengths is {lengths}; expected different lengths of 20 or more, or null"
            )

    @property
    def context(self) -> int:
        """Tokens that a model is made for: a training prompt with its answer."""
        return self.length + SymbolNeedles.new_tokens

    def samples(self, split: str) -> Dataset:
        lengths = {"train": [], "val": [self.length]}.get(split, self.test_lengths)
        count = self.train_samples if split == "train" else self.eval_samples
        trained = (self.min_length, self.length)
        return _Prompts(lengths, count, cast("Split", split), self.seed, trained)

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        name = "train_samples" if split == "train" else "eval_samples"
        return (
            f"{name} {getattr(self, name)} makes {len(data)} {split} prompts, and {needed} are "
            f"needed for {processes} processes with batches of {self.batch_size}: raise "
            f"--data.{name}"
        )

    def predict_dataloader(self) -> DataLoader:
        """Raise ValueError: what is asked is known, and `test` tells how much is right."""
        raise ValueError(
            "tasks.data.Needles has nothing to predict: its questions have answers, which "
            "mmpos test --ckpt_path FILE compares, and scripts/long_context.py in all detail"
        )

    def collate(self, data: Any) -> Any:
        return partial(padded, END)


class _Prompts(Dataset):
    """Tokens, targets and length of each."""

    def __init__(
        self, lengths: list[int], count: int, split: Split, seed: int, trained: tuple[int, int]
    ) -> None:
        self.lengths, self.count, self.trained = lengths, count, trained
        self.training = split == "train"
        self.key = {"train": (0, seed), "val": (1,), "test": (2,)}[split]
        self.needles = SymbolNeedles()

    def __len__(self) -> int:
        return self.count * (1 if self.training else len(self.lengths))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        draw = np.random.default_rng((*self.key, index))
        low, high = self.trained
        length = int(draw.integers(low, high + 1))
        if not self.training:
            length = self.lengths[index // self.count]
        task = str(draw.choice(TASKS, p=_SHARES))
        depth = float(draw.choice([0.0, 1.0, draw.random()], p=[_ENDS, _ENDS, 1 - 2 * _ENDS]))
        others, seed = int(draw.integers(1, 4)), int(draw.integers(2**62))
        sample = self.needles.make(task, length, depth, seed, distractors=others)
        answer = self.needles.answer(sample)
        sequence = torch.tensor((*sample.prompt, *answer))
        asked = torch.arange(len(sequence) - 1) >= len(sample.prompt) - 1
        return sequence[:-1], sequence[1:].where(asked, -100), length
