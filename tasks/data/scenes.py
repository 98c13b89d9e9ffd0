"""A small grey picture somewhere on a larger canvas, at any resolution."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

PARTS = ["top left", "top right", "bottom left", "bottom right"]
SIDE = (11 / 32, 1 / 2)
"""Smallest and largest side of the object, in parts of the canvas's shorter side."""
CENTRE = (1 / 4, 3 / 4)
"""Where the object's centre may lie, in parts of the canvas's height and width."""

Batch = tuple[Tensor, dict[str, Tensor]]


def coverage(start: np.ndarray, side: np.ndarray, cells: int, pixels: int) -> np.ndarray:
    """Which share of each of ``pixels`` is covered by each cell of a row of ``cells`` equal cells
    that begins at ``start [B]`` and is ``side [B]`` long, in parts of the axis.

    Float64 ``[B, pixels, cells]``. With one such matrix for each axis, ``rows @ image @ columns.T``
    is the mean of the picture over each pixel's area: exact for any fractional place, antialiased,
    and the mean over a block of pixels is what the coarser canvas shows.
    """
    edges = (np.arange(pixels + 1) / pixels - start[:, None]) * (cells / side[:, None])
    up_to_edge = np.clip(edges[:, :, None] - np.arange(cells), 0, 1)
    return np.diff(up_to_edge, axis=1) * (side[:, None, None] * pixels / cells)


class Scenes(Dataset[Batch]):
    """Places ``images[index % len(images)]`` on a black canvas and asks what it is and where.

    Scene ``index`` is drawn from ``(stream, seed, index)`` alone: the object's side is uniform in
    ``SIDE`` and, independently, each coordinate of its centre is uniform in ``CENTRE``. So the
    object lies inside, its quarter of the canvas ("where", named by ``PARTS``) is uniform and
    independent of its size, and where patches divide a quarter of the canvas, so is its place
    relative to the patch borders: no set of patches tells the quarter. Indices beyond the number
    of images are further scenes of the same images. On a rectangular canvas objects stay square.

    Shape: images uint8 ``[N, h, w]``, labels ``[N]``; an item is float32 ``[1, H, W]``, normalised
    by ``mean`` and ``std``, and ``{"what": …, "where": …}``.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        image_size: tuple[int, int],
        *,
        seed: int,
        stream: int = 0,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.images = images
        self.labels = labels
        self.image_size = image_size
        self.seed = seed
        self.stream = stream
        self.mean = mean
        self.std = std

    def __len__(self) -> int:
        return len(self.images)

    def place(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Sides ``[B]``, in parts of the shorter side, and centres ``[B, 2]`` (y, x), in parts of
        height and width.
        """
        drawn = np.stack(
            [np.random.default_rng((self.stream, self.seed, i)).random(3) for i in indices]
        )
        side = SIDE[0] + (SIDE[1] - SIDE[0]) * drawn[:, 0]
        return side, CENTRE[0] + (CENTRE[1] - CENTRE[0]) * drawn[:, 1:]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The batch of these scenes, ready made (see ``already_batched``)."""
        side, centre = self.place(indices)
        chosen = np.asarray(indices) % len(self)
        picture = torch.from_numpy(self.images[chosen]).float() / 255
        shorter = min(self.image_size)
        rows, columns = (
            torch.from_numpy(coverage(centre[:, axis] - extent / 2, extent, cells, pixels)).float()
            for axis, (pixels, cells) in enumerate(
                zip(self.image_size, picture.shape[1:], strict=True)
            )
            for extent in [side * shorter / pixels]
        )
        canvas = rows @ picture @ columns.transpose(1, 2)
        below, right = (centre >= 0.5).astype(np.int64).T
        return ((canvas - self.mean) / self.std)[:, None], {
            "what": torch.from_numpy(self.labels[chosen].astype(np.int64)),
            "where": torch.from_numpy(2 * below + right),
        }

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], {question: label[0] for question, label in labels.items()}


def already_batched(batch: Any) -> Any:
    """The ``collate_fn`` for a data set whose ``__getitems__`` returns whole batches."""
    return batch
