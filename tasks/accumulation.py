"""A mean over what several batches have, whatever each has of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


class MeanOfStep:
    """The mean over all targets of the batches that a step of the optimizer accumulates.

    The sum of each batch is divided by the number of targets of the first, since those of later
    ones are not known yet; once the gradients of all are there, they are brought to the number that
    there was.
    """

    def __init__(self) -> None:
        self.counts: list[Tensor] = []

    def __call__(self, total: Tensor, count: Tensor) -> Tensor:
        """What the gradient of a batch is of: its sum over ``count`` targets, in its place."""
        self.counts.append(count.clamp_min(1))
        return total / self.counts[0]

    def finish(self, parameters: Iterable[nn.Parameter], batches: int) -> None:
        """Bring gradients, which the trainer divided by so many ``batches``, to the mean."""
        counts, self.counts = self.counts, []
        if batches > 1 and counts:
            factor = batches * counts[0] / sum(counts)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
