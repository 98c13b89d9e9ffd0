"""Which samples a process sees, and in which order."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler


class EpochSampler(DistributedSampler[int]):
    """Shuffled training indices, told apart by epoch: yields ``index + epoch · len(dataset)``.

    The order depends on ``(seed, epoch)`` alone. Process r of R takes every R-th index from the
    r-th on, so R processes with batches of B see at each step the samples of one process with
    batches of R·B; a remainder that does not fill all processes is dropped, as the loader must
    drop an incomplete batch. A data set takes the index modulo its length and draws all randomness
    from ``(seed, index)``, which makes every epoch new and every run repeatable.

    Args:
        seen: how many samples of the epoch this process has seen already, asked as one begins: a
            run that is resumed within an epoch goes on after them. The length is that of the whole.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        seen: Callable[[], int] = int,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=True, seed=seed, drop_last=True)
        self.seen = seen

    def __iter__(self) -> Iterator[int]:
        assert isinstance(self.dataset, Sized)
        start = self.epoch * len(self.dataset)
        return (start + index for index in islice(self._order(), self.seen(), None))

    def _order(self) -> Iterable[int]:
        """What this process sees of the epoch."""
        return super().__iter__()


class BucketSampler(EpochSampler):
    """Indices as of `EpochSampler`, with samples of similar length in each batch, to pad less.

    The shuffled samples are cut into runs of ``buckets`` global batches (of all R processes, R·B
    samples); each run is sorted by length and cut into its batches, and all batches of the epoch
    are shuffled. The order depends on ``(seed, epoch)``, the lengths and R·B alone, and is shared
    among processes as that of `EpochSampler`: at each step theirs are of similar length, too. What
    does not fill a global batch is dropped before it is sorted, whatever its length.

    Args:
        lengths: of the samples of an epoch, by its number.
        batch_size: samples of a batch in each process, B.
        buckets: global batches that are sorted at a time; 1 sorts nothing into other batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        lengths: Callable[[int], Sequence[float] | np.ndarray],
        batch_size: int,
        buckets: int,
        seen: Callable[[], int] = int,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed, seen=seen)
        assert isinstance(dataset, Sized)
        self.lengths, self.buckets = lengths, buckets
        self.batch = num_replicas * batch_size
        self.total_size = len(dataset) // self.batch * self.batch
        self.num_samples = self.total_size // num_replicas

    def _order(self) -> Iterable[int]:
        assert isinstance(self.dataset, Sized)
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.dataset), generator=draw).numpy()[: self.total_size]
        lengths = np.asarray(self.lengths(self.epoch))
        step = self.buckets * self.batch
        runs = [shuffled[start : start + step] for start in range(0, self.total_size, step)]
        runs = [run[np.argsort(lengths[run], kind="stable")] for run in runs]
        batches = np.concatenate(runs).reshape(-1, self.batch)
        drawn = torch.randperm(len(batches), generator=draw).numpy()
        return batches[drawn].ravel()[self.rank :: self.num_replicas].tolist()
