"""What a resumed run is found by and counts on; signals and queues at the edges."""

import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from mmpos.models import Transformer
from tasks import ImageClassification, cli, runs
from tasks.checkpoint_io import CheckpointIO
from tasks.configs import CommandError, Given
from tasks.data import Images
from tasks.resuming import Shares, rescale

IMAGE = ["fit", "--config", "image", "--data.image_size=16", "--data.patch_size=8"]
IMAGE += ["--data.train_samples=200", "--data.batch_size=50", "--model.transformer.depth=1"]
IMAGE += ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
IMAGE += ["--trainer.enable_model_summary=false", "--trainer.accelerator=cpu"]
IMAGE += ["--test_after_fit=false", "--trainer.limit_val_batches=1"]


class Losses(Callback):
    """Of all batches."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs: Any, batch, batch_idx) -> None:
        self.found.append(float(outputs["loss"]))


def noisy(folder: Path, start: Path | None = None, seed: int = 0, own: int | None = None) -> list:
    """Losses of a run that drops paths, of 6 steps of two batches; saved after each step."""
    L.seed_everything(seed, verbose=False)
    data = Images(image_size=16, patch_size=8, batch_size=16, train_samples=96)
    part = partial(Transformer, size="nano", depth=2, drop_path=0.5)  # the first layer drops none
    task = ImageClassification(
        data.classes, data.image_size, data.patch_size, data.channels, part, lr=0.0
    )
    draw = torch.Generator().manual_seed(0)
    for parameter in task.parameters():  # the same for all seeds
        parameter.data = torch.randn(parameter.shape, generator=draw) / 8
    task.seed = own
    losses = Losses()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[losses, saving],
        plugins=[CheckpointIO()],
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, datamodule=data, ckpt_path=start)
    return losses.found


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Be aware that when using")
def test_paths_are_dropped_as_if_the_run_had_not_stopped(tmp_path) -> None:
    """With other seeds in the process; a seed of the task's own decides."""
    whole, start = noisy(tmp_path / "run"), tmp_path / "run" / "step=2.ckpt"
    assert noisy(tmp_path / "again", start, seed=9) == whole[4:]
    assert noisy(tmp_path / "other", start, own=9) != whole[4:]
    assert noisy(tmp_path / "alone", seed=9) != whole
    assert noisy(tmp_path / "own", seed=9, own=0) == whole
    # what is not trained does not ask for whole batches
    data = Images(image_size=16, patch_size=8, batch_size=25)
    part = partial(Transformer, size="nano", depth=2)
    task = ImageClassification(data.classes, data.image_size, data.patch_size, 1, part)
    given: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(accelerator="cpu", limit_val_batches=1, **given)
    assert trainer.validate(task, datamodule=data, ckpt_path=start, verbose=False)


def test_after_a_fit_the_averages_of_its_checkpoint_are_measured(tmp_path) -> None:
    """Not the weights of its last step, which the checkpoint has beside them."""
    data = Images(image_size=16, patch_size=8, batch_size=16, train_samples=96)
    part = partial(Transformer, size="nano", depth=1)
    task = ImageClassification(data.classes, data.image_size, data.patch_size, 1, part, ema=0.9)
    given: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary"), False
    )
    given |= {"limit_val_batches": 1, "limit_test_batches": 1, "enable_model_summary": False}
    saving = ModelCheckpoint(tmp_path, filename="a")
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[saving], **given)
    trainer.fit(task, datamodule=data)
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert "WeightAveraging" in saved["callbacks"]  # as Lightning's own names it
    trainer.test(task, datamodule=data, ckpt_path=tmp_path / "a.ckpt", verbose=False)
    for name, value in task.state_dict().items():
        assert torch.equal(value, saved["state_dict"][name]), name
    last = saved["current_model_state"]
    assert any(not torch.equal(value, last[name]) for name, value in task.state_dict().items())


