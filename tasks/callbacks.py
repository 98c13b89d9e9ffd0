"""Callbacks of the command: a table of predictions, settings in checkpoints, the first batch."""

import csv
import os
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

    Where a question has ``{"probabilities": FloatTensor[B, classes]}`` instead, each class has a
    column of its name.

    A language model's ``{"prompt": list[str], "text": list[str]}`` has these two columns.

    Raises: TypeError for predictions of another form; OSError for a path that cannot be written.
    """

    def __init__(self, path: str = "predictions.csv") -> None:
        super().__init__(write_interval="batch")
        self.path = Path(path)
        if self.path.is_dir():
            raise IsADirectoryError(f"predictions go to a file, {path} is a folder")
        above = next(part for part in self.path.absolute().parents if part.exists())
        there = self.path if self.path.exists() else above
        if not above.is_dir() or not os.access(there, os.W_OK):
            raise PermissionError(f"predictions cannot be written to {path}")
        self._rows: list[tuple[tuple[int, int], dict[str, str]]] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forgets an earlier call's rows."""
        self._rows = []

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
        if isinstance(prediction, dict) and prediction.keys() == {"prompt", "text"}:
            for row, prompt in enumerate(prediction["prompt"]):
                place = batch_indices[row] if batch_indices else len(self._rows)
                cells = {"prompt": prompt, "text": prediction["text"][row]}
                self._rows.append(((dataloader_idx, place), cells))
            return
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
                if "probabilities" in prediction[question]:
                    if "file" in names[question]:
                        raise ValueError(
                            "a class is called 'file', as the column of files is: rename it"
                        )
                    each = prediction[question]["probabilities"][row].tolist()
                    cells |= {n: f"{p:.6f}" for n, p in zip(names[question], each, strict=True)}
                    continue
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ["file"])
            writer.writeheader()
            writer.writerows(rows)


class RunSettings(Callback):
    """Records the trainer's and the command's own settings, such as the seed, in each checkpoint,
    so that a run can go on from it alone.
    """

    def __init__(self) -> None:
        self.trainer: dict[str, Any] = {}
        self.command: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds ``mmpos_trainer`` and ``mmpos_command``."""
        checkpoint["mmpos_trainer"] = self.trainer
        checkpoint["mmpos_command"] = self.command


class FirstBatch(Callback):
    """Notes whether the stage under way has done a batch, and whether training has."""

    def __init__(self) -> None:
        self.reached = self.trained = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins anew, as each stage does."""
        self.reached = False

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each step of training."""
        self.reached = self.trained = True

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After each batch of another stage."""
        self.reached = True

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end
