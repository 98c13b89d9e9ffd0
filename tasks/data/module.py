"""What all data modules share: loaders in which processes see what one process would."""

import atexit
import multiprocessing
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Dataset

from .samplers import BucketSampler, EpochSampler


class Loader(DataLoader):
    """A DataLoader that reads nothing before its first batch is asked for.

    Trainers make iterators earlier, before they know the epoch and the batch that a resumed run
    goes on with; loader processes would read the first batches of another epoch.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the sampler goes on by the trainer's progress."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing; that it is here tells Lightning that the loader can be resumed."""


def deaf(worker: int) -> None:
    """Leaves signals that a whole group of processes is sent to the trainer, which ends its loader
    processes itself when all is saved. A hangup ends one.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda *_: os._exit(0))


def _end_loaders() -> None:
    """Ends daemonic processes that are left at exit: a loader that somebody still holds is `deaf`
    to what `multiprocessing` ends them by, and would be waited for without end.
    """
    left = [process for process in multiprocessing.active_children() if process.daemon]
    for process in left:
        process.terminate()
    for process in left:
        process.join(timeout=1)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGHUP)


atexit.register(_end_loaders)


class DataModule(L.LightningDataModule, ABC):
    """Loaders of data sets that a subclass's ``setup`` puts into ``_data`` by split.

    Training is shuffled anew in each epoch, from ``seed`` and the epoch alone: R processes with
    batches of B see the samples of one process with batches of R·B, and what does not fill a batch
    at the end is left out (`EpochSampler`). A run that is resumed within an epoch goes on with the
    batch that would have come next. Of all else each sample is seen exactly once, in order,
    on any number of processes. Where ``buckets`` is given, training samples of similar length share
    a batch (`BucketSampler`); the data set then has ``lengths(epoch)``.
    """

    batch_size: int
    buckets: int | None = None
    num_workers: int
    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._data: dict[str, Any] = {}

    def samples(self, split: str) -> Any:
        """The data of "train", "val", "test" or "predict", set up where it is not."""
        if split not in self._data:
            self.setup({"train": "fit", "val": "validate"}.get(split, split))
        return self._data[split]

    @abstractmethod
    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        """What to say of a split with fewer samples than are needed."""

    def collate(self, data: Any) -> Callable[[list], Any] | None:
        """What makes a batch of a data set's samples; torch's own by default."""
        return None

    def loader(self, split: str) -> DataLoader:
        """The batches of a split.

        Raises: ValueError for fewer training samples than a batch in each process, or of others
            than processes.
        """
        data = self.samples(split)
        training = split == "train"
        processes, rank = (
            (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        )
        least = processes * self.batch_size if training else processes
        if len(cast("Sized", data)) < least:
            raise ValueError(self.too_few(data, split, least, processes))
        if training:
            sampler = self._sampler(data, processes, rank)
        else:
            sampler = UnrepeatedDistributedSampler(data, processes, rank, shuffle=False)
        return Loader(
            cast("Dataset", data),
            batch_size=self.size_of_batches(split),
            sampler=sampler,
            drop_last=training,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=self.collate(data),
            worker_init_fn=deaf,
            generator=torch.Generator(),  # so that an iterator draws nothing from the global one
        )

    def _sampler(self, data: Any, processes: int, rank: int) -> EpochSampler:
        given: Any = {"num_replicas": processes, "rank": rank, "seed": self.seed}
        if self.buckets is None:
            return EpochSampler(data, seen=self._seen, **given)
        return BucketSampler(
            data,
            lengths=data.lengths,
            batch_size=self.batch_size,
            buckets=self.buckets,
            seen=self._seen,
            **given,
        )

    def _seen(self) -> int:
        """Samples that this process has seen of the epoch under way."""
        if self.trainer is None or not self.trainer.training:
            return 0
        return self.trainer.fit_loop.epoch_loop.batch_progress.current.ready * self.batch_size

    def size_of_batches(self, split: str) -> int:
        """Samples of a batch in each process."""
        return self.batch_size

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.loader("test")
