"""Which weights a run begins with, goes on with and measures: starting ones, averages, those of a
checkpoint.
"""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import mmpos
from mmpos.frequencies import PositionInterpolation, YaRN
from mmpos.models import Transformer
from tasks import LanguageModel

CONTEXT = 8
ENCODER = partial(Transformer, size="nano", depth=1, causal=True, rotary=mmpos.RotaryEncoding)

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .*_dataloader' does not have many workers", "ignore:Be aware that when using"
)


def make(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(9, CONTEXT, ENCODER, **{"lr": 1e-2, "warmup": 0.0} | options)


def batches(count: int = 4, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        tokens = torch.randint(9, (2, CONTEXT + 1), generator=draw)
        rows.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "positions": torch.arange(CONTEXT)[:, None].expand(2, -1, -1),
                "segments": torch.zeros(2, CONTEXT, dtype=torch.long),
            }
        )
    return DataLoader(rows, batch_size=None)


def trainer(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2} | options,
    )


def loss(run: L.Trainer, stage: str, task: LanguageModel, ckpt_path: str | None = None) -> float:
    measure = run.test if stage == "test" else run.validate
    (found,) = measure(task, batches(seed=9), ckpt_path=ckpt_path, verbose=False)
    return found[f"{stage if stage == 'test' else 'val'}/loss"]


@pytest.mark.parametrize("stage", ["test", "validate"])
def test_the_trainer_of_a_fit_measures_the_averages_of_each_checkpoint(stage, tmp_path):
    task = make(ema=0.9)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = trainer(tmp_path, callbacks=[saved])
    run.fit(task, batches(), batches(seed=1))
    found = []
    for step in (3, 8):
        path = str(tmp_path / f"step={step}.ckpt")
        wanted, raw = make(), make()
        content = torch.load(path, weights_only=True)
        wanted.load_state_dict(content["state_dict"])
        raw.load_state_dict(content["current_model_state"])
        found.append(loss(run, stage, task, path))
        assert found[-1] == loss(trainer(tmp_path), stage, make(), path)
        assert found[-1] == pytest.approx(loss(trainer(tmp_path), stage, wanted), rel=1e-6)
        assert found[-1] != pytest.approx(loss(trainer(tmp_path), stage, raw), rel=1e-4)
    assert found[0] != pytest.approx(found[1], rel=1e-4)


def test_weights_that_a_checkpoint_began_with_are_not_laid_over_it(tmp_path):
    start = tmp_path / "start.pt"
    torch.save(make().state_dict(), start)
    task = make(weights=start)
    run = trainer(tmp_path)
    run.fit(task, batches(), batches(seed=1))
    path = str(run.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    wanted = loss(trainer(tmp_path), "test", task)
    loaded = LanguageModel.load_from_checkpoint(path, transformer=ENCODER)
    assert loss(trainer(tmp_path), "test", loaded) == wanted
    start.unlink()  # what they were is in the checkpoint
    loaded = LanguageModel.load_from_checkpoint(path, transformer=ENCODER)
    assert loss(trainer(tmp_path), "test", loaded) == wanted


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_replaces_starting_weights_and_its_path_is_forgotten(tmp_path):
    start = tmp_path / "start.pt"
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.save(other.state_dict(), start)
    first = make()
    run = trainer(tmp_path / "first")
    run.fit(first, batches(), batches(seed=1))
    path = str(run.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    resumed = [make(), make(weights=start)]
    for task in resumed:
        longer = trainer(tmp_path / "next", max_epochs=3)
        longer.fit(task, batches(), batches(seed=1), ckpt_path=path)
    torch.testing.assert_close(*(dict(task.state_dict()) for task in resumed), rtol=0, atol=0)
    # a trainer that measured a checkpoint before begins a run as a new one does
    assert run.test(first, batches(), ckpt_path=path, verbose=False)
    begun = make(weights=start, lr=0.0, weight_decay=0.0)
    run.fit(begun, batches(), batches(seed=1))
    torch.testing.assert_close(dict(begun.network.state_dict()), dict(other.network.state_dict()))


def test_an_extension_given_in_python_is_in_the_checkpoint(tmp_path):
    """Also where it is of a transformer that a checkpoint does not hold; another one given wins."""
    yarn = YaRN(factor=4, original_length=CONTEXT)
    task = make(extension=yarn)
    run = trainer(tmp_path)
    run.fit(task, batches(), batches(seed=1))
    path = str(run.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    tokens = torch.randint(9, (2, 64), generator=torch.Generator().manual_seed(0))
    loaded = LanguageModel.load_from_checkpoint(path, transformer=ENCODER)
    assert loaded.extension == yarn
    with torch.no_grad():
        wanted = task.eval()(tokens)
        torch.testing.assert_close(loaded.eval()(tokens), wanted)
        other = make()
        loss(trainer(tmp_path), "test", other, path)
        torch.testing.assert_close(other.eval()(tokens), wanted)
        pi = PositionInterpolation(factor=2)
        own = LanguageModel.load_from_checkpoint(path, transformer=ENCODER, extension=pi).eval()
        assert own.extension == pi and not torch.allclose(own(tokens), wanted, atol=1e-3)
    again = trainer(tmp_path)
    again.fit(other.train(), batches(), batches(seed=1))  # records what it took
    path = str(again.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    assert torch.load(path, weights_only=True)["mmpos_extension"] == yarn.spec()
