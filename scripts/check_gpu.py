"""Check mmpos on a GPU in at most eight minutes: kernels, bf16, compile, 2-D bias, training, speed.

    python scripts/check_gpu.py --json gpu.json
    python scripts/check_gpu.py --device cpu --small      # the script itself, without a GPU

Each line is a check that holds or not, or a ratio of times in one run; the references are computed
in float64 on the CPU. What has not begun after ``--minutes`` is left out, and said so. Ends with
status 1 where a check does not hold. Peers are timm's attention and models, which are installed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import timm
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from rich.console import Console
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Transformer
from mmpos.positions import absent, grid, join, sequence
from tasks import ImageClassification
from tasks.checkpoint_io import CheckpointIO
from tasks.data import Images


class Found(NamedTuple):
    """A figure, and the bound that it is held to."""

    name: str
    figure: float
    most: float | None = None
    """The greatest figure that is right; None for what is told only."""

    @property
    def holds(self) -> bool:
        return self.most is None or self.figure <= self.most


class Machine(NamedTuple):
    """What is checked, and whether only the script itself is."""

    device: torch.device
    small: bool

    def seconds(self, *ways: Callable[[], Any]) -> list[float]:
        """The medians of ways that take turns."""
        taken: list[list[float]] = [[] for _ in ways]
        for _ in range(4 if self.small else 24):
            for way, times in zip(ways, taken, strict=True):
                begun = time.perf_counter()
                way()
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
        return [median(times[2:]) for times in taken]


def error(found: Tensor, wanted: Tensor) -> float:
    """The greatest difference by the greatest value; infinite for what is not finite."""
    gap = (found.detach().double().cpu() - wanted.detach().double().cpu()).abs().max()
    worst = float(gap / wanted.abs().max().clamp_min(1e-12).double().cpu())
    return worst if math.isfinite(worst) else math.inf


def attended(
    parts: Sequence[Tensor],
    positions: Tensor,
    bias: mmpos.AttentionBias | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    causal: bool,
) -> list[Any]:
    """What comes out, and the gradients of q, k and v for a given one of it."""
    q, k, v, gradient = (part.to(device, dtype, copy=True) for part in parts)
    for part in (q, k, v):
        part.requires_grad_()
    places = positions.to(device)
    added = None if bias is None else bias.to(device)(places, places)
    if isinstance(added, Tensor) and dtype == torch.float64:
        added = added.double()
    out = mmpos.attend(q, k, v, bias=added, causal=causal)
    out.backward(gradient)
    return [out, q.grad, k.grad, v.grad]


def kernels(machine: Machine) -> Iterator[Found]:
    """Attention with each kind of bias, and its gradients, in bf16."""
    side = 4 if machine.small else 24  # 576 patches: no multiple of 128, where kernels have failed
    for prefix in (0, 1):
        positions = join(absent(prefix, 2), grid(side, side))
        shape = (2, 6, len(positions), 64)
        torch.manual_seed(0)
        parts = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
        biases = {
            "plain": None,
            "2-D ALiBi": mmpos.ALiBi(6, axes=2),
            "T5, learned": mmpos.T5Bias(6, axes=2),
            "log-CPB, learned": mmpos.LogCPB(6, (side, side)),
            "causal": None,
        }
        for name, bias in biases.items():
            run = partial(attended, parts, positions, bias, causal=name == "causal")
            wanted = run(torch.device("cpu"), torch.float64)
            found = run(machine.device, torch.bfloat16)
            worst = max(error(*pair) for pair in zip(found, wanted, strict=True))
            yield Found(f"attention, {name}, {len(positions)} tokens, and gradients", worst, 0.05)


def rotation(machine: Machine) -> Iterator[Found]:
    """RoPE far out, and its speed."""
    rope = mmpos.RotaryEncoding(64, base=10000)
    q = torch.randn(2, 6, 512, 64, dtype=torch.float64)
    for name, start, dtype in (
        ("float32 at 100,000", 100_000, torch.float32),
        ("bf16", 0, torch.bfloat16),
    ):
        positions = sequence(512, start=start)
        wanted = mmpos.rotate(q, rope(positions.double()))
        found = mmpos.rotate(q.to(machine.device, dtype), rope(positions.to(machine.device)))
        yield Found(f"RoPE, {name}", error(found, wanted), 0.02)
    length = 256 if machine.small else 4096
    x = torch.randn(4, 12, length, 64, device=machine.device, dtype=torch.bfloat16)
    near = rope(sequence(length, device=machine.device))
    table = torch.cat([part.repeat_interleave(2, -1) for part in (near.sin, near.cos)], -1)
    ours, copy, peer = machine.seconds(
        partial(mmpos.rotate, x, near), x.clone, lambda: apply_rot_embed_cat(x, table)
    )
    yield Found("RoPE over a copy, time", ours / copy)
    yield Found("RoPE over timm's, time", ours / peer)
    if machine.device.type == "cuda":
        compiled = torch.compile(mmpos.rotate, fullgraph=True)
        compiled(x, near)
        ours, copy = machine.seconds(partial(compiled, x, near), x.clone)
        yield Found("RoPE compiled over a copy, time", ours / copy)


def flex(machine: Machine) -> Iterator[Found]:
    """2-D ALiBi as a ``score_mod``, where FlexAttention has gradients."""
    side = 4 if machine.small else 32
    bias = mmpos.ALiBi(6, axes=2).to(machine.device)
    positions = grid(side, side, device=machine.device)
    q, k, v = torch.randn(3, 2, 6, side * side, 64, device=machine.device)
    dense = mmpos.attend(q, k, v, bias=bias(positions, positions))
    mod = bias.score_mod(positions, positions)
    run: Any = torch.compile(flex_attention) if machine.device.type == "cuda" else flex_attention
    yield Found("2-D ALiBi as a score_mod", error(run(q, k, v, score_mod=mod), dense), 0.01)
    if machine.device.type == "cuda":
        halves = [part.to(torch.bfloat16).requires_grad_() for part in (q, k, v)]
        added = bias(positions, positions)

        def train(attend: Callable[..., Tensor], **options: Any) -> None:
            attend(*halves, **options).sum().backward()

        flexible, ours, plain = machine.seconds(
            partial(train, run, score_mod=mod),
            partial(train, mmpos.attend, bias=added),
            partial(train, scaled_dot_product_attention),
        )
        yield Found("dense 2-D bias over no bias, training, time", ours / plain)
        yield Found("2-D bias as a score_mod over no bias, training, time", flexible / plain)


def compiled(machine: Machine) -> Iterator[Found]:
    """A compiled transformer at two sizes, against itself."""
    for name, slots in {
        "RoPE": {"rotary": partial(mmpos.RotaryEncoding, base=100)},
        "2-D ALiBi": {"bias": mmpos.ALiBi},
    }.items():
        torch.manual_seed(0)
        model = Transformer((8, 8), size="nano", **slots).to(machine.device).eval()  # type: ignore[arg-type]
        fast = torch.compile(
            model, fullgraph=True, backend="eager" if machine.small else "inductor"
        )
        worst = 0.0
        for rows, columns in ((8, 8), (6, 10), (7, 9)):
            x = torch.randn(2, rows * columns, model.dim, device=machine.device)
            places = grid(rows, columns, device=machine.device)
            with torch.no_grad():
                worst = max(worst, error(fast(x, places), model(x, places)))
        yield Found(f"compiled transformer, {name}, three sizes", worst, 0.01)


class Losses(Callback):
    """Of each batch."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:  # type: ignore[override]
        self.all.append(float(outputs["loss"]))


