"""Time training in one process and in two, each with one thread, in turns of the same run.

    OMP_NUM_THREADS=1 python scripts/bench_processes.py

The job ``image`` (nano, 64 patches, batches of 256 in each process) trains by
DistributedDataParallel over gloo. A turn is so many steps after a warm-up; what is compared is the
samples of a second of all processes, the median over turns. Two processes share memory and its
bandwidth, so that twice as many is the most that there is. Each needs a core of its own: other work
on the machine counts against two.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing import Queue, get_context
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

import mmpos
from mmpos.models import Transformer
from tasks import ImageClassification
from tasks.data import Images


class Timed(Callback):
    """Puts the samples of a second, of all processes, after a warm-up."""

    def __init__(self, found: Queue, warm_up: int) -> None:
        self.found, self.warm_up = found, warm_up

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:  # type: ignore[override]
        if trainer.global_step == self.warm_up:
            self.begun = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:  # type: ignore[override]
        if trainer.is_global_zero:
            taken = time.perf_counter() - self.begun
            size: int = trainer.datamodule.batch_size  # type: ignore[attr-defined]
            steps = trainer.global_step - self.warm_up
            self.found.put(steps * size * trainer.world_size / taken)


def turn(processes: int, steps: int, warm_up: int, batch_size: int, size: Any) -> float:
    """Samples of a second."""
    torch.manual_seed(0)
    data = Images(image_size=32, patch_size=4, batch_size=batch_size)
    rope = partial(mmpos.RotaryEncoding, base=100)
    task = ImageClassification(
        data.classes,
        data.image_size,
        data.patch_size,
        data.channels,
        partial(Transformer, size=size, rotary=rope),
    )
    found = get_context("fork").Queue()
    strategy: Any = "auto"
    if processes > 1:
        options: dict[str, Any] = {"gradient_as_bucket_view": True}  # as in trainer/ddp
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy,
        max_steps=warm_up + steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        callbacks=[Timed(found, warm_up)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)
    return found.get()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--size", default="nano")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    one: list[float] = []
    many: list[float] = []
    for _ in range(chosen.turns):
        for processes, speeds in ((1, one), (chosen.processes, many)):
            speeds.append(
                turn(processes, chosen.steps, chosen.warm_up, chosen.batch_size, chosen.size)
            )
    console = Console(highlight=False)
    for name, speeds in (("1 process", one), (f"{chosen.processes} processes", many)):
        rounded = ", ".join(f"{speed:.0f}" for speed in speeds)
        console.print(f"{name}: {median(speeds):.0f} samples a second ({rounded})")
    ratio = median(two / alone for alone, two in zip(one, many, strict=True))
    console.print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
