from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from mmpos.models import Classifier, PatchEmbedding, Transformer
from mmpos.models.classifier import Pool
from tasks.base import Task

Batch = tuple[Tensor, dict[str, Tensor] | Tensor]


class ImageClassification(Task):
    """Train a transformer to answer one or more questions about an image.

    A batch is ``(images [B, C, H, W], labels)``, labels a dict of ``[B]`` by question, or a tensor
    if there is one question. Logs ``train/loss``, and ``loss`` and ``<question>_accuracy`` of
    validation and test, exact over all processes.

    Args:
        classes: the answers to each question, in the order of labels; a list of names for a single
            question, ``class``.
        image_size: height and width in pixels; with ``patch_size`` it gives the training grid.
        patch_size: height and width of a patch in pixels.
        channels: of an image.
        transformer: makes the transformer from its grid, such as the class `Transformer` itself.
        pool: ``mean`` over patches, or the class ``token``.
        lr, weight_decay, warmup, weights, leave_out, ema: see `Task`.

    Raises: ValueError for an image that patches do not divide, or a question with fewer than two
    answers.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        image_size: Sequence[int],
        patch_size: Sequence[int],
        channels: int,
        transformer: Callable[[Sequence[int]], Transformer],
        *,
        pool: Pool = "mean",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup: float = 0.1,
        weights: str | PathLike | None = None,
        leave_out: Sequence[str] = (),
        ema: float | None = None,
    ) -> None:
        super().__init__(
            lr=lr,
            weight_decay=weight_decay,
            warmup=warmup,
            weights=weights,
            leave_out=leave_out,
            ema=ema,
        )
        weights = None if weights is None else str(weights)  # plain data for the checkpoint
        self.save_hyperparameters()
        if callable(self.hparams.get("transformer")):
            # Given from Python, where it cannot be stored as plain data in a checkpoint.
            self.save_hyperparameters(ignore=["transformer"])
        self.classes = dict(classes) if isinstance(classes, Mapping) else {"class": list(classes)}
        for question, answers in self.classes.items():
            if len(answers) < 2:
                raise ValueError(f"question {question!r} needs two answers or more, got {answers}")
        if any(size % patch for size, patch in zip(image_size, patch_size, strict=True)):
            raise ValueError(
                f"an image of {tuple(image_size)} cannot be cut into patches of {tuple(patch_size)}"
            )
        grid = tuple(size // patch for size, patch in zip(image_size, patch_size, strict=True))
        encoder = transformer(grid)
        self.network = Classifier(
            PatchEmbedding(encoder.dim, patch_size, channels),
            encoder,
            {question: len(answers) for question, answers in self.classes.items()},
            pool=pool,
        )
        self.metrics = nn.ModuleDict(
            {stage: nn.ModuleDict(self._new_metrics()) for stage in ("val", "test")}
        )

    def _new_metrics(self) -> dict[str, nn.Module]:
        accuracies = {
            f"{question}_accuracy": MulticlassAccuracy(len(answers), average="micro")
            for question, answers in self.classes.items()
        }
        return {"loss": MeanMetric(), **accuracies}

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The logits of each question."""
        return self.network(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = self.changed(batch)
        loss = self._loss(self(images), self._labels(labels, batch_idx))
        self.log("train/loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> dict[str, Any]:
        """The likeliest answer to each question, and its probability, beside the file names."""
        images, files = batch
        answers: dict[str, Any] = {"file": files}
        for question, logits in self(images).items():
            probability, label = logits.float().softmax(-1).max(-1)
            answers[question] = {"label": label, "probability": probability}
        return answers

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str) -> None:
        images, labels = batch
        labels = self._labels(labels, batch_idx)
        logits = self(images)
        metrics = cast("dict[str, Metric]", self.metrics[stage])
        metrics["loss"].update(self._loss(logits, labels), len(images))
        for question, answers in logits.items():
            metrics[f"{question}_accuracy"].update(answers, labels[question])
        for name in metrics:  # objects, which Lightning computes over all processes
            show = name != "loss"
            self.log(f"{stage}/{name}", metrics[name], prog_bar=show, batch_size=len(images))

    def _loss(self, logits: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
        losses = [cross_entropy(logits[question], labels[question]) for question in logits]
        return torch.stack(losses).sum()

    def _labels(self, labels: dict[str, Tensor] | Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Labels by question, checked: in each batch on the CPU, elsewhere in the first alone,
        since looking costs a wait.
        """
        named = labels if isinstance(labels, dict) else {next(iter(self.classes)): labels}
        if batch_idx and self.device.type != "cpu":
            return named
        if named.keys() != self.classes.keys():
            raise ValueError(
                f"the model was made for the questions {sorted(self.classes)}, "
                f"the data answers {sorted(named)}"
            )
        for question, label in named.items():
            lowest, highest = int(label.min()), int(label.max())
            answers = len(self.classes[question])
            if lowest < 0 or highest >= answers:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"the data has a label {wrong} for {question!r}, the model has {answers} "
                    "answers, from 0 on: give the model the classes of the data"
                )
        return named
