"""Two processes with batches of B are one process with batches of 2 B."""

import csv
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import mmpos
from mmpos.models import Transformer
from tasks import ImageClassification, cli
from tasks.data import Images

JOBS = runpy.run_path(str(Path(__file__).with_name("small_jobs.py")))
STEPS = 10


class Record(L.Callback):
    """Writes each process's losses and final weights to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"].detach().clone()
        mean = trainer.strategy.reduce(loss, reduce_op="mean")
        self.losses.append(float(mean))

    def on_fit_end(self, trainer, pl_module) -> None:
        state = {k: v.clone() for k, v in pl_module.network.state_dict().items()}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        torch.save((self.losses, state, metrics), self.folder / f"{trainer.global_rank}.pt")


def images(batch_size: int, **encoding) -> tuple:
    torch.manual_seed(0)
    data = Images(image_size=(16, 24), patch_size=8, batch_size=batch_size, train_samples=400)
    return ImageClassification(
        data.classes,
        data.image_size,
        data.patch_size,
        data.channels,
        partial(Transformer, size="nano", depth=1, class_token=True, **encoding),
    ), data


def train(
    folder: Path,
    processes: int,
    make: Callable,
    steps: int = STEPS,
    callbacks: Sequence[L.Callback] = (),
    start: Path | None = None,
) -> list[tuple[list, dict[str, Tensor], dict]]:
    folder.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task, data = make(8 // processes)
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
    trainer = L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=processes,
        strategy=strategy if processes > 1 else "auto",
        precision="64-true",  # the gradient of a key bias is rounding alone, which Adam magnifies
        max_steps=steps,
        limit_val_batches=1.0,
        val_check_interval=min(steps, 10),
        num_sanity_val_steps=0,
        callbacks=[Record(folder), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data, ckpt_path=start)
    torch.set_num_threads(threads)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.mark.parametrize(
    "encoding",
    [
        {"additive": partial(mmpos.LearnedEncoding, prefix_rows=1), "bias": mmpos.ALiBi},
        {"rotary": mmpos.RotaryEncoding},
    ],
    ids=["learned and alibi", "rope"],
)
def test_two_processes_are_one_with_twice_the_batch(encoding: dict, tmp_path: Path) -> None:
    make = partial(images, **encoding)
    names = ("val/loss", "val/what_accuracy", "val/where_accuracy")
    compare(train(tmp_path / "one", 1, make), train(tmp_path / "two", 2, make), names)


@pytest.mark.parametrize("name", JOBS["NAMES"])
def test_so_they_are_for_every_task(name: str, tmp_path: Path) -> None:
    """With an encoding in each of the three places; batches of any lengths, numbers of targets and
    modalities.
    """

    def make(batch_size: int) -> tuple:
        return JOBS["job"](name, batch_size, tmp_path / "texts")

    one, two = (train(tmp_path / str(n), n, make, steps=20) for n in (1, 2))
    compare(one, two, [key for key in one[0][2] if key.startswith("val/")])


class Save(L.Callback):
    """Saves at a step within an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint(self.path, weights_only=False)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(before: int, after: int, tmp_path: Path) -> None:
    """With the samples that would have come next, to the end that one process comes to."""

    def make(batch_size: int) -> tuple:
        return JOBS["job"]("algorithm", batch_size, tmp_path)

    ((_, whole, _),) = train(tmp_path / "whole", 1, make, steps=30)  # of 20 in an epoch
    path = tmp_path / "step.ckpt"
    train(tmp_path / "before", before, make, steps=30, callbacks=[Save(path)])
    for losses, weights, _ in train(tmp_path / "after", after, make, steps=30, start=path):
        assert len(losses) == 23
        for name, value in whole.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)


def compare(one: list[tuple], two: list[tuple], metrics: Sequence[str]) -> None:
    ((losses, weights, found),), (first, second) = one, two
    assert len(set(losses)) == len(losses) > 1 and metrics
    assert first[0] == pytest.approx(losses, rel=1e-5) == second[0]
    for name, value in weights.items():
        assert torch.equal(first[1][name], second[1][name]), f"{name} differs between processes"
        torch.testing.assert_close(first[1][name], value, rtol=1e-5, atol=1e-5)
    for name in metrics:
        assert first[2][name] == pytest.approx(found[name], rel=1e-5), name


def test_the_same_through_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default job, at a small size, as ``mmpos fit`` in one process and in two."""
    monkeypatch.chdir(tmp_path)
    base = ["fit", "--config", "image", "--data.image_size=16", "--data.patch_size=8"]
    base += ["--data.train_samples=400", f"--trainer.max_steps={STEPS}", "--test_after_fit=false"]
    base += [f"--trainer.val_check_interval={STEPS}", "--trainer.log_every_n_steps=1"]
    base += ["--trainer.precision=64-true", "--trainer.num_sanity_val_steps=0"]
    base += ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]
    one = [*base, "--data.batch_size=16", "--trainer.logger.name=one"]
    two = [*base, "--data.batch_size=8", "--trainer.logger.name=two"]
    two += ["--trainer.strategy=ddp", "--trainer.devices=2"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, "-W", "ignore", "-m", "mmpos"]
    second = subprocess.Popen(
        [*command, *two], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert cli.main(one) == 0
    output = second.communicate(timeout=300)[0].decode()
    assert second.returncode == 0, output
    found = []
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name / "version_0"
        state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        with (folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        found.append((state, {k: [r[k] for r in rows if r[k]] for k in ("train/loss", "val/loss")}))
    (first, losses), (last, others) = found
    assert first["global_step"] == last["global_step"] == STEPS == len(losses["train/loss"])
    for name, values in losses.items():
        assert list(map(float, others[name])) == pytest.approx(list(map(float, values)), rel=1e-5)
    for name, value in first["state_dict"].items():
        torch.testing.assert_close(last["state_dict"][name], value, rtol=1e-5, atol=1e-5)
