"""Sound to classify: spoken digits, folders, SpeechCommands, ESC-50, AudioSet, tables of files."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import DataLoader

from . import audio_sources
from .audio_files import audio_files, seconds_of, unreadable
from .audio_sources import Clip, Found
from .features import Features, SpecAugment
from .files import without_broken
from .module import DataModule
from .sounds import Digits, Files, Longer, Sounds, Source
from .splits import SPLITS, balanced
from .spoken import SAMPLE_RATE, SpokenDigits

Origin = Literal["embedded", "folder", "SpeechCommands", "ESC50", "AudioSet", "table"]


class Audio(DataModule):
    """Sound to classify.

    A batch is ``(sound, labels)``: sound a `tasks.data.sounds.Sound`, frames padded to the longest
    of the batch with a mask; labels a dict by question, int64 ``[B]``, or 0 and 1 ``[B, classes]``
    where a clip has several (`multilabel`). Predict batches are ``(sound, paths)``.

    ``source`` is ``embedded``, sequences of spoken digits (`tasks.data.spoken.SpokenDigits`), with
    the questions which of zero, one and two comes "first" and "last"; a ``folder`` with
    ``root/<class>/*`` or ``root/{train,val,test}/<class>/*``; ``SpeechCommands`` as torchaudio
    stores it, with its lists; ``ESC50``, with ``meta/esc50.csv``; ``AudioSet``, with its segments
    and label CSVs and a file for each id; or a ``table``, ``train.csv`` and perhaps ``val.csv`` and
    ``test.csv`` with columns ``file,labels``. A split that the source lacks is held out of its
    training clips. Files are read by libsndfile, their channels averaged, and brought to the rate
    of the features.

    A clip of up to ``seconds`` is whole; no clip is ever cut in silence. What is ``longer`` is
    refused by name (``raise``), cut into ``windows`` over which logits are averaged (in training
    one from a random place), or passed on whole (``extend``), for encodings that go on.

    Training clips are shuffled and drawn anew in each epoch, from ``seed`` and the epoch alone: R
    processes with batches of B see the clips of one process with batches of R·B. Of all else each
    clip is seen exactly once, the same whatever the seed.

    Args:
        root: folder of the data, for every source but "embedded".
        download: fetch SpeechCommands into ``root`` if it is not there.
        fold: of ESC-50, to test on; the one before it validates.
        digits: fewest and most digits of a sequence, and ``train_digits`` those of training ones,
            the same by default.
        test_voices: whom embedded tests are of: voices held out, "synthetic", or a "recorded" one.
        features: what frames are made, see `Features`, whose defaults hold for what is left out; if
            nothing is given, for "embedded" of 8 kHz, 40 bins, with ``per_bin``.
        spec_augment: masks in training, see `SpecAugment`; none by default.
        seconds: the longest clip that the model is made for.
        overlap: of windows, as a part of their length.
        batch_size: clips of a batch in each process.
        buckets: sort training clips by length in runs of so many batches, to pad less.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_samples: use so many training clips, of files as evenly over the classes as can be;
            all by default, of "embedded" 2,000 in each epoch.
        eval_samples: embedded sequences of validation and test each.
        on_error: ``skip`` leaves out files that cannot be read, with one warning that counts and
            names them; reads every file once beforehand.
        predict_folder: files to predict, in any depth.
    """

    def __init__(
        self,
        source: Origin = "embedded",
        root: str | Path | None = None,
        download: bool = False,
        fold: int = 5,
        digits: tuple[int, int] = (7, 10),
        train_digits: tuple[int, int] | None = None,
        test_voices: Literal["synthetic", "recorded"] = "synthetic",
        features: Features | None = None,
        spec_augment: SpecAugment | None = None,
        seconds: float = 10.0,
        longer: Longer = "raise",
        overlap: float = 0.0,
        batch_size: int = 32,
        buckets: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        split_seed: int = 0,
        train_samples: int | None = None,
        eval_samples: int = 500,
        on_error: Literal["raise", "skip"] = "raise",
        predict_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        # plain data, so that a checkpoint stays readable with weights_only=True
        root = None if root is None else str(root)
        predict_folder = None if predict_folder is None else str(predict_folder)
        choices = {"source": Origin, "longer": Longer}
        given = {"source": source, "longer": longer}
        for name, value in given.items():
            if value not in get_args(choices[name]):
                raise ValueError(f"{name} is {value!r}; expected one of {get_args(choices[name])}")
        own = _made(Features, features) or (
            Features(rate=SAMPLE_RATE, bins=40, per_bin=True)
            if source == "embedded"
            else Features()
        )
        masks = _made(SpecAugment, spec_augment)
        self.save_hyperparameters(ignore=["features", "spec_augment"])
        # what a model was trained on, whatever was left out, goes with its checkpoint
        self.hparams["features"] = asdict(own)
        self.hparams["spec_augment"] = None if masks is None else asdict(masks)
        self.source = source
        self.root = None if root is None else Path(root)
        self.download = download
        self.fold = fold
        self.digits = tuple(digits)
        self.train_digits = self.digits if train_digits is None else tuple(train_digits)
        self.test_voices = test_voices
        self.features, self.spec_augment = own, masks
        self.seconds, self.overlap = seconds, overlap
        self.longer: Longer = longer
        self.batch_size, self.buckets = batch_size, buckets
        self.num_workers = num_workers
        self.seed, self.split_seed = seed, split_seed
        self.train_samples, self.eval_samples = train_samples, eval_samples
        self.on_error = on_error
        self.predict_folder = None if predict_folder is None else Path(predict_folder)
        self._check()

    def _check(self) -> None:
        embedded = self.source == "embedded"
        if embedded and self.root is not None:
            raise ValueError(
                f"root {self.root} is given, but the embedded digits need none; "
                "for sound of your own add --data.source folder"
            )
        if not embedded and self.root is None:
            raise ValueError(f"source {self.source} needs the folder of its data: --data.root PATH")
        if self.download and self.source != "SpeechCommands":
            raise ValueError(
                f"download is given, but source {self.source} has nothing to download; "
                "expected SpeechCommands"
            )
        if self.test_voices not in ("synthetic", "recorded"):
            raise ValueError(
                f"test_voices is {self.test_voices!r}; expected 'synthetic' or 'recorded'"
            )
        if self.on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {self.on_error!r}; expected 'raise' or 'skip'")
        least = {"batch_size": 1, "num_workers": 0, "seed": 0, "split_seed": 0, "eval_samples": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {bound}")
        for name in ("train_samples", "buckets"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not self.features.step <= self.seconds < 24 * 3600:
            raise ValueError(
                f"seconds is {self.seconds}; expected a frame ({self.features.step:g}) to a day"
            )
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap is a part of a window from 0 to below 1, got {self.overlap}")

    @property
    def bins(self) -> int:
        """Bins of a frame."""
        return self.features.height

    @property
    def frames(self) -> int:
        """Frames of the longest clip that the model is made for."""
        return self.features.frames(self.features.samples(self.seconds))

    @property
    def classes(self) -> dict[str, list[str]]:
        """The answers to each question, in the order of labels."""
        if self.source == "embedded":
            return {question: list(words) for question, words in SpokenDigits.classes.items()}
        return {"class": self._found.classes}

    @property
    def multilabel(self) -> bool:
        """Whether a clip has any number of labels."""
        return self.source != "embedded" and self._found.multilabel

    @functools.cached_property
    def _found(self) -> Found:
        assert self.root is not None
        if self.source == "ESC50":
            return audio_sources.esc50(self.root, self.fold)
        read: dict[str, Callable[[Path], Found]] = {
            "folder": audio_sources.folder,
            "SpeechCommands": audio_sources.speechcommands,
            "AudioSet": audio_sources.audioset,
            "table": audio_sources.table,
        }
        return read[self.source](self.root)

    def prepare_data(self) -> None:
        if self.download:
            assert self.root is not None
            audio_sources.download_speechcommands(self.root)

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.predict_folder is not None):
            self._data["predict"] = self._sounds("predict", self._predicted())
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if not needed:
            return
        if self.source == "embedded":
            for split in needed:
                self._data[split] = self._sounds(split, self._spoken(split))
            return
        parts = audio_sources.complete(self._found, self.split_seed)
        if self.train_samples is not None and "train" in needed:
            parts["train"] = self._balanced(parts["train"])
        for split in needed:
            self._data[split] = self._sounds(split, self._files(split, parts[split]))

    def _spoken(self, split: str) -> Digits:
        training = split == "train"
        voices: Any = "recorded" if split == "test" and self.test_voices == "recorded" else split
        count = (self.train_samples or 2000) if training else self.eval_samples
        digits = self.train_digits if training else self.digits
        seed = self.seed if training else 0
        spoken = SpokenDigits(voices, count, (digits[0], digits[1]), seed=seed)
        return Digits(spoken, self.features.rate)

    def _balanced(self, clips: list[Clip]) -> list[Clip]:
        assert self.train_samples is not None
        if self.multilabel:
            if self.train_samples > len(clips):
                raise ValueError(
                    f"train_samples is {self.train_samples}; there are {len(clips)} clips"
                )
            order = np.random.default_rng(self.split_seed).permutation(len(clips))
            chosen = np.sort(order[: self.train_samples])
        else:
            labels = np.array([clip.labels[0] for clip in clips])
            everything = np.arange(len(clips))
            chosen = balanced(labels, everything, self.train_samples, self.split_seed)
        return [clips[index] for index in chosen]

    def _files(self, split: str, clips: list[Clip]) -> Files:
        classes = self._found.classes
        kept = self._readable(clips, f" in {split}", classes if split == "train" else ())
        return Files(kept, self.features.rate, len(classes), multilabel=self.multilabel)

    def _predicted(self) -> Files:
        if self.predict_folder is None:
            raise ValueError("no sound to predict: give its folder, --data.predict_folder PATH")
        clips = [Clip(path, ()) for path in audio_files(self.predict_folder)]
        return Files(self._readable(clips), self.features.rate)

    def _readable(
        self, clips: list[Clip], where: str = "", classes: Sequence[str] = ()
    ) -> list[Clip]:
        """Without what cannot be read, if it is to be skipped; else the headers of all are read."""
        paths = list(dict.fromkeys(clip.path for clip in clips))
        if self.on_error == "raise":
            for path in () if self.longer == "raise" else paths:  # lengths are read there anyway
                seconds_of(path)
            return clips
        broken = unreadable(paths, self.features.rate)
        return without_broken(
            clips, broken, lambda clip: clip.labels, what="clip", where=where, classes=classes
        )

    def _sounds(self, split: str, source: Source) -> Sounds:
        training = split == "train"
        sounds = Sounds(
            source,
            self.features,
            self.seconds,
            self.longer,
            self.overlap,
            self.spec_augment if training else None,
            self.seed if training else None,
        )
        if isinstance(source, Files) and self.longer == "raise":
            for index in range(len(source)):
                sounds.check(index)
        return sounds

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        return (
            f"{len(data)} {split} clips are too few for {processes} processes with batches of "
            f"{self.batch_size}; give more clips, a smaller --data.batch_size or fewer devices"
        )

    def collate(self, data: Any) -> Any:
        return data.batch

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")


def _made(kind: type, given: Any) -> Any:
    """An instance of a class of settings, of one, of its arguments, or of None for none."""
    return kind(**given) if isinstance(given, Mapping) else given
