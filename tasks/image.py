from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from timm.data.mixup import Mixup
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from mmpos.interop.timm.backbone import blank
from mmpos.models import BackboneClassifier, Classifier, PatchEmbedding, Transformer
from mmpos.models.classifier import Pool
from tasks.classification import Classification, Inputs, Labels


class ImageClassification(Classification):
    """Train a transformer to answer one or more questions about an image.

    A batch is ``(images [B, C, H, W], labels)``, labels a dict of ``[B]`` by question, or a tensor
    if there is one question. Logs ``train/loss``, and ``loss`` and ``<question>_accuracy`` of
    validation and test, exact over all processes.

    Args:
        classes: the answers to each question, in the order of labels; a list of names for a single
            question, ``class``.
        image_size: height and width in pixels; with ``patch_size`` it gives the training grid.
        patch_size: height and width of a patch in pixels; a backbone has its own.
        channels: of an image.
        transformer: makes the transformer from its grid, such as the class `Transformer` itself.
        backbone: in place of a transformer, makes any module from image size and channels: it has
            ``dim``, maps images to features ``[B, dim]``, and tells its layers and what is not
            decayed by ``group_matcher(coarse)`` and ``no_weight_decay()``, as timm's models do.
        pool: ``mean`` over patches, or the class ``token``; a backbone pools by itself.
        label_smoothing: the share of a label that is spread over all answers (arXiv:1512.00567,
            sec. 7).
        mixup: alpha of mixing images and labels in pairs (arXiv:1710.09412); 0 is none.
        cutmix: alpha of pasting a part of one image into another (arXiv:1905.04899); 0 is none.
            With both, a batch has one or the other.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Smoothing and mixing are for training only; ``train/loss`` has them.

    Raises: TypeError without a transformer or backbone, or with both; ValueError for an image that
    patches do not divide, a question with fewer than two answers, or mixing images with several
    questions or in odd batches.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        image_size: Sequence[int],
        patch_size: Sequence[int] | None = None,
        channels: int = 3,
        transformer: Callable[[Sequence[int]], Transformer] | None = None,
        *,
        backbone: Callable[[Sequence[int], int], nn.Module] | None = None,
        pool: Pool = "mean",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.1,
        weights: str | PathLike | None = None,
        leave_out: Sequence[str] = (),
        ema: float | None = None,
        layer_decay: float | None = None,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__(
            classes,
            label_smoothing=label_smoothing,
            lr=lr,
            weight_decay=weight_decay,
            warmup=warmup,
            weights=weights,
            leave_out=leave_out,
            ema=ema,
            layer_decay=layer_decay,
            freeze=freeze,
        )
        weights = None if weights is None else str(weights)  # plain data for the checkpoint
        self.save_hyperparameters()
        objects = [n for n in ("transformer", "backbone") if callable(self.hparams.get(n))]
        if objects:
            # Given from Python, where it cannot be stored as plain data in a checkpoint.
            self.save_hyperparameters(ignore=objects)
        if transformer is not None and backbone is not None:
            raise TypeError(
                "ImageClassification takes a transformer or a backbone, got both: set one to null"
            )
        if backbone is not None:
            if pool != "mean":
                raise ValueError(f"a backbone pools by itself: leave pool out, got {pool!r}")
            with nullcontext() if weights is None else blank():
                made = backbone(tuple(image_size), channels)
            self.network = BackboneClassifier(made, self.questions)
        else:
            self.network = _classifier(
                image_size, patch_size, channels, transformer, self.questions, pool
            )
        self.mixing = _mixing(mixup, cutmix, self.questions) if mixup or cutmix else None

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The logits of each question."""
        return self.network(images)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the backbone as one that needs no weights of its own: they are in here."""
        super().on_save_checkpoint(checkpoint)
        settings = checkpoint.get("hyper_parameters", {})
        recorded = settings.get("backbone")
        if isinstance(recorded, Mapping) and "init_args" in recorded:
            made = dict(recorded["init_args"])
            for name in ("pretrained", "weights"):
                made.pop(name, None)
            settings["backbone"] = {**recorded, "init_args": made}

    def on_fit_start(self) -> None:
        """Warn where images are normalised otherwise than the backbone's weights know them."""
        super().on_fit_start()
        data = getattr(self.trainer, "datamodule", None)
        config = getattr(getattr(self._backbone, "model", None), "pretrained_cfg", None) or {}
        for name in ("mean", "std"):
            own, known = getattr(data, name, None), config.get(name)
            if own and known and len(own) == len(known) and tuple(own) != tuple(known):
                rank_zero_warn(
                    f"images are normalised by {name} {list(own)}, and pretrained weights of this "
                    f'backbone know {list(known)}: --data.{name} "{list(known)}"'
                )

    @property
    def _backbone(self) -> nn.Module | None:
        return getattr(self.network, "backbone", None)

    def on_train_start(self) -> None:
        """Refuse to mix odd batches, as far as a loader tells their size."""
        super().on_train_start()
        loader = self.trainer.train_dataloader
        if self.mixing is None or not isinstance(loader, DataLoader) or loader.batch_size is None:
            return
        self._check_even(loader.batch_size)
        if not isinstance(loader.dataset, IterableDataset) and not loader.drop_last:
            batches, rest = divmod(len(loader.sampler), loader.batch_size)  # type: ignore[arg-type]
            if self.trainer.num_training_batches > batches:
                self._check_even(rest)

    def for_training(self, inputs: Inputs, targets: Labels) -> tuple[Inputs, Labels]:
        """Images mixed in pairs, if they are."""
        if self.mixing is None:
            return inputs, targets
        assert isinstance(inputs, Tensor)
        return self._mixed(self.mixing, inputs, targets)

    def _mixed(
        self, mix: Mixup, images: Tensor, labels: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Images mixed in pairs, and the shares of their labels."""
        self._check_even(len(images))
        ((question, label),) = labels.items()
        with isolate_rng(include_cuda=False):  # timm draws from numpy's generator
            np.random.seed(int(torch.randint(2**32, ())))  # of this step, as torch is seeded
            mixed, shares = mix(images.clone(), label)
        return mixed, {question: shares}

    def _check_even(self, size: int) -> None:
        if size % 2:
            raise ValueError(
                f"mixup and cutmix mix images in pairs, and a batch has {size}: choose an even "
                "--data.batch_size, and leave out an odd rest (drop_last)"
            )


def _classifier(
    image_size: Sequence[int],
    patch_size: Sequence[int] | None,
    channels: int,
    transformer: Callable[[Sequence[int]], Transformer] | None,
    questions: Mapping[str, int],
    pool: Pool,
) -> Classifier:
    if transformer is None or patch_size is None:
        missing = "transformer" if transformer is None else "patch_size"
        raise TypeError(
            f"ImageClassification is missing 1 required positional argument: {missing!r} (or a "
            "backbone in its place; a checkpoint does not hold one that was made in Python)"
        )
    if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
        raise ValueError(
            f"an image of {tuple(image_size)} cannot be cut into patches of {tuple(patch_size)}"
        )
    grid = tuple(size // patch for size, patch in zip(image_size, patch_size, strict=True))
    encoder = transformer(grid)
    tokens = PatchEmbedding(encoder.dim, patch_size, channels)
    return Classifier(tokens, encoder, questions, pool=pool)


def _mixing(mixup: float, cutmix: float, questions: Mapping[str, int]) -> Mixup:
    if not (0 <= mixup < math.inf and 0 <= cutmix < math.inf):
        raise ValueError(f"mixup and cutmix are 0 or more and finite, got {mixup} and {cutmix}")
    if len(questions) > 1:
        raise ValueError(
            f"mixup and cutmix need a single question, the data has {', '.join(questions)}"
        )
    (answers,) = questions.values()
    return Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=answers)