def told(capsys: pytest.CaptureFixture) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if "mmpos: error: " in line]
    (line,) = lines
    return line.removeprefix("mmpos: error: ")


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """Sends signals within the second step."""
    monkeypatch.chdir(tmp_path)
    kept = signal.getsignal(signal.SIGINT)

    def send(*numbers: int) -> None:
        def after(task: L.LightningModule, *_: Any) -> None:
            for number in numbers if task.global_step == 1 else ():
                os.kill(os.getpid(), number)

        monkeypatch.setattr(ImageClassification, "on_before_optimizer_step", after)

    yield send
    signal.signal(signal.SIGINT, kept)


def test_what_a_signal_saved_is_told_where_nothing_was_saved_before(sent, capsys) -> None:
    sent(signal.SIGTERM)
    assert cli.main(IMAGE) == 143
    last = "runs/image/version_0/checkpoints/last.ckpt"
    assert told(capsys) == f"stopped by SIGTERM; to go on: mmpos fit --ckpt_path {last}"
    assert torch.load(last, weights_only=True)["global_step"] == 2


@pytest.mark.parametrize(
    ("number", "works", "requeue", "asked"),
    [
        (signal.SIGINT, True, "true", False),
        (signal.SIGTERM, True, "false", False),
        (signal.SIGTERM, False, "true", True),
    ],
)
def test_when_a_job_is_not_put_back_into_the_queue(
    sent, monkeypatch, tmp_path, capsys, number, works, requeue, asked
) -> None:
    mark = tmp_path / "asked"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho no such job >&2\necho >> {mark}\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "NNODES": "1", "PROCID": "0", "LOCALID": "0"}
    slurm |= {"NODEID": "0", "JOB_NAME": "job", "JOB_ID": "1234", "NODELIST": "localhost"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    sent(number)
    plugin = "lightning.fabric.plugins.environments.SLURMEnvironment"
    job = [*IMAGE, f"--trainer.plugins={plugin}", f"--trainer.plugins.auto_requeue={requeue}"]
    status = 130 if number == signal.SIGINT else 143
    assert cli.main(job) == status
    line = "the job is not put back into the queue: no such job"
    assert (line in capsys.readouterr().err) != works
    assert mark.exists() == asked


def test_the_seed_of_noise_is_that_of_the_run_or_what_is_given(sent, monkeypatch) -> None:
    def note(task: L.LightningModule, *_: Any) -> None:
        seeds.append(cast("Any", task).seed)

    seeds: list[int] = []
    monkeypatch.setattr(ImageClassification, "on_train_end", note)
    assert cli.main([*IMAGE, "--seed_everything=7"]) == 0
    for more in ([], ["--seed_everything=8"]):
        on = ["fit", "--ckpt_path=last", f"--trainer.max_epochs={len(seeds) + 1}", *more]
        assert cli.main([*on, "--test_after_fit=false"]) == 0
    assert seeds == [7, 7, 8]


def test_a_job_number_that_is_none(monkeypatch, tmp_path, capsys) -> None:
    from tasks.preemption import _requeue

    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "--all")
    _requeue()
    assert "SLURM_JOB_ID is '--all', expected a number" in capsys.readouterr().err
    assert not (tmp_path / "asked").exists()


def test_a_trial_run_with_a_plugin_of_the_users_writes_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugin = "--trainer.plugins=lightning.pytorch.plugins.TorchCheckpointIO"  # one of the user's
    assert cli.main([*IMAGE, plugin, "--trainer.fast_dev_run=1"]) == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_metrics_of_all_starts_are_kept(tmp_path) -> None:
    for number in range(3):
        (tmp_path / "metrics.csv").write_text(str(number))
        runs.keep_metrics(tmp_path)
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {f"metrics.{number + 1}.csv": str(number) for number in range(3)}


def settings(**values: str) -> list[Given]:
    return [
        Given(f"trainer.{name.replace('__', '.')}", value, "") for name, value in values.items()
    ]


