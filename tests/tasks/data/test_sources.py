"""Images from folders and from torchvision's sets, to train on and to predict."""

import gzip
import hashlib
import pickle
import runpy
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from tasks.data import Images
from tasks.data.pictures import read_image


def test_a_flat_folder_is_split_by_class_and_seed(folder: Path, plain: Any, files: Any) -> None:
    data = plain(folder)
    assert data.classes == {"class": ["ant", "bee", "cow"]} and data.channels == 3
    data.setup()
    parts = {split: files(data, split) for split in ("train", "val", "test")}
    counts = {split: Counter(Path(f).parent.name for f in part) for split, part in parts.items()}
    assert counts["val"] == counts["test"] == {"ant": 2, "bee": 1, "cow": 3}
    assert sorted(file for part in parts.values() for file in part) == sorted(
        str(f) for f in folder.rglob("*.png")
    )
    again, other = plain(folder, seed=5), plain(folder, split_seed=5)
    for same in (again, other):
        same.setup("test")
    assert files(again, "test") == parts["test"] != files(other, "test")
    for split in ("val", "test"):
        for (image, labels), file in zip(data._data[split], parts[split], strict=False):  # type: ignore
            label = ["ant", "bee", "cow"].index(Path(file).parent.name)
            colour = torch.tensor([80 * label, 2 * int(Path(file).stem), 50]) / 255
            assert labels == {"class": label}
            assert torch.allclose(image, colour[:, None, None].expand(3, 8, 8), atol=1e-6)


def test_without_augmentation_training_images_are_as_in_evaluation(
    folder: Path, plain: Any
) -> None:
    data = plain(folder, augmentation={"no_aug": True})
    data.setup("fit")
    train = data._data["train"]
    assert torch.equal(train[3][0], train[3 + len(train)][0])
    assert torch.equal(train[3][0], train[3][0][:, :1, :1].expand(3, 8, 8))


def test_fewer_training_images_are_spread_over_the_classes(
    folder: Path, plain: Any, files: Any
) -> None:
    data = plain(folder, train_samples=23)
    data.setup("fit")
    counts = Counter(Path(file).parent.name for file in files(data, "train"))
    assert sorted(counts.values()) == [7, 8, 8]


def test_a_hidden_folder_is_no_class(folder: Path, plain: Any) -> None:
    (folder / ".ipynb_checkpoints").mkdir()
    data = plain(folder)
    data.setup()
    assert data.classes == {"class": ["ant", "bee", "cow"]}
    train: Any = data._data["train"]
    assert {train[index][1]["class"] for index in range(len(train))} == {0, 1, 2}


def test_folders_of_splits_are_taken_and_a_missing_one_is_held_out(
    tmp_path: Path, plain: Any, files: Any, write_images: Any
) -> None:
    for label, name in enumerate(("a", "b")):
        write_images(tmp_path / "train" / name, 10, label)
        write_images(tmp_path / "test" / name, 3, label)
    data = plain(tmp_path)
    data.setup()
    assert [len(files(data, split)) for split in ("train", "val", "test")] == [18, 2, 6]
    assert all(Path(file).parts[-3] == "test" for file in files(data, "test"))
    assert not set(files(data, "train")) & set(files(data, "val"))
    assert {Path(file).parts[-3] for file in files(data, "val")} == {"train"}


@pytest.mark.parametrize(
    "names", [("Train", "VAL", "Test"), ("training", "valid", "testing"), ("train", "Validation")]
)
def test_folders_of_splits_in_other_spellings(
    tmp_path: Path, plain: Any, files: Any, write_images: Any, names: tuple[str, ...]
) -> None:
    for name in names:
        for label in (0, 1):
            write_images(tmp_path / name / "ab"[label], 4, label)
    data = plain(tmp_path)
    data.setup()
    for split, name in zip(("train", "val", "test"), names, strict=False):
        assert {Path(file).parts[-3] for file in files(data, split)} == {name}


def test_loaders_before_setup(folder: Path, plain: Any) -> None:
    data = plain(folder, predict_folder=folder)
    for split in ("predict", "val", "test", "train"):
        assert len(getattr(data, f"{split}_dataloader")())


