"""Video to classify: embedded pictures in motion, folders, tables of files."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import DataLoader

from . import video_sources
from .clips import Augmentation, Files, Look, Moving, Videos
from .files import without_broken
from .module import DataModule
from .motion import Motion
from .options import per_channel, sizes
from .splits import SPLITS, balanced
from .video_files import check, library, unreadable
from .video_sources import Found, Labelled, video_files

GREY_MEAN, GREY_STD = (0.0517,), (0.1767,)  # of 2,000 training clips of Motion, 32 × 32

Origin = Literal["embedded", "folder", "table"]
Order = Literal["real", "shuffled"]


class Video(DataModule):
    """Video to classify.

    A batch is ``(clips, labels)``: clips a `tasks.data.clips.Clips`; labels a dict by question,
    int64 ``[B]``. Predict batches are ``(clips, paths)``.

    ``source`` is ``embedded``, real pictures that go round in circles (`tasks.data.motion.Motion`),
    grey, with the questions "what" and "how"; a ``folder`` with ``root/<class>/*`` in any depth or
    ``root/{train,val,test}/<class>/*``; or a ``table``, ``train.csv`` and perhaps ``val.csv`` and
    ``test.csv`` with the columns ``file,label``. A split that the source lacks is held out of its
    training videos. Files are read by PyAV (``pip install 'mmpos[video]'``).

    A clip is ``frames`` frames, ``1 / fps`` seconds apart. Each is what is on screen at its moment,
    by the times in the file, so a moment looks the same at any ``fps``, and files of any and of
    varying rate give one pace. A video shorter than a clip keeps the frames that it has, in which
    it is on screen; the rest of the row is 0 and masked. It is never looped. Of a longer one
    evaluation takes ``views`` clips, and training one from a random place.

    Training clips are shuffled and drawn anew in each epoch, from ``seed`` and the epoch alone: R
    processes with batches of B see the clips of one process with batches of R·B. Of all else each
    video is seen exactly once, the same whatever the seed.

    Args:
        root: folder of the data, for every source but "embedded".
        frames: of a clip.
        fps: frames a second that clips are taken at; None: as they follow in the file, ``step``
            then being of its average rate.
        image_size: height and width in pixels; if None 32 for "embedded", 112 for files.
        views: clips of a video in evaluation, evenly from its beginning to its end, over which
            logits are averaged; 1 is the middle.
        file_fps: frames a second of files that do not tell theirs, such as bare H.264.
        order: ``shuffled`` puts the real frames of each clip in a random order, from ``split_seed``
            and its number, to show what a model makes of frames without their time.
        augmentation: of the pictures of files in training, see `Augmentation`.
        mean, std: what each channel is normalised by, of values in 0 … 1; by default those of the
            embedded clips for "embedded", ImageNet's for files.
        batch_size: videos of a batch in each process.
        num_workers: loader processes in each process; 0 loads in the process itself.
        train_samples: use so many training videos, of files as evenly over the classes as can be;
            all by default, of "embedded" one for each picture in each epoch.
        eval_samples: embedded clips of validation and test each.
        on_error: ``skip`` leaves out files that cannot be read, with one warning that counts and
            names them; decodes every file once beforehand. ``raise`` opens every file beforehand.
        predict_folder: files to predict, in any depth.
    """

    def __init__(
        self,
        source: Origin = "embedded",
        root: str | Path | None = None,
        frames: int = 16,
        fps: float | None = 8.0,
        image_size: int | tuple[int, int] | None = None,
        views: int = 1,
        file_fps: float | None = None,
        order: Order = "real",
        augmentation: Augmentation | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        batch_size: int = 32,
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
        for name, value, choices in (
            ("source", source, get_args(Origin)),
            ("order", order, get_args(Order)),
            ("on_error", on_error, ("raise", "skip")),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {choices}")
        embedded = source == "embedded"
        drawn = Augmentation(**augmentation) if isinstance(augmentation, Mapping) else augmentation
        if image_size is None:
            image_size = 32 if embedded else 112
        self.save_hyperparameters(ignore=["augmentation"])
        # what a model was trained on, whatever was left out, goes with its checkpoint
        self.hparams["image_size"] = image_size
        self.hparams["augmentation"] = None if drawn is None else asdict(drawn)
        self.source = source
        self.root = None if root is None else Path(root)
        self.frames, self.fps = frames, fps
        self.image_size, _ = sizes(image_size, None)
        self.views, self.file_fps = views, file_fps
        self.order: Order = order
        self.augmentation = drawn
        self.channels = 1 if embedded else 3
        self.mean = per_channel("mean", mean, GREY_MEAN if embedded else IMAGENET_DEFAULT_MEAN)
        self.std = per_channel("std", std, GREY_STD if embedded else IMAGENET_DEFAULT_STD)
        self.batch_size = batch_size
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
                f"root {self.root} is given, but the embedded clips need none; "
                "for videos of your own add --data.source folder"
            )
        if not embedded and self.root is None:
            raise ValueError(f"source {self.source} needs the folder of its data: --data.root PATH")
        if embedded and self.fps is None:
            raise ValueError("fps is null, but embedded clips have no rate of their own: give one")
        if embedded and self.augmentation is not None:
            raise ValueError(
                "augmentation is of videos in files, but the source is embedded: leave it out, or "
                "add --data.source folder"
            )
        for name in ("fps", "file_fps"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate <= 1e6:
                raise ValueError(f"{name} is {rate}; expected frames a second, above 0")
        least = {"frames": 1, "views": 1, "batch_size": 1, "num_workers": 0, "seed": 0}
        for name, bound in (least | {"split_seed": 0, "eval_samples": 1}).items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {bound}")
        if self.train_samples is not None and self.train_samples < 1:
            raise ValueError(f"train_samples is {self.train_samples}; expected at least 1")
        for name, unset in (("views", 1), ("file_fps", None), ("on_error", "raise")):
            if embedded and getattr(self, name) != unset:
                raise ValueError(
                    f"{name} is of videos in files, but the source is embedded: leave it out, or "
                    "add --data.source folder"
                )
        if not embedded or self.predict_folder is not None:
            library()

    @property
    def step(self) -> float | None:
        """Seconds from a frame to the next, if they are the same in all clips."""
        return None if self.fps is None else 1 / self.fps

    @property
    def classes(self) -> dict[str, list[str]]:
        """The answers to each question, in the order of labels."""
        if self.source == "embedded":
            return {question: list(names) for question, names in Motion.classes.items()}
        return {"class": self._found.classes}

    @functools.cached_property
    def _found(self) -> Found:
        assert self.root is not None
        read = video_sources.folder if self.source == "folder" else video_sources.table
        return read(self.root)

    def setup(self, stage: str | None = None) -> None:
        """Makes the data sets of ``stage`` ("fit", "validate", "test", "predict"; None: all that
        can be made).
        """
        if stage == "predict" or (stage is None and self.predict_folder is not None):
            self._data["predict"] = self._videos("predict", self._predicted())
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), None: SPLITS}
        needed = [split for split in splits.get(stage, ()) if split not in self._data]
        if not needed:
            return
        if self.source == "embedded":
            for split in needed:
                self._data[split] = self._videos(split, self._moving(split))
            return
        parts = video_sources.complete(self._found, self.split_seed)
        if self.train_samples is not None and "train" in needed:
            labels = np.array([video.label for video in parts["train"]])
            everything = np.arange(len(labels))
            chosen = balanced(labels, everything, self.train_samples, self.split_seed)
            parts["train"] = [parts["train"][index] for index in chosen]
        for split in needed:
            self._data[split] = self._videos(split, self._labelled(split, parts[split]))

    def _moving(self, split: Any) -> Moving:
        assert self.fps is not None
        training = split == "train"
        seconds: Any = self.frames / Fraction(str(self.fps))  # a float may miss a whole number
        motion = Motion(
            split,
            self.train_samples if training else self.eval_samples,
            self.image_size,
            self.fps,
            seconds,
            seed=self.seed if training else 0,
            split_seed=self.split_seed,
            mean=self.mean[0],
            std=self.std[0],
        )
        return Moving(motion)

    def _labelled(self, split: str, videos: list[Labelled]) -> Files:
        classes = self._found.classes if split == "train" else []
        kept = self._readable(videos, f" in {split}", classes)
        return self._files([v.path for v in kept], [v.label for v in kept], split == "train")

    def _predicted(self) -> Files:
        if self.predict_folder is None:
            raise ValueError("no videos to predict: give their folder, --data.predict_folder PATH")
        videos = [Labelled(path, 0) for path in video_files(self.predict_folder)]
        return self._files([video.path for video in self._readable(videos)])

    def _readable(
        self, videos: list[Labelled], where: str = "", classes: Sequence[str] = ()
    ) -> list[Labelled]:
        """Without what cannot be read, if it is to be skipped; else all are opened."""
        if self.on_error == "raise":
            for video in videos:
                check(video.path, self.file_fps)
            return videos
        broken = unreadable([video.path for video in videos], self.file_fps)
        return without_broken(
            videos, broken, lambda video: [video.label], what="video", where=where, classes=classes
        )

    def _files(
        self, paths: list[str], labels: list[int] | None = None, training: bool = False
    ) -> Files:
        return Files(
            paths,
            labels,
            Look(self.image_size, self.mean, self.std, self.augmentation),
            self.frames,
            self.fps,
            views=self.views,
            file_fps=self.file_fps,
            seed=self.seed if training else None,
        )

    def _videos(self, split: str, source: Files | Moving) -> Videos:
        stream = (*SPLITS, "predict").index(split)
        shuffle = (self.split_seed, stream) if self.order == "shuffled" else None
        return Videos(source, self.frames, shuffle)

    def too_few(self, data: Any, split: str, needed: int, processes: int) -> str:
        return (
            f"{len(data)} {split} videos are too few for {processes} processes with batches of "
            f"{self.batch_size}; give more videos, a smaller --data.batch_size or fewer devices"
        )

    def collate(self, data: Any) -> Any:
        return data.batch

    def predict_dataloader(self) -> DataLoader:
        return self.loader("predict")
