from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from mmpos.models.classifier import check_questions
from tasks.base import Task
from tasks.metrics import MeanAveragePrecision

Inputs = Tensor | tuple[Tensor, ...]
"""What the network takes: one tensor, or several, such as `tasks.data.padding.Padded`."""
Labels = dict[str, Tensor]
Batch = tuple[Inputs, Labels | Tensor]


class Classification(Task):
    """What tasks share that answer one or more questions about an input.

    A subclass sets ``self.network``, which gives the logits ``[B, answers]`` of each question, and
    has a ``forward`` that takes what is in `Inputs`. A batch is ``(inputs, labels)``, labels a dict
    of ``[B]`` by question, or a tensor if there is one question. Logs ``train/loss``, and ``loss``
    and ``<question>_accuracy`` of validation and test, exact over all processes.

    If inputs are ``multilabel``, each has any number of the classes of a single question: labels
    are 0 and 1 ``[B, classes]``, the loss is the mean of binary cross entropies, and in place of
    accuracy ``mAP`` is logged, the mean of the average precision of classes that occur.

    Args:
        classes: the answers to each question, in the order of labels; a list of names for a single
            question, ``class``.
        multilabel: whether an input has any number of classes.
        label_smoothing: the share of a label that is spread over all answers (arXiv:1512.00567,
            sec. 7), in training only; ``train/loss`` has it.
        lr, weight_decay, warmup, weights, leave_out, ema, layer_decay, freeze: see `Task`.

    Raises: ValueError for a question with fewer than two answers, or for several, or smoothing, if
    inputs are multilabel; in a step, for labels that are none of the answers.
    """

    def __init__(
        self,
        classes: Mapping[str, Sequence[str]] | Sequence[str],
        *,
        multilabel: bool = False,
        label_smoothing: float,
        lr: float,
        weight_decay: float,
        warmup: float,
        weights: str | PathLike | None,
        leave_out: Sequence[str],
        ema: float | None,
        layer_decay: float | None,
        freeze: Sequence[str],
    ) -> None:
        super().__init__(
            lr=lr,
            weight_decay=weight_decay,
            warmup=warmup,
            weights=weights,
            leave_out=leave_out,
            ema=ema,
            layer_decay=layer_decay,
            freeze=freeze,
        )
        self.classes = dict(classes) if isinstance(classes, Mapping) else {"class": list(classes)}
        for question, answers in self.classes.items():
            if len(answers) < 2 - multilabel:
                raise ValueError(f"question {question!r} needs two answers or more, got {answers}")
            if twice := [name for name, count in Counter(answers).items() if count > 1]:
                raise ValueError(f"question {question!r} has the answer {twice[0]!r} twice")
        check_questions(self.questions)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is a share below 1, got {label_smoothing}")
        if multilabel and (len(self.classes) > 1 or label_smoothing):
            raise ValueError(
                "inputs with any number of classes take one question and no label_smoothing, got "
                f"{', '.join(self.classes)} and {label_smoothing}"
            )
        self.label_smoothing = label_smoothing
        self.multilabel = multilabel
        with torch.device("cpu"):  # whatever the weights are made on
            self.metrics = nn.ModuleDict(
                {stage: nn.ModuleDict(self._new_metrics()) for stage in ("val", "test")}
            )

    def _new_metrics(self) -> dict[str, nn.Module]:
        if self.multilabel:
            (answers,) = self.questions.values()
            return {"loss": MeanMetric(), "mAP": MeanAveragePrecision(answers)}
        accuracies = {
            f"{question}_accuracy": MulticlassAccuracy(len(answers), average="micro")
            for question, answers in self.classes.items()
        }
        return {"loss": MeanMetric(), **accuracies}

    @property
    def questions(self) -> dict[str, int]:
        """How many answers each question has."""
        return {question: len(answers) for question, answers in self.classes.items()}

    def for_training(self, inputs: Inputs, targets: Labels) -> tuple[Inputs, Labels]:
        """What a training step learns from, for a subclass to change; as it is by default."""
        return inputs, targets

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, labels = self.changed(batch)
        inputs, targets = self.for_training(inputs, self._labels(labels, batch_idx))
        loss = self._loss(self._logits(inputs), targets, self.label_smoothing)
        self.log_loss(loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    def predict_step(self, batch: tuple[Inputs, list[str]], batch_idx: int) -> dict[str, Any]:
        """The likeliest answer to each question, and its probability, beside the file names; of
        multilabel inputs the probability of each class.
        """
        inputs, files = batch
        answers: dict[str, Any] = {"file": files}
        for question, logits in self._logits(inputs).items():
            if self.multilabel:
                answers[question] = {"probabilities": logits.float().sigmoid()}
                continue
            probability, label = logits.float().softmax(-1).max(-1)
            answers[question] = {"label": label, "probability": probability}
        return answers

    def _logits(self, inputs: Inputs) -> dict[str, Tensor]:
        return self(inputs) if isinstance(inputs, Tensor) else self(*inputs)

    def _evaluate(self, batch: Batch, batch_idx: int, stage: str) -> None:
        inputs, labels = batch
        labels = self._labels(labels, batch_idx)
        logits = self._logits(inputs)
        size = len(next(iter(labels.values())))
        metrics = cast("dict[str, Metric]", self.metrics[stage])
        metrics["loss"].update(self._loss(logits, labels), size)
        for question, answers in logits.items():
            if self.multilabel:
                metrics["mAP"].update(answers, labels[question].long())
            else:
                metrics[f"{question}_accuracy"].update(answers, labels[question])
        for name in metrics:  # objects, which Lightning computes over all processes
            show = name != "loss"
            self.log(f"{stage}/{name}", metrics[name], prog_bar=show, batch_size=size)

    def _loss(
        self, logits: dict[str, Tensor], targets: dict[str, Tensor], smoothing: float = 0.0
    ) -> Tensor:
        if self.multilabel:
            ((question, answers),) = logits.items()
            return binary_cross_entropy_with_logits(answers, targets[question].to(answers.dtype))
        losses = [
            cross_entropy(answers, targets[question], label_smoothing=smoothing)
            for question, answers in logits.items()
        ]
        return torch.stack(losses).sum()

    def _labels(self, labels: Labels | Tensor, batch_idx: int) -> Labels:
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
            if self.multilabel:
                self._check_rows(label)
                continue
            lowest, highest = int(label.min()), int(label.max())
            answers = len(self.classes[question])
            if lowest < 0 or highest >= answers:
                wrong = lowest if lowest < 0 else highest
                raise ValueError(
                    f"the data has a label {wrong} for {question!r}, the model has {answers} "
                    "answers, from 0 on: give the model the classes of the data"
                )
        return named

    def _check_rows(self, rows: Tensor) -> None:
        (answers,) = self.questions.values()
        if rows.ndim != 2 or rows.shape[1] != answers or not ((rows == 0) | (rows == 1)).all():
            raise ValueError(
                f"labels of multilabel inputs are 0 and 1 [batch, {answers}], got a tensor "
                f"{tuple(rows.shape)}: give the model the classes of the data"
            )