def training(machine: Machine) -> Iterator[Found]:
    """The image job in bf16-mixed; and a run that is resumed."""
    steps = 6 if machine.small else 60
    made = TemporaryDirectory()
    folder = Path(made.name)

    def fit(start: str | None = None, **slots: Any) -> tuple[list[float], dict[str, Tensor]]:
        L.seed_everything(0, verbose=False)
        data = Images(image_size=32, patch_size=4, batch_size=16 if machine.small else 128)
        task = ImageClassification(
            data.classes,
            data.image_size,
            data.patch_size,
            1,
            partial(Transformer, size="nano", **slots),
        )
        losses = Losses()
        trainer = L.Trainer(
            accelerator=machine.device.type,
            devices=1,
            precision="bf16-mixed",
            max_steps=steps,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            callbacks=[
                losses,
                ModelCheckpoint(
                    folder,
                    "{step}",
                    save_top_k=-1,
                    every_n_train_steps=steps // 2,
                    enable_version_counter=False,
                ),
            ],
            plugins=[CheckpointIO()],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, datamodule=data, ckpt_path=start)
        return losses.all, {name: value.cpu() for name, value in task.state_dict().items()}

    whole: dict[str, Tensor] = {}
    for name, slots in {
        "learned table": {"additive": mmpos.LearnedEncoding},
        "RoPE": {"rotary": partial(mmpos.RotaryEncoding, base=100)},
        "T5 bias": {"bias": mmpos.T5Bias},
    }.items():
        losses, whole = fit(**slots)  # the last is resumed below
        yield Found(f"bf16-mixed, {name}: last loss over first", losses[-1] / losses[0], 1.0)
    path = folder / f"step={steps // 2}.ckpt"
    _, resumed = fit(str(path), bias=mmpos.T5Bias)
    made.cleanup()
    worst = max(float((resumed[n] - v).abs().max()) for n, v in whole.items())
    yield Found("resumed run, greatest difference of weights", worst, 0.01)


