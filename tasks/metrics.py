"""Metrics of sums over all tokens, exact whatever the batches and processes."""

import torch
from torch import Tensor
from torchmetrics import Metric


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
