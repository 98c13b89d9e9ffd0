"""Which samples a process sees, and in which order."""

from collections.abc import Iterator, Sized

from torch.utils.data import Dataset, DistributedSampler


class EpochSampler(DistributedSampler[int]):
    """Shuffled training indices, told apart by epoch: yields ``index + epoch · len(dataset)``.

    The order depends on ``(seed, epoch)`` alone. Process r of R takes every R-th index from the
    r-th on, so R processes with batches of B see at each step the samples of one process with
    batches of R·B; a remainder that does not fill all processes is dropped, as the loader must
    drop an incomplete batch. A data set takes the index modulo its length and draws all randomness
    from ``(seed, index)``, which makes every epoch new and every run repeatable.
    """

    def __init__(self, dataset: Dataset, *, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)

    def __iter__(self) -> Iterator[int]:
        assert isinstance(self.dataset, Sized)
        start = self.epoch * len(self.dataset)
        return (start + index for index in super().__iter__())
