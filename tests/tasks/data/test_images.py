"""The data module over the images it carries: batches, processes, epochs, workers."""

import hashlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

import tasks.data.scenes
from tasks.data import Images

CONTENT = "b868f59d6f8a15cf6a7c65ae0348f46b6aaa4ee34414bd79682be196069fd4a3"


def test_embedded_images_are_8000_and_2000_balanced_and_as_published() -> None:
    path = Path(tasks.data.scenes.__file__).with_name("fashion_mnist_10k.npz")
    with np.load(path) as file:
        arrays = dict(file)
    for split, count in (("train", 800), ("test", 200)):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        assert images.shape == (10 * count, 28, 28) and images.dtype == np.uint8
        assert np.bincount(labels).tolist() == [count] * 10
    # Fashion-MNIST's own first images: training an ankle boot, test an ankle boot
    assert arrays["train_labels"][:4].tolist() == [9, 0, 0, 3]
    assert arrays["test_labels"][:4].tolist() == [9, 2, 1, 1]
    content = b"".join(arrays[name].tobytes() for name in sorted(arrays))
    assert hashlib.sha256(content).hexdigest() == CONTENT
    assert path.stat().st_size < 4.5e6
    assert "Zalando" in path.with_suffix(".LICENSE").read_text()


def test_the_default_places_the_embedded_images() -> None:
    data = Images(image_size=(16, 24), patch_size=(4, 8), batch_size=5)
    assert (data.image_size, data.patch_size, data.channels) == ((16, 24), (4, 8), 1)
    assert {question: len(names) for question, names in data.classes.items()} == {
        "what": 10,
        "where": 4,
    }
    data.setup()
    assert {split: len(items) for split, items in data._data.items()} == {  # type: ignore
        "train": 7200,
        "val": 800,
        "test": 2000,
    }
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (5, 1, 16, 24) and images.dtype == torch.float32
    assert list(labels) == ["what", "where"]
    assert all(v.shape == (5,) and v.dtype == torch.int64 for v in labels.values())
    for split in ("train", "val", "test"):
        counts = np.bincount(data._data[split].labels)  # type: ignore
        assert counts.tolist() == [len(data._data[split]) // 10] * 10  # type: ignore


def test_training_scenes_follow_the_seed_and_evaluation_scenes_do_not() -> None:
    first, other = Images(seed=0, batch_size=8), Images(seed=2, batch_size=8)
    for data in (first, other):
        data.setup()
    for split, same in (("train", False), ("val", True), ("test", True)):
        items = [data._data[split].__getitems__(range(8))[0] for data in (first, other)]  # type: ignore
        assert torch.equal(*items) is same
    sides = [first._data[split].place(range(8))[0] for split in ("train", "val", "test")]  # type: ignore
    assert not any(np.allclose(sides[i], sides[i - 1]) for i in range(3))


def test_plain_embedded_images_ask_for_the_class() -> None:
    data = Images(scene="plain", image_size=28, batch_size=3, train_samples=25)
    data.setup("fit")
    assert list(data.classes) == ["class"] and data.channels == 1
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (3, 1, 28, 28) and list(labels) == ["class"]
    pictures: Any = data._data["train"]
    counts = np.bincount(pictures.base.targets[pictures.indices])
    assert len(pictures) == 25 and counts.min() == 2 and counts.max() == 3
    original = torch.from_numpy(pictures.base.data[data._data["val"].indices[0]]) / 255  # type: ignore
    assert torch.allclose(images[0, 0], (original - 0.2860) / 0.3530, atol=1e-5)


@pytest.mark.parametrize("processes", [2, 3])
def test_each_evaluation_image_is_seen_once_on_any_number_of_processes(
    folder: Path, processes: int, plain: Any, files: Any, as_rank: Any
) -> None:
    seen: Counter = Counter()
    for rank in range(processes):
        data = plain(folder, train_samples=13)
        data.setup()
        for split in ("val", "test"):
            loader = getattr(as_rank(data, rank, processes), f"{split}_dataloader")()
            seen += Counter((split, files(data, split)[index]) for index in loader.sampler)
    assert len(seen) == 12 and set(seen.values()) == {1}
    data = Images(batch_size=64)
    data.setup("validate")
    scene_count = [
        sum(len(images) for images, _ in as_rank(data, rank, 3).val_dataloader())
        for rank in range(3)
    ]
    assert scene_count == [267, 267, 266]


def test_two_processes_train_on_the_samples_of_one_with_twice_the_batch(as_rank: Any) -> None:
    def batches(batch_size: int, rank: int, processes: int) -> list[torch.Tensor]:
        data = Images(image_size=8, train_samples=39, batch_size=batch_size)
        data.setup("fit")
        loader = as_rank(data, rank, processes).train_dataloader()
        loader.sampler.set_epoch(2)  # type: ignore
        return [images for images, _ in loader]

    whole = batches(8, 0, 1)
    first, second = batches(4, 0, 2), batches(4, 1, 2)
    assert len(whole) == len(first) == len(second) == 4
    for images, *halves in zip(whole, first, second, strict=True):
        together = torch.stack(halves, 1).flatten(0, 1)
        assert torch.equal(images, together)


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen.append(batch[0])
        return self.weight.sum()

    def validation_step(self, batch: Any) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("scene", ["placed", "plain"])
def test_under_a_trainer_every_epoch_is_new_and_repeatable(scene: Any) -> None:
    def epochs() -> torch.Tensor:
        data = Images(scene=scene, image_size=8, train_samples=12, batch_size=6)
        module = Recorder()
        trainer = L.Trainer(accelerator="cpu", max_epochs=2, barebones=True)
        torch.manual_seed(random.randrange(1000))
        before = torch.get_rng_state()
        trainer.fit(module, datamodule=data)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.stack(module.seen).view(2, 12, -1)

    seen = epochs()
    assert torch.equal(seen, epochs())
    first, second = seen
    assert not any(torch.equal(a, b) for a in first for b in second)


@pytest.mark.parametrize("scene", ["placed", "plain"])
def test_worker_processes_give_the_same_batches(scene: Any) -> None:
    def batches(num_workers: int) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        data = Images(
            scene=scene, image_size=8, train_samples=12, batch_size=4, num_workers=num_workers
        )
        data.setup("fit")
        loader = data.train_dataloader()
        loader.sampler.set_epoch(1)  # type: ignore
        batches = list(loader)
        if num_workers:
            loader._iterator._shutdown_workers()  # type: ignore  # not whenever memory is swept
        return batches

    for (images, labels), (same, same_labels) in zip(batches(0), batches(2), strict=True):
        assert torch.equal(images, same)
        assert all(torch.equal(labels[question], same_labels[question]) for question in labels)


def test_augmentation_is_timm_s_and_follows_seed_and_index(folder: Path, plain: Any) -> None:
    data = plain(folder, augmentation={"scale": [0.5, 1.0], "re_prob": 1.0, "re_mode": "pixel"})
    data.setup("fit")
    train: Any = data._data["train"]

    def states() -> list[Any]:
        numpy: Any = np.random.get_state()
        return [torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist()]

    before = states()
    first, again, later = train[0][0], train[0][0], train[len(train)][0]
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert states() == before
    val: Any = data._data["val"]
    assert torch.equal(val[0][0], val[len(val)][0])
    colours = val[0][0].flatten(1)
    assert (colours.max(1).values - colours.min(1).values).max() < 1e-6


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.5-inc1", "augmix-m3-w3", "original"])
def test_automatic_augmentation_takes_grey_images(policy: str) -> None:
    data = Images(
        scene="plain", image_size=(16, 32), batch_size=64, augmentation={"auto_augment": policy}
    )
    data.setup("fit")
    images, _ = next(iter(data.train_dataloader()))
    assert images.shape == (64, 1, 16, 32) and images.isfinite().all()
