"""Makes the image set that mmpos carries: 10,000 pictures of Fashion-MNIST, 1,000 of each class.

    python scripts/make_fashion_mnist.py FOLDER [OUTPUT]

FOLDER holds the four files ``{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz``, as published by
Zalando and as packaged by Debian::

    apt-get download dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb unpacked
    python scripts/make_fashion_mnist.py unpacked/usr/share/datasets/fashion-mnist

The first 800 training and the first 200 test images of each class are taken, in file order, so
that two runs give the same bytes. Output: uint8 arrays ``train_images [8000, 28, 28]``,
``train_labels [8000]``, ``test_images [2000, 28, 28]`` and ``test_labels [2000]``.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

OUTPUT = Path(__file__).parents[1] / "tasks" / "data" / "fashion_mnist_10k.npz"


def read_idx(path: Path) -> np.ndarray:
    """A uint8 array in the idx format: two zero bytes, the type 8, the number of axes, the shape
    as big-endian 32-bit integers, the values.
    """
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it begins with {content[:3]!r}")
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)


def first_of_each_class(folder: Path, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    chosen = np.concatenate([np.flatnonzero(labels == c)[:count] for c in np.unique(labels)])
    chosen.sort()
    return read_idx(folder / f"{split}-images-idx3-ubyte.gz")[chosen], labels[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the four .gz files")
    parser.add_argument("output", type=Path, nargs="?", default=OUTPUT)
    arguments = parser.parse_args()
    train_images, train_labels = first_of_each_class(arguments.folder, "train", 800)
    test_images, test_labels = first_of_each_class(arguments.folder, "t10k", 200)
    np.savez_compressed(
        arguments.output,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
