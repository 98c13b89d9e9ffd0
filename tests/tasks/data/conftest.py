"""Folders of images, and data modules over them."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tasks.data import Images


@pytest.fixture
def write_images() -> Callable[..., None]:
    """Images of one colour that tells their label and number."""

    def write(folder: Path, count: int, label: int = 0, size: tuple[int, int] = (10, 8)) -> None:
        folder.mkdir(parents=True)
        for number in range(count):
            colour = (80 * label, 2 * number, 50)
            Image.new("RGB", size, colour).save(folder / f"{number:02}.png")

    return write


@pytest.fixture
def folder(tmp_path: Path, write_images: Callable[..., None]) -> Path:
    """Three classes of 20, 10 and 30 images."""
    for label, (name, count) in enumerate({"ant": 20, "bee": 10, "cow": 30}.items()):
        write_images(tmp_path / "data" / name, count, label)
    return tmp_path / "data"


@pytest.fixture
def plain() -> Callable[..., Images]:
    """Small batches of small images of a folder, in colours from 0 to 1."""

    def make(root: Path, **options: Any) -> Images:
        options = {"image_size": 8, "batch_size": 4, "mean": (0, 0, 0), "std": (1, 1, 1)} | options
        return Images(source="folder", root=root, **options)

    return make


@pytest.fixture
def files() -> Callable[[Images, str], list[str]]:
    """The files of a split."""

    def paths(data: Images, split: str) -> list[str]:
        pictures: Any = data._data[split]
        return [pictures.base.samples[index][0] for index in pictures.indices]

    return paths


@pytest.fixture
def as_rank() -> Callable[[Images, int, int], Images]:
    """A data module as one of several processes sees it."""

    def attach(data: Images, rank: int, processes: int) -> Images:
        data.trainer = SimpleNamespace(world_size=processes, global_rank=rank, training=False)  # type: ignore
        return data

    return attach
