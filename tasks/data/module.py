"""What all data modules share: loaders in which processes see what one process would."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Dataset

from .samplers import EpochSampler


class DataModule(L.LightningDataModule, ABC):
    """Loaders of data sets that a subclass's ``setup`` puts into ``_data`` by split.

    Training is shuffled anew in each epoch, from ``seed`` and the epoch alone: R processes with
    batches of B see the samples of one process with batches of R·B, and what does not fill a batch
    at the end is left out (`EpochSampler`). Of all else each sample is seen exactly once, in order,
    on any number of processes.
    """

    batch_size: int
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
            sampler = EpochSampler(data, num_replicas=processes, rank=rank, seed=self.seed)
        else:
            sampler = UnrepeatedDistributedSampler(data, processes, rank, shuffle=False)
        return DataLoader(
            cast("Dataset", data),
            batch_size=self.size_of_batches(split),
            sampler=sampler,
            drop_last=training,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            collate_fn=self.collate(data),
            generator=torch.Generator(),  # so that an iterator draws nothing from the global one
        )

    def size_of_batches(self, split: str) -> int:
        """Samples of a batch in each process."""
        return self.batch_size

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.loader("test")
