"""A step over several batches is that over one with the samples of all."""

import runpy
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor

JOBS = runpy.run_path(str(Path(__file__).with_name("small_jobs.py")))


def fit(name: str, folder: Path, batch: int, batches: int) -> dict[str, Tensor]:
    task, data = JOBS["job"](name, batch, folder)
    trainer = L.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=2,
        accumulate_grad_batches=batches,
        gradient_clip_val=0.5,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == 2 * 5
    return dict(task.network.state_dict())


@pytest.mark.parametrize("name", ["algorithm", "text", "image", "multimodal"])
def test_so_it_is_for_a_task(name: str, tmp_path: Path) -> None:
    """Also where batches have other numbers of targets (algorithm), or other lengths."""
    whole = fit(name, tmp_path, 32, 1)
    for key, value in fit(name, tmp_path, 8, 4).items():
        torch.testing.assert_close(value, whole[key], atol=1e-6, rtol=0, msg=key)
