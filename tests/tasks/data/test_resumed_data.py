"""Runs that stop within an epoch go on with the batches that would have come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from tasks.data import LabelledText, Text


class Recorder(L.LightningModule):
    """Trains nothing: ``seen`` lists all tensors of each training batch; after ``stop`` of them, if
    given, the run ends with a checkpoint at ``path``.
    """

    def __init__(self, stop: int | None = None, path: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list] = []
        self.stop, self.path = stop, path

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tensors = batch.values() if isinstance(batch, dict) else (*batch[0], *batch[1].values())
        self.seen.append([tensor.tolist() for tensor in tensors])
        return self.weight * 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Sees nothing."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(self.seen) == self.stop:
            assert self.path is not None
            self.trainer.save_checkpoint(self.path)
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def recorded(
    data: L.LightningDataModule,
    *,
    stop: int | None = None,
    path: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> list[list]:
    """What a run sees, from ``resume`` on if given, until it stops or ends."""
    quiet: Any = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    given = {"limit_val_batches": 0, "enable_checkpointing": False, **quiet, **options}
    task = Recorder(stop, path)
    L.Trainer(accelerator="cpu", devices=1, **given).fit(task, datamodule=data, ckpt_path=resume)
    return task.seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of 60 texts of 1 to 80 bytes each."""
    draw = np.random.default_rng(1)
    for name in ("ant", "bee"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for number in range(60):
            text = bytes(draw.integers(65, 90, size=int(draw.integers(1, 80))).tolist())
            (tmp_path / "texts" / name / f"{number}.txt").write_bytes(text)
    return tmp_path / "texts"


@pytest.fixture
def make(root: Path) -> Callable[..., Any]:
    def buckets(**options: Any) -> LabelledText:
        given = {"context": 64, "batch_size": 6, "buckets": 4, **options}
        return LabelledText("files", root, **given)

    def stream(**options: Any) -> Text:
        given = {"context": 16, "batch_size": 3, "streaming": True, **options}
        return Text("files", root, **given)

    def of(kind: str, **options: Any) -> Any:
        return {"buckets": buckets, "stream": stream}[kind](**options)

    return of


EPOCH = 17  # batches; the classes have 51 training texts each
KINDS = {"buckets": {"max_epochs": 3}, "stream": {"max_epochs": 3, "limit_train_batches": EPOCH}}
KINDS["steps"] = {"max_steps": 3 * EPOCH}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_sees_the_batches_to_come(
    make: Callable[..., Any], tmp_path: Path, kind: str, workers: int
) -> None:
    def fit(**options: Any) -> list[list]:
        data = make(kind.replace("steps", "stream"), num_workers=workers)
        return recorded(data, **KINDS[kind], **options)

    whole, path = fit(), tmp_path / "stopped.ckpt"
    count = len(whole)
    epoch = count // 3
    assert count == 3 * epoch and len({str(batch) for batch in whole}) == count
    for stop in (4, epoch + 5, 2 * epoch):
        assert fit(stop=stop, path=path) == whole[:stop]
        assert fit(resume=path) == whole[stop:]


def test_epochs_of_a_stream_go_on_without_reading_again(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read(path))
    one = recorded(make("stream"), max_steps=18)
    count = len(opened)
    assert one == recorded(make("stream"), max_epochs=6, limit_train_batches=3)
    assert one == recorded(
        make("stream"), max_epochs=3, max_steps=9, limit_train_batches=6, accumulate_grad_batches=2
    )
    assert len(opened) == 3 * count