def test_where_the_last_checkpoint_is_looked_for(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = {"logger__save_dir": "runs", "logger__name": "job"}
    for place, given in {
        "elsewhere/a.ckpt": {**logger, "callbacks__dirpath": "elsewhere"},
        "root/lightning_logs/version_0/checkpoints/b.ckpt": {"default_root_dir": "root"},
        "runs/job/version_3/checkpoints/c.ckpt": {**logger, "logger__version": "3"},
        "runs/d.ckpt.old": {},
    }.items():
        with pytest.raises(CommandError, match="no last checkpoint to go on with"):
            runs.last(settings(**given), lambda line: None)
        content = {"pytorch-lightning_version": "2.6", "optimizer_states": []}
        CheckpointIO().save_checkpoint(content, place)
        assert runs.last(settings(**given), lambda line: None) == place
        Path(place).unlink()


def test_a_run_goes_on_in_its_own_folder_alone() -> None:
    own = settings(logger__save_dir="runs", logger__name="job")
    path = "runs/job/version_3/checkpoints/a.ckpt"
    assert runs.version(path, own) == "version_3"
    for other in ("runs/job/version_3/best/a.ckpt", "runs/else/version_3/checkpoints/a.ckpt"):
        assert runs.version(other, own) is None
    assert runs.version(path, [*own, *settings(logger__version="4")]) is None


def test_counts_of_a_run_in_other_batches() -> None:
    def checkpoint(ready: int, last: bool) -> dict[str, Any]:
        names = ("ready", "started", "processed", "completed")
        counts = {part: dict.fromkeys(names, ready + more) for part, more in PARTS.items()}
        progress = {**counts, "is_last_batch": last}
        loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
        return {"mmpos_shares": Shares(48)._asdict(), "loops": loops}

    PARTS = {"current": 0, "total": 5}
    for ready, last, samples, expected in [
        (2, False, 24, 4),
        (2, False, 32, 3),
        (2, False, 96, 1),
        (2, False, 48, 2),
        (2, False, None, 2),
    ]:
        stored = checkpoint(ready, last)
        rescale(stored, Shares(samples))
        progress = stored["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        assert set(progress["current"].values()) == {expected}
        total = (2 + PARTS["total"]) * 48 // (samples or 48)
        assert set(progress["total"].values()) == {total}
    stored = checkpoint(3, True)  # of 144 to 191 samples an epoch: none is left in any batches
    rescale(stored, Shares(16))
    progress = stored["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    assert progress["current"]["ready"] >= 191 // 16
    data = Images(batch_size=6)
    trainer = SimpleNamespace(datamodule=data, world_size=4)
    assert Shares.of(cast("L.Trainer", trainer)) == (24, None, None)
    trainer.datamodule = SimpleNamespace(batch_size=6)  # of a user's own
    assert Shares.of(cast("L.Trainer", trainer)) == (None, None, None)


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        (Shares(32, None, 4), Shares(16, None, 4), "4 buckets of 32 .* now there are 4 of 16"),
        (Shares(32, None, None), Shares(32, None, 4), "None buckets of 32 .* 4 of 32"),
        (
            Shares(8, (2, 1)),
            Shares(8, (1, 1)),
            "2 processes with 1 loader .* now there are 1 with 1",
        ),
        (Shares(8, (1, 0)), Shares(8, (1, 2)), "1 processes with 0 loader .* 1 with 2"),
        (
            Shares(8, (1, 0)),
            Shares(10, (1, 0)),
            "saved 24 samples into the stream, in batches of 8",
        ),
    ],
)
def test_orders_that_nothing_goes_on_with(then: Shares, now: Shares, why: str) -> None:
    counts = dict.fromkeys(("ready", "started", "processed", "completed"), 3)
    progress = {"current": counts, "total": dict(counts), "is_last_batch": False}
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    stored = {"mmpos_shares": then._asdict(), "loops": loops}
    with pytest.raises(ValueError, match=why):
        rescale(stored, now)
    rescale({**stored, "mmpos_shares": now._asdict()}, now)
    assert set(counts.values()) == {3}
