"""Metrics of sums over all tokens, exact whatever the batches and processes."""

import torch
from torch import Tensor
from torch.nn.functional import softsign
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_average_precision
from torchmetrics.utilities import dim_zero_cat


class Ratio(Metric):
    """A sum by another, of all batches and processes: a mean of batches of different weights."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("over", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("under", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, over: Tensor, under: Tensor) -> None:
        """Add to both sums."""
        self.over = self.over + over.detach()
        self.under = self.under + under

    def compute(self) -> Tensor:
        """``over / under``."""
        return self.over / self.under


class Perplexity(Ratio):
    """``exp`` of nats by tokens."""

    def compute(self) -> Tensor:
        """``exp(over / under)``."""
        return super().compute().exp()


class ExactMatch(Metric):
    """The part of rows of which every target is predicted, of all and by their lengths.

    The predictions are those that follow the right tokens (teacher forcing). As far as they are
    right, they are what greedy decoding writes, whose first wrong token is the first that is wrong
    here: so the rows that are right are those that greedy decoding gets right.

    The states are the length of each row seen and whether it is right, so that all processes find
    the same lengths, whichever of them saw these.
    """

    full_state_update = False
    lengths: list[Tensor]
    right: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("lengths", [], dist_reduce_fx="cat")
        self.add_state("right", [], dist_reduce_fx="cat")

    def update(self, predicted: Tensor, targets: Tensor, length: Tensor) -> None:
        """Add rows: predicted tokens and targets ``[B, L]``, -100 where there is none, and lengths
        ``[B]``. A row without targets is right.
        """
        self.right.append(((predicted == targets) | (targets == -100)).all(-1).long())
        self.lengths.append(length)

    def compute(self) -> tuple[Tensor, dict[int, Tensor]]:
        """The part of all rows that is right, and that of the rows of each length that occurred."""
        right, lengths = dim_zero_cat(self.right).float(), dim_zero_cat(self.lengths)
        found = lengths.unique().tolist()
        return right.mean(), {length: right[lengths == length].mean() for length in found}


class MeanAveragePrecision(Metric):
    """The mean over classes of the average precision of logits, of the classes that occur.

    A class without a positive has no precision; torchmetrics' `MultilabelAveragePrecision` counts
    it as 0. Logits are ranked as they are, since a sigmoid rounds large ones to 1. NaN where no
    class occurs.
    """

    full_state_update = False
    logits: list[Tensor]
    labels: list[Tensor]

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.add_state("logits", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add logits and labels of 0 and 1, both ``[B, classes]``."""
        self.logits.append(logits.detach().float())
        self.labels.append(labels.long())

    def compute(self) -> Tensor:
        """The mean."""
        scores = (softsign(dim_zero_cat(self.logits)) + 1) / 2  # in their order, in 0 … 1
        labels = dim_zero_cat(self.labels)
        each = [
            binary_average_precision(scores[:, index], labels[:, index])
            for index in range(self.classes)
            if labels[:, index].any()
        ]
        return torch.stack(each).mean() if each else scores.new_tensor(torch.nan)
