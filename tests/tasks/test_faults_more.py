"""Two processes: steps that leave encodings idle, bad losses, noise and signals; paces; files."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.checkpoint.state_dict_saver import save

import mmpos
from mmpos.models import Transformer
from tasks import ImageClassification, checkpoint_io, checkpoints, progress
from tasks.checkpoint_io import CheckpointIO
from tasks.data import Images
from tasks.preemption import Preemption
from tasks.progress import Progress
from tasks.shards import check_shards

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")
BATCH = 8


class Watch(Callback):
    """Writes what each process draws in its steps and how it ends; ``does`` something after one."""

    def __init__(self, folder: Path, does: Callable = lambda trainer: None) -> None:
        self.folder, self.does = folder, does
        self.drawn: list[float] = []

    def setup(self, trainer, pl_module: Any, stage) -> None:
        pl_module.batch_changes.append(self._draw)

    def _draw(self, batch: Any) -> Any:
        self.drawn.append(float(torch.rand(())))
        return batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.does(trainer)

    def ended(self, trainer: L.Trainer, how: str) -> None:
        """The first that ends has the others killed: so none does before all are here."""
        logged = {} if how else trainer.callback_metrics  # a collective call
        own = {
            "how": how,
            "step": trainer.global_step,
            "drawn": self.drawn,
            "metrics": {name: float(value) for name, value in logged.items()},
            "grad": [p.grad is not None for p in trainer.lightning_module.parameters()],
        }
        part = self.folder / f"{trainer.global_rank}.part"
        torch.save(own, part)
        part.rename(part.with_suffix(".pt"))
        end = time.monotonic() + 20
        while len(list(self.folder.glob("*.pt"))) < trainer.world_size and time.monotonic() < end:
            time.sleep(0.01)


def fit(
    folder: Path,
    processes: int,
    *callbacks: Callback,
    does: Callable = lambda trainer: None,
    change: Callable[[Any], None] = lambda network: None,
    seed: int = 0,
    **options: Any,
) -> list[SimpleNamespace]:
    """What each process of a small run wrote."""
    folder.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    data = Images(image_size=16, patch_size=8, batch_size=BATCH, train_samples=96)
    part = partial(Transformer, size="nano", depth=1, rotary=mmpos.RotaryEncoding)
    task = ImageClassification(data.classes, data.image_size, data.patch_size, data.channels, part)
    change(task.network)
    strategy = DDPStrategy(
        start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=20)
    )
    given: dict[str, Any] = {"max_steps": 3, "enable_checkpointing": False, "limit_val_batches": 0}
    watch = Watch(folder, does)
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=processes,
        strategy=strategy if processes > 1 else "auto",
        callbacks=[watch, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**given, **options},
    )
    run = trainer.fit_loop.run

    def watched() -> None:
        try:
            run()
        except BaseException as error:
            watch.ended(trainer, f"{type(error).__name__}: {error}")
            raise RuntimeError("so that the launcher does not wait") from error
        watch.ended(trainer, "")

    trainer.fit_loop.run = watched  # type: ignore[method-assign]
    with suppress(Exception):  # the launcher's words for what is in the files
        trainer.fit(task, datamodule=data)
    torch.set_num_threads(threads)
    return [SimpleNamespace(**torch.load(folder / f"{rank}.pt")) for rank in range(processes)]


@forks
def test_encodings_that_a_step_does_not_use_take_part_in_it(tmp_path: Path) -> None:
    """Else processes wait for their gradients."""

    def add(network: Any) -> None:
        network.idle = mmpos.LearnedEncoding(8, (4, 4))
        network.rests = mmpos.LearnedEncoding(8, (4, 4)).requires_grad_(False)

    for found in fit(tmp_path / "run", 2, change=add):
        assert (found.how, found.step) == ("", 3)
        assert found.grad.count(False) == 1


@forks
def test_a_loss_that_is_not_finite_in_one_process_ends_both(tmp_path: Path) -> None:
    def spoil(network: Any) -> None:
        def poisoned(module: Any, inputs: Any, outputs: Any) -> Any:
            spoils = os.environ.get("LOCAL_RANK") == "1" and len(calls) == 2
            calls.append(1)
            return {k: v * torch.nan for k, v in outputs.items()} if spoils else outputs

        calls: list[int] = []
        network.register_forward_hook(poisoned)

    for found in fit(tmp_path / "run", 2, change=spoil):
        assert found.how.startswith("FloatingPointError: the loss is nan in step 2 of epoch 0: ")
        assert found.step == 2


@forks
def test_noise_follows_from_seed_step_batch_and_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_steps": 2}
    options |= {"limit_train_batches": 2}  # a step an epoch
    first, second = (each.drawn for each in fit(tmp_path / "two", 2, **options))
    assert len(first) == len(second) == 4 and len({*first, *second}) == 8
    (alone,) = fit(tmp_path / "one", 1, **options)
    (other,) = fit(tmp_path / "other", 1, seed=1, **options)
    assert alone.drawn == first and not {*other.drawn} & {*first}


@forks
def test_a_signal_to_one_process_ends_both_after_the_same_step(tmp_path: Path) -> None:
    """Though the step before it was not whole when the signal came."""

    def tell(trainer: L.Trainer) -> None:
        if trainer.global_rank == 1 and trainer.fit_loop.batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=100)
    own = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "max_steps": 4}
    for found in fit(tmp_path / "run", 2, Preemption(), saving, does=tell, **own):
        assert found.how.startswith("SIGTERMException") and found.step == 2
    assert torch.load(tmp_path / "saved" / "last.ckpt", weights_only=True)["global_step"] == 2


class Clock(Callback):
    """Ten seconds a batch, and a thousand a validation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.now += 10

    def on_validation_batch_end(self, *args: Any, **named: Any) -> None:
        self.now += 1000


