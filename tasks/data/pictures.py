"""Pictures shown whole, and picture files."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS

Transform = Callable[[Image.Image], Tensor]


def read_image(path: str, mode: str) -> Image.Image:
    """The whole image, decoded, in PIL mode ``mode``; of 16 bits the upper 8. Raises ValueError
    where it cannot be read, or has 32 bits, whose range no file tells.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith("I;16"):
                upper = (np.asarray(image) // 256).astype(np.uint8)
                return Image.fromarray(upper).convert(mode)
            if image.mode in ("I", "F"):
                raise ValueError("32 bits a pixel, expected 8 or 16")
            return image.convert(mode)
    except Exception as error:  # decoders of broken files raise anything
        raise ValueError(
            f"cannot read the image {path} ({error}); repair or remove it, "
            "or leave out such files with --data.skip_broken true"
        ) from error


def image_files(folder: Path) -> list[str]:
    """Paths of all image files below ``folder``, sorted. Raises FileNotFoundError if none."""
    if folder.is_file():
        raise NotADirectoryError(f"predict_folder {folder} is a file, expected a folder of images")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the folder {folder} to predict does not exist; give --data.predict_folder a folder "
            "with images"
        )
    files = sorted(
        str(path)
        for path in folder.rglob("*")
        if path.suffix.lower() in IMG_EXTENSIONS and path.is_file()
    )
    if not files:
        raise FileNotFoundError(
            f"no images in the folder {folder} to predict; expected files of type "
            f"{' '.join(IMG_EXTENSIONS)}"
        )
    return files


def unreadable(paths: Sequence[str], mode: str) -> set[str]:
    """Those of ``paths`` that cannot be decoded; reads every file."""
    broken = set()
    for path in paths:
        try:
            read_image(path, mode)
        except ValueError:
            broken.add(path)
    return broken


class Plain(Dataset[tuple[Tensor, dict[str, int]]]):
    """Item ``i`` is ``transform(image)`` and ``{"class": label}`` of ``base[indices[i % N]]``.

    With a ``seed``, whatever the transform draws from the global generators is drawn from
    ``(seed, i)``, and those generators are left as they were.
    """

    def __init__(
        self, base: Any, indices: np.ndarray, transform: Transform, seed: int | None = None
    ) -> None:
        self.base = base
        self.indices = indices
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, int]]:
        image, label = self.base[int(self.indices[index % len(self)])]
        if self.seed is None:
            return self.transform(image), {"class": label}
        with isolate_rng(include_cuda=False):
            seed = int(np.random.SeedSequence((self.seed, index)).generate_state(1)[0])
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            return self.transform(image), {"class": label}


class Files(Dataset[tuple[Tensor, list[str]]]):
    """Picture files, in batches of ``transform(image)`` and paths (for ``already_batched``)."""

    def __init__(self, paths: Sequence[str], mode: str, transform: Transform) -> None:
        self.paths = paths
        self.mode = mode
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, list[str]]:
        paths = [self.paths[index] for index in indices]
        return torch.stack([self.transform(read_image(path, self.mode)) for path in paths]), paths
