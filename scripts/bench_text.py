"""Time training steps of a language model, by mmpos and as one writes it by hand.

    OMP_WAIT_POLICY=passive python scripts/bench_text.py --steps 30 --json bench.json

Both do one step in turn, again and again, on the same batch of packed documents: forward, backward,
clipping and AdamW. ``mmpos`` is `tasks.LanguageModel` under Lightning's trainer with all that goes
with it; ``by hand`` is a plain loop of the same model written with
`scaled_dot_product_attention` and cos and sin that are stored: its rows are one text each, since
it knows no documents. ``packed`` is mmpos where documents do not see each other. Times are
CPU-seconds of the process, so that a busy machine counts less; ratios are of medians.
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
import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.utils.data import DataLoader

import mmpos
from mmpos.models import Transformer
from tasks import LanguageModel
from tasks.data import Text
from tasks.optim import adamw
from tasks.text import Batch

SHAPES = {"nano": (64, 4, 4, 32, 128), "tiny": (192, 12, 3, 4, 512)}
"""dim, depth, heads, rows of a batch, tokens of a row."""
TARGET = 1.05


class Layer(nn.Module):
    """A pre-norm layer as in many a script."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        q, k = (part * cos + _half_turn(part) * sin for part in (q, k))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(gelu(self.up(self.norm2(x))))


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class ByHand(nn.Module):
    """A decoder with RoPE, whose embedding is also its head."""

    def __init__(self, vocabulary: int, dim: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        pairs = dim // heads // 2
        turns = torch.arange(context)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.register_buffer("cos", turns.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", turns.sin().repeat(1, 2), persistent=False)
        for matrix in self.parameters():
            if matrix.ndim > 1:
                nn.init.trunc_normal_(matrix, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return linear(self.norm(x), self.tokens.weight)


def loop(forward: Callable[[Batch], Tensor], model: nn.Module, batch: Batch) -> Callable[[], None]:
    """A step of a training loop."""
    optimizer = adamw(model, 1e-4, 0.05)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        logits = forward(batch)
        cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


class Timed(Callback):
    """Times the steps of a trainer, and between each two of them a step of all other ways."""

    def __init__(self, ways: dict[str, Callable[[], None]], warm_up: int) -> None:
        self.ways, self.warm_up = ways, warm_up
        self.taken: dict[str, list[float]] = {name: [] for name in ("mmpos", *ways)}
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
        times = {"mmpos": time.process_time() - self._begun}
        for name, way in self.ways.items():
            begun = time.process_time()
            way()
            times[name] = time.process_time() - begun
        if trainer.global_step > self.warm_up:
            for name, seconds in times.items():
                self.taken[name].append(seconds)
        self._begun = time.process_time()


def measure(size: str, steps: int, warm_up: int) -> dict[str, float]:
    """Median CPU-seconds of a step, by way."""
    dim, depth, heads, rows, context = SHAPES[size]
    data = Text(context=context, batch_size=rows, train_tokens=40 * rows * context)
    data.setup("fit")
    packed: Batch = next(iter(data.train_dataloader()))
    whole: Batch = {
        **packed,
        "positions": mmpos.positions.sequence(context).expand(rows, -1, -1),
        "segments": torch.zeros_like(packed["segments"]),
    }
    make = partial(Transformer, dim=dim, depth=depth, heads=heads, causal=True)
    task = LanguageModel(data.vocabulary, context, partial(make, rotary=mmpos.RotaryEncoding))
    other = LanguageModel(data.vocabulary, context, partial(make, rotary=mmpos.RotaryEncoding))
    hand = ByHand(data.vocabulary, dim, depth, heads, context)
    same = sum(p.numel() for p in hand.parameters())
    assert same == sum(p.numel() for p in task.parameters())
    ways = {
        "by hand": loop(lambda batch: hand(batch["tokens"]), hand, whole),
        "mmpos, packed": loop(
            lambda batch: other(batch["tokens"], batch["positions"], batch["segments"]),
            other,
            packed,
        ),
    }
    timed = Timed(ways, warm_up)
    trainer = L.Trainer(
        max_steps=steps + warm_up,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[timed],
    )
    rows_of = DataLoader([whole] * (steps + warm_up), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(task, rows_of)
    return {name: median(seconds) for name, seconds in timed.taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time training steps of a language model.")
    parser.add_argument("--sizes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(chosen.threads)
    found = {size: measure(size, chosen.steps, chosen.warm_up) for size in chosen.sizes}
    table = Table("model", "rows × tokens", "way", "CPU-ms a step", "ratio")
    for size, times in found.items():
        rows, context = SHAPES[size][3:]
        for way, seconds in times.items():
            ratio = seconds / times["by hand"]
            mark = "" if way != "mmpos" else f" (≤ {TARGET})"
            table.add_row(
                size, f"{rows} × {context}", way, f"{1e3 * seconds:.1f}", f"{ratio:.3f}{mark}"
            )
    Console().print(table)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
