"""Where images come from: the embedded set, a folder, torchvision's sets."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST, ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from .pictures import read_image
from .splits import SPLITS

SPELLINGS = {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
DOWNLOADABLE = {"FashionMNIST": FashionMNIST, "CIFAR10": CIFAR10, "CIFAR100": CIFAR100}

CIFAR10_CLASSES: str = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES: str = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


@functools.cache
def _embedded_arrays() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).with_name("fashion_mnist_10k.npz")) as arrays:
        return {name: arrays[name] for name in arrays.files}


class Embedded:
    """The 8,000 training or 2,000 test images that come with the package, in the form of
    torchvision's data sets: ``data`` uint8 ``[N, 28, 28]``, ``targets [N]``, ``classes``; an item
    is a PIL image and its label.
    """

    classes = FashionMNIST.classes

    def __init__(self, train: bool) -> None:
        arrays, split = _embedded_arrays(), "train" if train else "test"
        self.data, self.targets = arrays[f"{split}_images"], arrays[f"{split}_labels"]

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.data[index]), int(self.targets[index])


def _class_folders(folder: Path) -> list[str]:
    """Names of the folders in ``folder``, sorted, without hidden ones such as caches."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(e.name for e in found if e.is_dir() and not e.name.startswith("."))


class _ImageFolder(ImageFolder):
    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = _class_folders(Path(directory))
        return names, {name: label for label, name in enumerate(names)}


def split_folders(root: Path, what: str = "images") -> dict[str, Path]:
    """Splits of ``root``: its folders train, val and test as far as there are, in any case or also
    called ``SPELLINGS``, else all of it as train. Errors name ``what`` is expected: OSError or
    ValueError where there is no training data, or two folders for a split.
    """
    if root.is_file():
        raise NotADirectoryError(f"--data.root {root} is a file, expected a folder of {what}")
    if not root.is_dir():
        raise FileNotFoundError(
            f"the data folder {root} does not exist; give --data.root a folder with one folder of "
            f"{what} for each class, or with train, val and test folders of such"
        )
    # a class may be called train: a split has folders of its own
    found: dict[str, Path] = {}
    for folder in sorted(root.iterdir()):
        split = SPELLINGS.get(folder.name.lower(), folder.name.lower())
        if split in SPLITS and _class_folders(folder):
            if split in found:
                raise ValueError(f"{found[split]} and {folder} are both for {split}: remove one")
            found[split] = folder
    if found and "train" not in found:
        raise ValueError(
            f"{root} has {' and '.join(found)} but no train folder; expected "
            "train/<class>/<file>, or <class>/<file> without splits"
        )
    return {split: found[split] for split in SPLITS if split in found} or {"train": root}


def folder_classes(root: Path, what: str = "images") -> list[str]:
    """Names of the class folders, sorted, the same in all splits. Raises ValueError otherwise, and
    for fewer than two.
    """
    names: dict[str, list[str]] = {}
    for split, folder in split_folders(root, what).items():
        names[split] = _class_folders(folder)
        if split == "train" and len(names[split]) < 2:
            raise ValueError(
                f"{folder} has {len(names[split])} class folders ({', '.join(names[split])}); "
                f"expected at least two, each with the {what} of one class"
            )
        if names[split] != names["train"]:
            missing = sorted(set(names["train"]) - set(names[split]))
            surplus = sorted(set(names[split]) - set(names["train"]))
            raise ValueError(
                f"{folder} has other classes than train: missing {missing}, surplus {surplus}; "
                "every split needs the same class folders"
            )
    return names["train"]


def image_folder(folder: Path, mode: str) -> ImageFolder:
    """Torchvision's reader of ``folder/<class>/<image>``. Raises ValueError for an empty class."""
    images = _ImageFolder(
        str(folder), loader=functools.partial(read_image, mode=mode), allow_empty=True
    )
    empty = sorted(set(images.classes) - {images.classes[label] for label in images.targets})
    if empty:
        raise ValueError(
            f"no images in {', '.join(str(folder / name) for name in empty)}; "
            f"expected files of type {' '.join(IMG_EXTENSIONS)}: add some or remove the folder"
        )
    return images


def class_names(source: str, root: Path | None) -> list[str]:
    """Names of the classes of ``source``, in label order; of a folder by its listing alone."""
    if source == "folder":
        assert root is not None
        return folder_classes(root)
    if source == "CIFAR10":
        return CIFAR10_CLASSES.split()
    if source == "CIFAR100":
        return CIFAR100_CLASSES.split()
    return list(FashionMNIST.classes)


def own_splits(source: str, root: Path | None, mode: str) -> dict[str, Any]:
    """The splits that ``source`` comes with: items are PIL images and labels, ``targets`` all
    labels. Raises ValueError or FileNotFoundError where the data are not as they should be.
    """
    if source == "embedded":
        return {"train": Embedded(train=True), "test": Embedded(train=False)}
    assert root is not None
    if source == "folder":
        return {split: image_folder(path, mode) for split, path in split_folders(root).items()}
    try:
        return {
            split: DOWNLOADABLE[source](str(root), train=split == "train")
            for split in ("train", "test")
        }
    except RuntimeError as error:
        raise FileNotFoundError(
            f"{source} is not in the folder {root}, or not whole; "
            "fetch it with --data.download true"
        ) from error
