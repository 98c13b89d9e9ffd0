"""Callbacks of the command: a table of predictions, settings in checkpoints, the first batch."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter


class PredictionWriter(BasePredictionWriter):
    """Writes predictions to a CSV file: ``file``, then each question's answer and probability.

    ``predict_step`` gives ``{"file": list[str], question: {"label": LongTensor[B], "probability":
    FloatTensor[B]}, …}``; ``classes[question]`` of the
    model, else of the datamodule, name the labels. One question has
    the columns ``file, <question>, probability``; of several, each has ``<question>`` and
    ``<question>_probability``. Rows are in the order of the data set, each once, whatever the
    number of processes. Existing files are replaced.

    Raises: TypeError for predictions of another form.
    """

    def __init__(self, path: str = "predictions.csv") -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        self._rows: list[tuple[tuple[int, int], dict[str, str]]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier call's rows; a path that cannot be written fails before the work."""
        self._rows = []
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keeps a batch's rows with their places in the data set."""
        if not isinstance(prediction, dict) or "file" not in prediction:
            raise TypeError(
                "predictions.csv needs a predict_step that returns {'file': [...], question: "
                f"{{'label': ..., 'probability': ...}}}}, got {type(prediction).__name__}; for "
                "another form add a BasePredictionWriter of yours to trainer.callbacks"
            )
        names = getattr(pl_module, "classes", None) or trainer.datamodule.classes  # type: ignore
        questions = [key for key in prediction if key != "file"]
        for row, file in enumerate(prediction["file"]):
            place = batch_indices[row] if batch_indices else len(self._rows)
            cells = {"file": str(file)}
            for question in questions:
                label = int(prediction[question]["label"][row])
                probability = float(prediction[question]["probability"][row])
                column = "probability" if len(questions) == 1 else f"{question}_probability"
                cells |= {question: names[question][label], column: f"{probability:.6f}"}
            self._rows.append(((dataloader_idx, place), cells))

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Brings all processes' rows together; the first process writes them."""
        parts = [self._rows]
        if trainer.world_size > 1:
            parts = [[] for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(parts, self._rows)
        if not trainer.is_global_zero:
            return
        rows = [
            cells for _, cells in sorted((r for part in parts for r in part), key=lambda r: r[0])
        ]
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ["file"])
            writer.writeheader()
            writer.writerows(rows)


class RunSettings(Callback):
    """Records the trainer's settings in each checkpoint, so that a run can go on from it alone."""

    def __init__(self) -> None:
        self.trainer: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds ``mmpos_trainer``."""
        checkpoint["mmpos_trainer"] = self.trainer


class FirstBatch(Callback):
    """Notes that a first batch has reached the model: ``reached`` is True from then on."""

    def __init__(self) -> None:
        self.reached = False

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Before each step, of training or another stage."""
        self.reached = True

    on_validation_batch_start = on_train_batch_start  # type: ignore[assignment]
    on_test_batch_start = on_train_batch_start  # type: ignore[assignment]
    on_predict_batch_start = on_train_batch_start  # type: ignore[assignment]
