"""Images for classification: embedded, from folders, or torchvision's sets; plain or as scenes."""

import difflib
import functools
import inspect
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms_factory import create_transform
from torch.utils.data import DataLoader, Dataset

from .module import DataModule
from .options import per_channel, sizes
from .pictures import Files, Plain, image_files, unreadable
from .scenes import PARTS, Scenes, already_batched
from .sources import DOWNLOADABLE, class_names, own_splits
from .splits import SPLITS, balanced, hold_out

GREY_MEAN, GREY_STD = (0.2860,), (0.3530,)  # of Fashion-MNIST's training images

Source = Literal["embedded", "folder", "FashionMNIST", "CIFAR10", "CIFAR100"]
Scene = Literal["placed", "plain"]

AUGMENTATIONS = sorted(
    set(inspect.signature(create_transform).parameters)
    - {"input_size", "is_training", "mean", "std", "separate", "normalize", "use_prefetcher"}
    - {"tf_preprocessing", "naflex", "patch_size", "max_seq_len"}
    - {"patchify", "patchify_channels_last", "patchify_flatten"}
)


class Images(DataModule):
    """Images to classify, and the questions asked of them.

    A batch is ``(images, labels)``: images float32 ``[B, channels, H, W]``, normalised; labels one
    int64 ``[B]`` for each question in ``classes``. Predict batches are ``(images, paths)``.

    ``source`` is the embedded set (10,000 images of Fashion-MNIST), a ``folder`` with
    ``root/<class>/*`` or ``root/{train,val,test}/<class>/*``, or a set of torchvision's below
    ``root``. A split that the source lacks is held out of its training images: a tenth of each
    class, chosen by ``split_seed``. ``scene="placed"`` shows each image small, somewhere on a black
    canvas, and asks "what" and "where" (``tasks.data.scenes.Scenes``); ``"plain"`` shows it whole
    and asks "class". Only the embedded set is placed by default.

    Training images are shuffled and drawn anew in each epoch, from ``seed`` and the epoch alone:
    R processes with batches of B see the samples of one process with batches of R·B. Validation
    and test images are the same whatever the seed, and each is seen exactly once on any number of
    processes.

    Args:
        root: folder of the data, for every source but "embedded".
        download: fetch FashionMNIST or CIFAR into ``root`` if they are not there.
        image_size: height and width in pixels, a multiple of ``patch_size``.
        batch_size: images of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_samples: use this many training images, as evenly over the classes as can be.
        augmentation: options of ``timm.data.create_transform`` for plain images (``scale``,
            ``hflip``, ``auto_augment``, ``re_prob``, ``crop_pct``, …; ``no_aug: true`` for none).
            timm's defaults hold, except that evaluation crops nothing but the longer side.
        mean, std: what each channel is normalised by, of values in 0 … 1; by default
            Fashion-MNIST's for grey images, ImageNet's for colour.
        skip_broken: leave out image files that cannot be read, with one warning that names them;
            reads every file once beforehand.
        predict_folder: images to predict, in any depth.
    """

    def __init__(
        self,
        source: Source = "embedded",
        root: str | Path | None = None,
        download: bool = False,
        scene: Scene | None = None,
        image_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] | None = 4,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        split_seed: int = 0,
        train_samples: int | None = None,
        augmentation: dict[str, Any] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        skip_broken: bool = False,
        predict_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        # plain strings, so that a checkpoint stays readable with weights_only=True
        root = None if root is None else str(root)
        predict_folder = None if predict_folder is None else str(predict_folder)
        for name, value, choices in (("source", source, Source), ("scene", scene, Scene)):
            if value is not None and value not in get_args(choices):
                raise ValueError(f"{name} is {value!r}; expected one of {get_args(choices)}")
        scene = scene or ("placed" if source == "embedded" else "plain")
        self.save_hyperparameters()
        self.source = source
        self.root = None if root is None else Path(root)
        self.download = download
        self.scene = scene
        self.image_size, self.patch_size = sizes(image_size, patch_size)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.split_seed = split_seed
        self.train_samples = train_samples
        self.augmentation = dict(augmentation or {})
        self.channels = 1 if source in ("embedded", "FashionMNIST") else 3
        self.mode = "L" if self.channels == 1 else "RGB"
        grey = self.channels == 1
        self.mean = per_channel("mean", mean, GREY_MEAN if grey else IMAGENET_DEFAULT_MEAN)
        self.std = per_channel("std", std, GREY_STD if grey else IMAGENET_DEFAULT_STD)
        self.skip_broken = skip_broken
        self.predict_folder = None if predict_folder is None else Path(predict_folder)
        self._check()

    @functools.cached_property
    def classes(self) -> dict[str, list[str]]:
        """The answers to each question, in the order of labels; reads no more than folder names."""
        names = class_names(self.source, self.root)
        return {"what": names, "where": PARTS} if self.scene == "placed" else {"class": names}

    def _check(self) -> None:
        if self.source == "embedded" and self.root is not None:
            raise ValueError(
                f"root {self.root} is given, but the embedded images need none; "
                "for images of your own add --data.source folder"
            )
        if self.source != "embedded" and self.root is None:
            raise ValueError(f"source {self.source} needs the folder of its data: --data.root PATH")
        if self.download and self.source not in DOWNLOADABLE:
            raise ValueError(
                f"download is given, but source {self.source} has nothing to download; "
                f"expected one of {', '.join(DOWNLOADABLE)}"
            )
        if self.scene == "placed" and self.channels != 1:
            raise ValueError(
                f"scene placed needs the grey images of embedded or FashionMNIST, got source "
                f"{self.source}; use --data.scene plain"
            )
        if self.scene == "placed" and self.augmentation:
            raise ValueError(
                f"augmentation {self.augmentation} is for plain images, but the scene is placed; "
                "use --data.scene plain or leave it out"
            )
        for name in self.augmentation:
            if name not in AUGMENTATIONS:
                near = difflib.get_close_matches(name, AUGMENTATIONS, 1) or AUGMENTATIONS
                raise ValueError(
                    f"augmentation has no option {name!r}; did you mean {' or '.join(near)}?"
                )
        for name, least in (("batch_size", 1), ("num_workers", 0), ("seed", 0), ("split_seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")

    def prepare_data(self) -> None:
        if self.download:
            for train in (True, False):
                DOWNLOADABLE[self.source](str(self.root), train=train, download=True)

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.predict_folder is not None):
            self._data["predict"] = self._predict_files()
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if not needed:
            return
        assert self.classes  # raises for data that cannot be used
        bases = own_splits(self.source, self.root, self.mode)
        targets = {split: np.asarray(base.targets) for split, base in bases.items()}
        indices = {split: np.arange(len(targets[split])) for split in bases}
        absent = [split for split in SPLITS if split not in bases]
        indices |= hold_out(targets["train"], absent, self.split_seed)
        if self.train_samples is not None and "train" in needed:
            indices["train"] = balanced(
                targets["train"], indices["train"], self.train_samples, self.split_seed
            )
        for split in needed:
            base = bases.get(split, bases["train"])
            chosen = indices[split]
            if self.source == "folder" and self.skip_broken:
                paths = [base.samples[index][0] for index in chosen]
                readable = set(self._without_broken(paths))
                labels = targets["train" if base is bases["train"] else split]
                before, chosen = chosen, chosen[[path in readable for path in paths]]
                for label in np.setdiff1d(labels[before], labels[chosen]):
                    raise ValueError(
                        f"no image of class {base.classes[label]} in {split} can be read: "
                        "repair them, or remove the class"
                    )
            self._data[split] = self._dataset(split, base, chosen)

    def _dataset(self, split: str, base: Any, indices: np.ndarray) -> Dataset:
        training = split == "train"
        if self.scene == "plain":
            return Plain(base, indices, self._transform(training), self.seed if training else None)
        return Scenes(
            np.asarray(base.data)[indices],
            np.asarray(base.targets)[indices],
            self.image_size,
            seed=self.seed if training else 0,
            stream=SPLITS.index(split),
            mean=self.mean[0],
            std=self.std[0],
        )

    def _transform(self, training: bool) -> Any:
        try:
            return create_transform(
                self.image_size,
                is_training=training,
                mean=self.mean,
                std=self.std,
                **{"crop_pct": 1.0, **self.augmentation},
            )
        except (AssertionError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"timm takes no augmentation {self.augmentation} ({error or 'unknown policy'}); "
                "see timm.data.create_transform"
            ) from error

    def _predict_files(self) -> Files:
        if self.predict_folder is None:
            raise ValueError("no images to predict: give their folder, --data.predict_folder PATH")
        paths = image_files(self.predict_folder)
        if self.skip_broken:
            paths = self._without_broken(paths)
        return Files(paths, self.mode, self._transform(training=False))

    def _without_broken(self, paths: list[str]) -> list[str]:
        broken = unreadable(paths, self.mode)
        if broken:
            names = ", ".join(sorted(broken))
            if len(broken) == len(paths):
                raise ValueError(f"none of the {len(paths)} images can be read: {names}")
            rank_zero_warn(f"left out {len(broken)} images that cannot be read: {names}")
        return [path for path in paths if path not in broken]

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        return (
            f"{len(data)} {split} images are too few for {processes} processes with batches of "
            f"{self.batch_size}; give more images, a smaller --data.batch_size or fewer devices"
        )

    def collate(self, data: Any) -> Any:
        return None if isinstance(data, Plain) else already_batched

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")