@pytest.mark.parametrize(("suffix", "order"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2")])
def test_grey_images_of_16_bits_keep_their_upper_8(tmp_path: Path, suffix: str, order: str) -> None:
    values = np.array([[0, 255, 256], [1000, 32768, 65535]], dtype=order)
    path = str(tmp_path / f"deep.{suffix}")
    Image.fromarray(values).save(path)
    for mode in ("L", "RGB"):
        pixels = np.asarray(read_image(path, mode)).reshape(2, 3, -1)
        assert (pixels == (values // 256)[:, :, None]).all()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_images_of_32_bits_are_refused(tmp_path: Path, kind: Any) -> None:
    path = str(tmp_path / "deep.tif")
    Image.fromarray(np.ones((2, 2), dtype=kind)).save(path)
    with pytest.raises(ValueError, match=f"{path} .32 bits a pixel, expected 8 or 16"):
        read_image(path, "L")


def test_a_class_may_be_called_train(tmp_path: Path, plain: Any, write_images: Any) -> None:
    for label, name in enumerate(("bus", "train")):
        write_images(tmp_path / name, 3, label)
    assert plain(tmp_path).classes == {"class": ["bus", "train"]}


def write_idx(path: Path, array: np.ndarray) -> None:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())


@pytest.mark.parametrize("scene", ["plain", "placed"])
def test_fashion_mnist(tmp_path: Path, scene: Any) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 40), ("t10k", 30)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.broadcast_to(labels[:, None, None] * 20, (count, 28, 28))
        write_idx(raw / f"{split}-images-idx3-ubyte", images)
        write_idx(raw / f"{split}-labels-idx1-ubyte", labels)
    data = Images(
        source="FashionMNIST", root=tmp_path, scene=scene, image_size=28, mean=(0,), std=(1,)
    )
    data.setup("test")
    assert data.channels == 1
    images, answers = next(iter(data.test_dataloader()))
    assert images.shape == (30, 1, 28, 28)
    answer = answers["class" if scene == "plain" else "what"]
    assert answer.tolist() == list(range(10)) * 3
    assert torch.allclose(images.amax((1, 2, 3)), answer * 20 / 255, atol=1e-6)


@pytest.mark.parametrize(("source", "key"), [("CIFAR10", "labels"), ("CIFAR100", "fine_labels")])
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any, key: str) -> None:
    published = getattr(torchvision.datasets, source)
    count = {"CIFAR10": 10, "CIFAR100": 100}[source]
    folder = tmp_path / published.base_folder
    folder.mkdir()
    checksums: dict[str, str] = {}

    def write(name: str, content: dict[str, Any]) -> None:
        (folder / name).write_bytes(pickle.dumps(content))
        checksums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()

    for name in [name for name, _ in published.train_list + published.test_list]:
        labels = list(range(count)) * 2
        pixels = np.repeat(np.array(labels, dtype=np.uint8)[:, None], 3072, 1)
        pixels[:, 1024:] = 7  # red tells the label
        write(name, {"data": pixels, key: labels})
    data = Images(source=source, root=tmp_path, batch_size=count, mean=(0, 0, 0), std=(1, 1, 1))
    write(published.meta["filename"], {published.meta["key"]: data.classes["class"]})
    for attribute in ("train_list", "test_list"):
        listed = [[name, checksums[name]] for name, _ in getattr(published, attribute)]
        monkeypatch.setattr(published, attribute, listed)
    monkeypatch.setitem(published.meta, "md5", checksums[published.meta["filename"]])
    assert len(set(data.classes["class"])) == count
    assert data.classes["class"] == sorted(data.classes["class"])
    data.setup()
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (count, 3, 32, 32)
    assert torch.allclose(images[:, 0], labels["class"][:, None, None] / 255, atol=1e-6)
    assert torch.allclose(images[:, 1:], torch.tensor(7 / 255))


def test_predict_reads_every_image_below_the_folder_in_order(
    tmp_path: Path, write_images: Any
) -> None:
    write_images(tmp_path / "b" / "deep", 2, 1, (40, 20))
    write_images(tmp_path / "a", 1, 2)
    Image.new("L", (9, 9), 128).save(tmp_path / "z.PNG")
    (tmp_path / "notes.txt").write_text("no image")
    expected = [tmp_path / "a/00.png", *(tmp_path / f"b/deep/0{i}.png" for i in (0, 1))]
    for data in (
        Images(predict_folder=tmp_path),
        Images(image_size=(8, 12), predict_folder=tmp_path),
    ):
        data.setup("predict")
        ((images, paths),) = data.predict_dataloader()
        assert paths == [str(path) for path in [*expected, tmp_path / "z.PNG"]]
        assert images.shape == (4, 1, *data.image_size)
        assert torch.allclose(images[3], torch.tensor((128 / 255 - 0.2860) / 0.3530), atol=1e-5)


def test_the_script_takes_the_first_of_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[3] / "scripts" / "make_fashion_mnist.py"
    for split, count in (("train", 801), ("t10k", 201)):
        labels = np.tile(np.arange(10, dtype=np.uint8), count)
        for name, array in (
            ("images-idx3", np.arange(len(labels), dtype=np.uint8)[:, None, None]),
            ("labels-idx1", labels),
        ):
            write_idx(tmp_path / "idx", array)
            packed = gzip.compress((tmp_path / "idx").read_bytes())
            (tmp_path / f"{split}-{name}-ubyte.gz").write_bytes(packed)
    outputs = [tmp_path / "once.npz", tmp_path / "twice.npz"]
    for output in outputs:
        monkeypatch.setattr("sys.argv", ["make", str(tmp_path), str(output)])
        runpy.run_path(str(script), run_name="__main__")
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    with np.load(outputs[0]) as arrays:
        for split, count in (("train", 8000), ("test", 2000)):
            assert (arrays[f"{split}_images"].ravel() == np.arange(count) % 256).all()
            assert (arrays[f"{split}_labels"] == np.arange(count) % 10).all()
