"""Rows of text, image and sound with one question: pages of pictures, or tables of files."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms_factory import create_transform
from torch.utils.data import DataLoader, Dataset

from . import mixed, mixed_tables
from .audio_files import resample
from .features import Features
from .mixed import MODALITIES, Item, Parts
from .mixed_tables import Entry, Rows
from .module import DataModule
from .options import per_channel, sizes
from .pages import ROWS, WORDINGS, Pages, longest_sound
from .splits import SPLITS, balanced
from .spoken import SAMPLE_RATE
from .tokens import Bytes

PAGES_MEAN, PAGES_STD = (0.2458,), (0.3247,)  # of 2,000 training pages of 48 × 48

Source = Literal["embedded", "table"]


class AskedPages(Dataset[Item]):
    """`Pages`, their sounds as frames, without what is ``blank``."""

    def __init__(self, pages: Pages, features: Features, blank: tuple[str, ...] = ()) -> None:
        self.pages, self.features, self.blank = pages, features, blank

    def __len__(self) -> int:
        return len(self.pages)

    def __getitem__(self, index: int) -> Item:
        (text, image, sound), labels = self.pages[index]
        frames = self.features(resample(sound, SAMPLE_RATE, self.features.rate))
        return Parts(text, image, frames).without(self.blank), labels


class Multimodal(DataModule):
    """Rows that have a text, an image, a sound, or some of them, and one question.

    A batch is ``(mixed, labels)``: a `tasks.data.mixed.Mixed`, and labels a dict by question, int64
    ``[B]``. Predict batches are ``(mixed, names)``, which tell table and line.

    ``source`` is ``embedded``, pages of pictures of which a text names the row and a sound the
    column (`tasks.data.pages.Pages`), with the questions "what" is there and "where"; or a
    ``table``: ``root/train.csv`` and perhaps ``val.csv`` and ``test.csv``, with the columns
    ``label`` and any of ``text``, ``image`` and ``audio``, paths below the table's folder, and the
    question "class". A row lacks what its cell is empty of; one file may be in many rows. A split
    without a table is held out of the training rows, a tenth of each class; where rows share files,
    give tables instead. Texts are bytes of UTF-8. Images are brought to ``image_size`` by their
    shorter side, what is left over of the longer cut off at both ends. Sounds are read as
    `tasks.data.Audio` reads them. Nothing else is ever cut: longer texts and sounds are refused by
    line.

    Training rows are shuffled anew in each epoch, pages also drawn anew, from ``seed`` and the
    epoch alone: R processes with batches of B see the rows of one process with batches of R·B. Of
    all else each row is seen exactly once, the same whatever the seed.

    Args:
        root: folder of the tables.
        blank: modalities that every row goes without: what a model does without them.
        image_size: height and width in pixels; if None 32 for "embedded", 112 for a table.
        mean, std: what each channel is normalised by, of values in 0 … 1; by default the pages' for
            "embedded", ImageNet's for a table.
        features: what frames are made, see `Features`, whose defaults hold for what is left out; if
            nothing is given, for "embedded" of 8 kHz, 40 bins, with ``per_bin``.
        seconds: the longest sound that the model is made for.
        context: the most bytes of a text.
        batch_size: rows of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_samples: use so many training rows, as evenly over the classes as can be; all by
            default, of "embedded" 8,000 in each epoch.
        eval_samples: pages of validation and test each.
        predict_table: a CSV to predict, of the columns of a table; a label is not read. Images are
            grey where the model was trained on pages, else in colour.
    """

    def __init__(
        self,
        source: Source = "embedded",
        root: str | Path | None = None,
        blank: list[str] | None = None,
        image_size: int | tuple[int, int] | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        features: Features | None = None,
        seconds: float = 2.0,
        context: int = 256,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        split_seed: int = 0,
        train_samples: int | None = None,
        eval_samples: int = 500,
        predict_table: str | Path | None = None,
    ) -> None:
        super().__init__()
        # plain data, so that a checkpoint stays readable with weights_only=True
        root = None if root is None else str(root)
        predict_table = None if predict_table is None else str(predict_table)
        if source not in get_args(Source):
            raise ValueError(f"source is {source!r}; expected one of {get_args(Source)}")
        embedded = source == "embedded"
        own = Features(**features) if isinstance(features, Mapping) else features
        if own is None:
            own = Features(rate=SAMPLE_RATE, bins=40, per_bin=True) if embedded else Features()
        if image_size is None:
            image_size = 32 if embedded else 112
        self.save_hyperparameters(ignore=["features"])
        self.hparams["features"] = asdict(own)  # whatever was left out, as in Audio
        self.source: Source = source
        self.root = None if root is None else Path(root)
        self.blank = tuple(dict.fromkeys(blank or ()))
        self.image_size, _ = sizes(image_size, None)
        self.channels = 1 if embedded else 3
        self.mode = "L" if embedded else "RGB"
        self.mean = per_channel("mean", mean, PAGES_MEAN if embedded else IMAGENET_DEFAULT_MEAN)
        self.std = per_channel("std", std, PAGES_STD if embedded else IMAGENET_DEFAULT_STD)
        self.features = own
        self.seconds, self.context = seconds, context
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed, self.split_seed = seed, split_seed
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.predict_table = None if predict_table is None else Path(predict_table)
        self._check()

    def _check(self) -> None:
        if self.source == "embedded" and self.root is not None:
            raise ValueError(
                f"root {self.root} is given, but the embedded pages need none; "
                "for rows of your own add --data.source table"
            )
        if self.source != "embedded" and self.root is None:
            raise ValueError(f"source {self.source} needs the folder of its data: --data.root PATH")
        for name in self.blank:
            if name not in MODALITIES:
                near = difflib.get_close_matches(name, MODALITIES, 1) or MODALITIES
                raise ValueError(
                    f"blank has no modality {name!r}; did you mean {' or '.join(near)}?"
                )
        if len(self.blank) == len(MODALITIES):
            raise ValueError("blank leaves out text, image and audio; expected one to remain")
        least = {"context": 1, "batch_size": 1, "num_workers": 0, "seed": 0, "split_seed": 0}
        least |= {"train_samples": 1, "eval_samples": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ValueError(f"{name} is {value}; expected at least {bound}")
        if not self.features.step <= self.seconds < 24 * 3600:
            raise ValueError(
                f"seconds is {self.seconds}; expected a frame ({self.features.step:g}) to a day"
            )
        if self.source == "embedded":
            self._check_pages()

    def _check_pages(self) -> None:
        longest = max(len(words.format(row)) for words in WORDINGS for row in ROWS)
        if "audio" not in self.blank and self.seconds < longest_sound():
            raise ValueError(
                f"seconds is {self.seconds}; expected {longest_sound():g} or more, what a spoken "
                "number takes"
            )
        if "text" not in self.blank and self.context < longest:
            raise ValueError(
                f"context is {self.context}; expected {longest} or more, the bytes of a question"
            )
        self._pages("test", 1)

    @property
    def vocabulary(self) -> int:
        """The number of tokens: bytes."""
        return Bytes.size

    @property
    def bins(self) -> int:
        """Bins of a frame."""
        return self.features.height

    @property
    def frames(self) -> int:
        """Frames of the longest sound that the model is made for."""
        return self.features.frames(self.features.samples(self.seconds))

    @property
    def classes(self) -> dict[str, list[str]]:
        """The answers to the question, in the order of labels."""
        if self.source == "embedded":
            return {question: list(names) for question, names in Pages.classes.items()}
        return {"class": self._found.classes}

    @functools.cached_property
    def _found(self) -> mixed_tables.Found:
        assert self.root is not None
        return mixed_tables.read(self.root, self.context, self.blank)

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.predict_table is not None):
            self._data["predict"] = self._predicted()
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if not needed:
            return
        if self.source == "embedded":
            for split in needed:
                count = (self.train_samples or 8000) if split == "train" else self.eval_samples
                pages = self._pages(split, count)
                self._data[split] = AskedPages(pages, self.features, self.blank)
            return
        parts = mixed_tables.complete(self._found, self.split_seed)
        if self.train_samples is not None and "train" in needed:
            targets = np.array([self._found.classes.index(e.label) for e in parts["train"]])
            everything = np.arange(len(targets))
            chosen = balanced(targets, everything, self.train_samples, self.split_seed)
            parts["train"] = [parts["train"][index] for index in chosen]
        for split in needed:
            self._data[split] = self._rows(parts[split], self._found.classes)

    def _pages(self, split: Any, count: int) -> Pages:
        seed = self.seed if split == "train" else 0
        return Pages(
            split,
            count,
            self.image_size,
            seed=seed,
            split_seed=self.split_seed,
            mean=self.mean[0],
            std=self.std[0],
        )

    def _rows(self, found: list[Entry], classes: list[str]) -> Rows:
        whole: Any = create_transform(
            self.image_size, is_training=False, mean=self.mean, std=self.std, crop_pct=1.0
        )
        return Rows(found, classes, whole, self.mode, self.features, self.seconds)

    def _predicted(self) -> Rows:
        if self.predict_table is None:
            raise ValueError("no rows to predict: give their table, --data.predict_table PATH.csv")
        found = mixed_tables.entries(self.predict_table, self.context, self.blank, labelled=False)
        return self._rows(found, [])

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        return (
            f"{len(data)} {split} rows are too few for {processes} processes with batches of "
            f"{self.batch_size}; give more rows, a smaller --data.batch_size or fewer devices"
        )

    def collate(self, data: Any) -> Any:
        return functools.partial(mixed.batch, step=self.features.step)

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")
