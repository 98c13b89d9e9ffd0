"""Texts and sequences to classify: Python's own, files, FASTA, or sets of `datasets`."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from . import labelled
from .snippets import Samples, batch
from .splits import SPLITS, balanced
from .tokens import Tokens

Source = Literal["stdlib", "files", "datasets"]


class LabelledText(Tokens):
    """Texts, or sequences of nucleotides or amino acids, to classify.

    A batch is ``((tokens, mask), {"class": labels})``: tokens int64 ``[B, L]``, padded to the
    longest of the batch, mask ``[B, L]`` True for what is real, labels int64 ``[B]``. Predict
    batches are ``((tokens, mask), names)``.

    ``source`` is ``stdlib``, the sources of the eight largest packages of this Python's standard
    library, whose names are the classes (these differ between versions of Python); ``files``, with
    ``root/<class>/*`` or ``root/<class>.fasta``, or such below ``root/{train,val,test}``; or
    ``datasets``, a set of that library, which fetches it. In a FASTA file (``.fasta .fa .faa
    .fna``; see `tasks.data.fasta`) each record is a text. A split that the source lacks is held
    out of its training texts: a tenth of each class, by a hash of their names.

    Of a text longer than ``context`` its beginning is used, in training another part in each epoch.
    ``snippets`` cuts it into as many samples as it has parts instead: whole texts are held out, a
    tenth of the bytes, so that no text is on two sides. Bytes are taken as they are, also where
    they are no UTF-8; a tokenizer needs UTF-8. A file with a zero byte is binary and refused; empty
    texts are left out with one warning.

    Training samples are shuffled and drawn anew in each epoch, from ``seed`` and the epoch alone: R
    processes with batches of B see the samples of one process with batches of R·B. Samples of
    validation and test are the same whatever the seed, and each is seen exactly once on any number
    of processes.

    Args:
        root: folder of the texts, for "files".
        suffixes: endings of files of text in a folder of a class; ``.txt`` by default.
        dataset: name of a set, or its folder, for "datasets".
        subset: of its configurations.
        column, label: where its text and its labels are.
        tokenizer: a file of the `tokenizers` library; each byte is a token by default.
        context: most tokens of a sample.
        snippets: whether a long text gives several samples; for "stdlib" alone by default.
        crop: whether training draws another part of a longer text in each epoch.
        batch_size: samples of a batch in each process.
        buckets: sort training samples by length in runs of so many batches, to pad less; not by
            default.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_samples, eval_samples: use this many samples, of training, and of validation and test
            each (or all there are, if fewer), as evenly over the classes as can be, one of each at
            least.
        predict_path: a file of text, a FASTA file, or a folder of both, to predict; of longer texts
            the beginning is seen.
    """

    def __init__(
        self,
        source: Source = "stdlib",
        root: str | Path | None = None,
        suffixes: list[str] | None = None,
        dataset: str | None = None,
        subset: str | None = None,
        column: str = "text",
        label: str = "label",
        tokenizer: str | Path | None = None,
        context: int = 256,
        snippets: bool | None = None,
        crop: bool = True,
        batch_size: int = 32,
        buckets: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        train_samples: int | None = None,
        eval_samples: int | None = None,
        predict_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        # plain strings, so that a checkpoint stays readable with weights_only=True
        root = None if root is None else str(root)
        tokenizer = None if tokenizer is None else str(tokenizer)
        predict_path = None if predict_path is None else str(predict_path)
        if source not in get_args(Source):
            raise ValueError(f"source is {source!r}; expected one of {get_args(Source)}")
        self.save_hyperparameters()
        self.source = source
        self.root = None if root is None else Path(root)
        self.suffixes = [".txt"] if suffixes is None else suffixes
        self.dataset, self.subset = dataset, subset
        self.column, self.label = column, label
        self.tokenizer = tokenizer
        self.context = context
        self.snippets = source == "stdlib" if snippets is None else snippets
        self.crop = crop
        self.batch_size, self.buckets = batch_size, buckets
        self.num_workers = num_workers
        self.seed = seed
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.predict_path = None if predict_path is None else Path(predict_path)
        self._check()

    def _check(self) -> None:
        for name, source in (("root", "files"), ("dataset", "datasets")):
            given = getattr(self, name)
            if self.source == source and given is None:
                raise ValueError(f"source {source} needs --data.{name}: what to read")
            if self.source != source and given is not None:
                raise ValueError(
                    f"{name} {given} is given, but source {self.source} needs none; "
                    f"to read it add --data.source {source}"
                )
        if not self.suffixes:
            raise ValueError("suffixes is empty; expected endings such as ['.txt'], or null")
        least = {"context": 1, "batch_size": 1, "num_workers": 0, "seed": 0}
        least |= {"train_samples": 1, "eval_samples": 1, "buckets": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ValueError(f"{name} is {value}; expected at least {bound}")

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        return self.tokens.size

    @functools.cached_property
    def classes(self) -> dict[str, list[str]]:
        """The classes, in the order of labels; of files by their listing alone."""
        if self.source == "files":
            assert self.root is not None
            return {"class": labelled.class_names(self.root)}
        return {"class": self._found[0]}

    @functools.cached_property
    def _found(self) -> labelled.Found:
        """All that there is, without what is empty."""
        if self.source == "files":
            assert self.root is not None
            names, found = labelled.files(self.root, self.suffixes)
        elif self.source == "datasets":
            assert self.dataset is not None
            names, found = labelled.datasets(self.dataset, self.subset, self.column, self.label)
        else:
            names, found = labelled.stdlib()
        empty = [text.name for texts in found.values() for text in texts if not text.content]
        if empty and self.source != "stdlib":
            _tell_empty(empty)
        kept = {s: [text for text in texts if text.content] for s, texts in found.items()}
        if len(names) < 2:
            raise ValueError(f"the data has one class ({', '.join(names)}); expected two or more")
        return names, kept

    def prepare_data(self) -> None:
        if self.source == "datasets":
            _ = self._found

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.predict_path is not None):
            self._data["predict"] = self._predict_samples()
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if needed:
            parts = labelled.complete(*self._found, by_bytes=self.snippets)
            self._data |= {split: self._samples(split, parts[split]) for split in needed}

    def _samples(self, split: str, texts: Sequence[labelled.Labelled]) -> Samples:
        training = split == "train"
        samples = Samples(
            [self._encoded(text.name, text.content) for text in texts],
            [text.label for text in texts],
            self.context,
            snippets=self.snippets,
            seed=self.seed if training and self.crop else None,
        )
        most = self.train_samples if training else self.eval_samples
        if most is not None and not training:
            most = max(min(most, len(samples)), len(self.classes["class"]))
        if most is not None:
            labels = np.array([text.label for text in texts])[samples.places[:, 0]]
            chosen = balanced(labels, np.arange(len(samples)), most, seed=0)
            samples.places = samples.places[chosen]
        return samples

    def _encoded(self, name: str, content: bytes) -> np.ndarray:
        if b"\0" in content:
            raise ValueError(
                f"{name} has a zero byte, so it is binary or no UTF-8: expected text; "
                "leave it out, or convert it"
            )
        tokens, _, _ = self.tokens.encode(name, content)
        if not len(tokens):
            raise ValueError(f"{name} has no tokens: the tokenizer leaves out all of its text")
        return tokens

    def _predict_samples(self) -> Samples:
        if self.predict_path is None:
            raise ValueError(
                "no texts to predict: give a file, a FASTA file or a folder, --data.predict_path "
                "PATH"
            )
        path = self.predict_path
        found = list(labelled.texts(path, self.suffixes, path.parent if path.is_file() else path))
        empty = [name for name, content in found if not content]
        if len(empty) == len(found):
            raise ValueError(f"{path} has no text: {', '.join(empty[:10])} is empty")
        if empty:
            _tell_empty(empty)
        kept = [(name, content) for name, content in found if content]
        encoded = [self._encoded(*text) for text in kept]
        return Samples(encoded, [name for name, _ in kept], self.context)

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        return (
            f"{len(data)} {split} samples are too few for {processes} processes with batches "
            f"of {self.batch_size}; give more texts, a smaller --data.batch_size or fewer devices"
        )

    def collate(self, data: Any) -> Any:
        return batch

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")


def _tell_empty(names: Sequence[str]) -> None:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    rank_zero_warn(f"left out {len(names)} empty texts: {', '.join(names[:10])}{more}")