def models(machine: Machine) -> Iterator[Found]:
    """A training step of a small ViT with each place, over timm's with a learned table."""
    batch, side = (2, 64) if machine.small else (128, 224)
    images = torch.randn(batch, 3, side, side, device=machine.device)
    peer = timm.create_model("vit_small_patch16_224", img_size=side, num_classes=10)
    axes = (side // 16, side // 16)

    def own(**slots: Any) -> nn.Module:
        encoder = Transformer(axes, size="small", class_token=True, **slots)
        tokens = PatchEmbedding(encoder.dim, (16, 16), 3)
        return Classifier(tokens, encoder, {"class": 10}, pool="token")

    ways = {
        "timm's": peer,
        "learned table": own(additive=mmpos.LearnedEncoding),
        "RoPE": own(rotary=partial(mmpos.RotaryEncoding, base=100)),
        "2-D ALiBi": own(bias=mmpos.ALiBi),
        "T5 bias, learned": own(bias=mmpos.T5Bias),
    }

    def step(model: nn.Module) -> None:
        with torch.autocast(machine.device.type, torch.bfloat16):
            out = model(images)
            loss = (out if isinstance(out, Tensor) else out["class"]).float().square().mean()
        loss.backward()
        model.zero_grad()

    runs = [partial(step, model.to(machine.device)) for model in ways.values()]
    taken = machine.seconds(*runs)
    for name, seconds in zip(ways, taken, strict=True):
        yield Found(f"ViT-S step, {name}: images a second", batch / seconds)
    for name, seconds in list(zip(ways, taken, strict=True))[1:]:
        yield Found(f"ViT-S step, {name}: time over timm's", seconds / taken[0])
    if machine.device.type == "cuda":
        yield Found("greatest memory, GB", torch.cuda.max_memory_allocated() / 1e9)


CHECKS = (kernels, rotation, flex, compiled, training, models)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--json", type=Path)
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    chosen = parser.parse_args(argv)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; to try the script itself: --device cpu --small")
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    console, begun = Console(highlight=False, width=110), time.perf_counter()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    console.print(f"mmpos {mmpos.__version__}, torch {torch.__version__}, {name}")
    all_found: list[Found] = []
    for check in CHECKS:
        if check.__name__ not in chosen.only:
            continue
        spent = (time.perf_counter() - begun) / 60
        if spent > chosen.minutes * 0.75:  # one may take the rest
            console.print(f"{check.__name__}: left out after {spent:.1f} minutes")
            continue
        try:
            for found in check(Machine(device, chosen.small)):
                all_found.append(found)
                judged = "" if found.most is None else f" (at most {found.most:g})"
                mark = "" if found.holds else "  DOES NOT HOLD"
                console.print(f"{found.name}: {found.figure:.4g}{judged}{mark}")
        except Exception as failure:  # the rest is still of use
            all_found.append(Found(f"{check.__name__}: {failure}", math.inf, 0.0))
            console.print_exception()
    console.print(f"{time.perf_counter() - begun:.0f} seconds")
    if chosen.json:
        rows = [found._asdict() | {"holds": found.holds} for found in all_found]
        chosen.json.write_text(json.dumps({"device": name, "found": rows}, indent=2))
    return 0 if all(found.holds for found in all_found) else 1


if __name__ == "__main__":
    sys.exit(main())
