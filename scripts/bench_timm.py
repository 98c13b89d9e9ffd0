"""Time fine-tuning steps of timm models, trained by timm's ways and by mmpos's.

    OMP_WAIT_POLICY=passive python scripts/bench_timm.py --steps 30 --json bench.json

All ways do one step in turn, again and again: forward, backward, clipping and AdamW of the same
model on the same batch. Times are CPU-seconds of the process, so that a busy machine counts less;
ratios are of medians. ``task`` is `tasks.ImageClassification` under Lightning's trainer with all
that goes with it, against the plain loop of the same model (``loop``). The other rows turn queries
and keys: timm's own RoPE model, the same model with mmpos's rotation in its place (`replace`), and
mmpos's transformer of the same size.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import timm
import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import mmpos
from mmpos.interop.timm import Backbone, replace
from mmpos.models import Classifier, PatchEmbedding, Transformer
from tasks import ImageClassification
from tasks.optim import adamw

CLASSES = [str(label) for label in range(10)]
ROPE = partial(mmpos.RotaryEncoding, base=100)
SIZES = {"tiny": ("vit_tiny_patch16_224", 192, 3), "small": ("vit_small_patch16_224", 384, 6)}
PAIRS = {"task": "loop", "RoPE of mmpos in timm": "RoPE of timm", "mmpos": "RoPE of timm"}
"""What each way is compared with."""
TARGETS = {"task": 1.03, "RoPE of mmpos in timm": 1.0, "mmpos": 1.0}


def plain_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """A step of a training loop that knows nothing of mmpos but its optimizer."""
    optimizer = adamw(model, 1e-4, 0.05)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        out = model(images)
        out = out["class"] if isinstance(out, dict) else out
        cross_entropy(out, labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def rope_models(size: str) -> dict[str, nn.Module]:
    """Transformers of one size whose queries and keys are turned."""
    _, dim, heads = SIZES[size]
    name = "vit_small_patch16_rope_224"
    theirs: dict[str, Any] = {"embed_dim": dim, "num_heads": heads, "num_classes": len(CLASSES)}
    timms = timm.create_model(name, **theirs)
    replaced = timm.create_model(name, **theirs)
    replace(replaced, rotary=partial(ROPE, order=(1, 0)))
    ours = Transformer((14, 14), dim=dim, depth=12, heads=heads, class_token=True, rotary=ROPE)
    return {
        "RoPE of timm": timms,
        "RoPE of mmpos in timm": replaced,
        "mmpos": Classifier(PatchEmbedding(dim, (16, 16)), ours, {"class": len(CLASSES)}),
    }


class Timed(Callback):
    """Times the steps of a trainer, and between each two of them a step of all other ways."""

    def __init__(self, ways: dict[str, Callable[[], None]], warm_up: int) -> None:
        self.ways = ways
        self.warm_up = warm_up
        self.taken: dict[str, list[float]] = {name: [] for name in ("task", *ways)}
        self._begun = 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the time of the trainer's step, and of those in between."""
        own = time.process_time() - self._begun
        times = {"task": own}
        for name, way in self.ways.items():
            begun = time.process_time()
            way()
            times[name] = time.process_time() - begun
        if trainer.global_step > self.warm_up:
            for name, seconds in times.items():
                self.taken[name].append(seconds)
        self._begun = time.process_time()


def measure(size: str, batch: int, steps: int, warm_up: int = 3) -> dict[str, float]:
    """Median CPU-seconds of a step, by way."""
    torch.manual_seed(0)
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch) % len(CLASSES)
    name = SIZES[size][0]
    models = {"loop": timm.create_model(name, num_classes=len(CLASSES)), **rope_models(size)}
    ways = {name: plain_step(model, images, labels) for name, model in models.items()}
    timed = Timed(ways, warm_up)
    task = ImageClassification(CLASSES, (224, 224), backbone=partial(Backbone, name=name))
    count = steps + warm_up
    data = TensorDataset(images.repeat(count, 1, 1, 1), labels.repeat(count))
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=count,
        callbacks=[timed],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(data, batch))
    return {name: median(seconds) for name, seconds in timed.taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = measure(chosen.size, chosen.batch, chosen.steps)
    rows = []
    for name, seconds in taken.items():
        rows.append({"way": name, "seconds": seconds})
        if name in PAIRS:
            ratio = seconds / taken[PAIRS[name]]
            met = ratio <= TARGETS[name]
            rows[-1] |= {"against": PAIRS[name], "ratio": ratio, "met": met}
    title = f"a step of {chosen.batch} images at 224, {chosen.size}, {chosen.threads} threads"
    shown = Table("way", "CPU-seconds", "against", "ratio", "target", "met", title=title)
    for row in rows:
        cells = [row["way"], f"{row['seconds']:.3f}"]
        if "ratio" in row:
            met = "yes" if row["met"] else "no"
            cells += [row["against"], f"{row['ratio']:.3f}", f"≤ {TARGETS[row['way']]}", met]
        shown.add_row(*cells)
    Console().print(shown)
    if chosen.json:
        settings = {"batch": chosen.batch, "size": chosen.size, "torch": torch.__version__}
        chosen.json.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
