"""Parts of texts, and batches of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .padding import Padded, padded

Item = tuple[Tensor, int | str]


class Samples(Dataset[Item]):
    """Item ``i`` is ``context`` tokens of a text, or all that it has, and its label.

    They begin where ``places [N, 2]`` says, the text and its first token: at the beginning of each
    text, with ``snippets`` also at each multiple of ``context``. With a ``seed``, they are any part
    of that text instead, drawn from ``(seed, i)``. Indices beyond N are further draws.
    """

    def __init__(
        self,
        texts: Sequence[np.ndarray],
        labels: Sequence[int | str],
        context: int,
        *,
        snippets: bool = False,
        seed: int | None = None,
    ) -> None:
        self.texts, self.labels = texts, labels
        self.context, self.seed = context, seed
        starts = [range(0, len(text) if snippets else 1, context) for text in texts]
        self.places = np.array([(i, start) for i, own in enumerate(starts) for start in own])

    def __len__(self) -> int:
        return len(self.places)

    def lengths(self, epoch: int) -> np.ndarray:
        """How many tokens each sample has, the same in every epoch."""
        texts = np.array([len(text) for text in self.texts])[self.places[:, 0]]
        starts = self.places[:, 1] if self.seed is None else 0  # what is drawn ends with the text
        return np.minimum(texts - starts, self.context)

    def __getitem__(self, index: int) -> Item:
        number, start = self.places[index % len(self)]
        text = self.texts[number]
        if self.seed is not None:
            spare = max(0, len(text) - self.context)
            start = np.random.default_rng((self.seed, index)).integers(spare + 1)
        part = text[start : start + self.context].astype(np.int64)
        return torch.from_numpy(part), self.labels[number]


def batch(items: Sequence[Item]) -> tuple[Padded, dict[str, Tensor] | list[str]]:
    """Padded rows, and their labels or the names of texts to predict."""
    rows, labels = zip(*items, strict=True)
    if isinstance(labels[0], str):
        return padded(rows), list(labels)
    return padded(rows), {"class": torch.tensor(labels)}