class Paces(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (trainer.fit_loop.batch_idx + 1) % 4 == 0:
            m = trainer.callback_metrics
            self.found.append((float(m["samples_per_second"]), float(m["minutes_left"])))


def test_paces_by_a_clock(tmp_path: Path, monkeypatch, capsys) -> None:
    """12 batches an epoch, 2 a step, each 4th followed by one of validation."""
    clock, paces = Clock(monkeypatch), Paces()
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 1, "max_steps": -1}
    options |= {"log_every_n_steps": 2, "val_check_interval": 4, "limit_val_batches": 1}
    fit(tmp_path / "run", 1, clock, Progress(), paces, **options)
    speeds, left = zip(*paces.found, strict=True)
    assert speeds == pytest.approx([4 * BATCH / 40] * 3)
    taken = {2: 40, 4: 1080, 6: 2120}
    assert left == pytest.approx([(6 - step) * t / step / 60 for step, t in taken.items()])
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch 1, ")]
    assert [line.split(":")[0] for line in told] == [f"epoch 1, step {n}" for n in (2, 4, 6)]
    assert all("val/loss " in line and "samples per second 0.8, " in line for line in told)


def test_the_time_left_of_a_run_that_was_resumed(monkeypatch) -> None:
    """By the steps since."""
    clock, callback, logged = Clock(monkeypatch), Progress(), {}
    trainer: Any = SimpleNamespace(
        global_step=100, log_every_n_steps=1, estimated_stepping_batches=110
    )
    module: Any = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    callback.on_train_start(trainer, module)
    clock.now, trainer.global_step = clock.now + 60, 101
    callback.on_train_batch_end(trainer, module, None, None, 0)
    assert logged == pytest.approx({"minutes_left": 9})


@forks
def test_the_pace_is_of_all_processes(tmp_path: Path, monkeypatch) -> None:
    clock = Clock(monkeypatch)
    first, _ = fit(tmp_path / "run", 2, clock, Progress(), log_every_n_steps=1)
    assert first.metrics["samples_per_second"] == pytest.approx(2 * BATCH / 10)


def test_shards_that_are_cut_or_gone(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        save({"state_dict": {"a": torch.ones(99)}}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 1, "pytorch-lightning_version": "2.6"}, folder / "meta.pt")
    check_shards(folder)
    assert checkpoints.fault(str(folder)) == ""
    (shard,) = folder.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot read the shards in .* a damaged one"):
            check_shards(folder)
        fault = checkpoints.fault(str(folder))
        assert fault.startswith(f"{folder}: cannot read the shards in {folder}: ")
        shard.unlink(missing_ok=True)


def test_a_file_is_on_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch) -> None:
    path, done = tmp_path / "a.ckpt", []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        size = os.fstat(descriptor).st_size if not path.exists() else None
        done.append(size)
        sync(descriptor)

    monkeypatch.setattr(checkpoint_io.os, "fsync", noted)
    CheckpointIO().save_checkpoint({"value": torch.ones(9)}, path)
    assert done == [path.stat().st_size, None]  # then the folder, for the name


def test_paths_elsewhere_are_lightnings(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    CheckpointIO().save_checkpoint({"value": 3}, "memory://folder/a.ckpt")
    assert CheckpointIO().load_checkpoint("memory://folder/a.ckpt") == {"value": 3}
    assert not list(tmp_path.iterdir())
