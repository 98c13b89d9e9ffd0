"""Time the turning of queries and keys against copying them, and against other libraries.

    python scripts/bench_rotary.py
    python scripts/bench_rotary.py --rows eager peers --repeats 100 --json bench.json

A figure is the time to turn q and k, both ``[8, 12, 1024, 64]``, over the time to copy the same q
and k into new contiguous memory (``clone``; with a backward pass, their gradients too). All ways
are timed in turn, in another order at each repeat, so that a busy machine slows each alike; figures
are medians. Peers are held to be behind mmpos in the layout they use. Where the C library is glibc,
it is told to keep memory that is freed: given back and taken anew, memory costs whichever way
happens to take it up to twice its time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from mmpos.positions import sequence
from mmpos.rotary import RotaryEncoding, Rotation, rotate, rotate_

Two = tuple[Tensor, Tensor]
HALVED = {torch.bfloat16: (3.5, 5.0), torch.float16: (3.5, 5.0)}
COMPILED = {torch.float32: (1.5, 1.15), torch.bfloat16: (4.5, 3.0)}
LENGTHS = (1.0, 0.7, 0.9, 0.5, 0.3, 0.1)
"""Parts of the length that each compiled function is called with, in two graphs at most."""


class Row(NamedTuple):
    """A way to turn q and k, what it gives, what is copied for comparison, and how often it may be.

    A peer has the row that it is to be behind instead.
    """

    name: str
    way: Callable[[], Two]
    expected: Two
    copied: Sequence[Tensor]
    target: float | str


def turn(q: Tensor, k: Tensor, rotation: Rotation) -> Two:
    return rotate(q, rotation), rotate(k, rotation.dual)


def turn_in_place(q: Tensor, k: Tensor, rotation: Rotation) -> Two:
    return rotate_(q, rotation), rotate_(k, rotation.dual)


def there_and_back(q: Tensor, k: Tensor, rotation: Rotation, grads: Two) -> Two:
    with torch.enable_grad():
        by_q, by_k = torch.autograd.grad(turn(q, k, rotation), (q, k), grads)
    return by_q, by_k


def eager(q: Tensor, k: Tensor, interleaved: Rotation, half: Rotation) -> Iterator[Row]:
    name, turned, copied = "eager interleaved", turn(q, k, interleaved), (q, k)
    yield Row(name, partial(turn, q, k, interleaved), turned, copied, 1.3)

    qkv = torch.stack((q, k, k)).permute(1, 3, 0, 2, 4).contiguous()  # [B, L, 3, H, D]
    views = qkv[:, :, 0].transpose(1, 2), qkv[:, :, 1].transpose(1, 2)
    yield Row(f"{name}, views of qkv", partial(turn, *views, interleaved), turned, views, 1.7)

    way = partial(turn_in_place, q.clone(), k.clone(), interleaved)
    yield Row(f"{name}, in place", way, turned, copied, 0.8)

    grads = k.clone(), q.clone()
    way = partial(there_and_back, *(x.clone().requires_grad_() for x in (q, k)), interleaved, grads)
    back = turn(*grads, interleaved._replace(sin=-interleaved.sin))
    yield Row(f"{name}, with backward", way, back, (*copied, *grads), 1.5)

    yield Row("eager half", partial(turn, q, k, half), turn(q, k, half), copied, 3.3)


def halved(q: Tensor, k: Tensor, *rotations: Rotation) -> Iterator[Row]:
    for dtype, targets in HALVED.items():
        near = q.to(dtype), k.to(dtype)
        for rotation, target in zip(rotations, targets, strict=True):
            name, way = f"eager {rotation.layout}", partial(turn, *near, rotation)
            yield Row(f"{name}, {short(dtype)}", way, turn(q, k, rotation), near, target)


def compiled(
    q: Tensor, k: Tensor, *rotations: Rotation, backend: str, graphs: dict[str, int]
) -> Iterator[Row]:
    """Calls compiled for all lengths; ``graphs`` is told how many graphs they took."""
    for dtype, targets in COMPILED.items():
        near = q.to(dtype), k.to(dtype)
        for rotation, target in zip(rotations, targets, strict=True):
            counter = CompileCounterWithBackend(backend)
            run = torch.compile(turn, backend=counter, fullgraph=True)
            for part in LENGTHS:
                length = max(2, int(part * q.shape[-2]))
                cut = [x[..., :length, :].contiguous() for x in (*near, *rotation[:2])]
                run(cut[0], cut[1], rotation._replace(cos=cut[2], sin=cut[3]))
            name = f"compiled {rotation.layout}, {short(dtype)}"
            graphs[name] = counter.frame_count
            way = partial(run, *near, rotation)
            yield Row(name, way, turn(q, k, rotation), near, target)


def peers(q: Tensor, k: Tensor, interleaved: Rotation, half: Rotation) -> Iterator[Row]:
    turned, turned_half = turn(q, k, interleaved), turn(q, k, half)
    cos, sin = (torch.cat((table, table), -1) for table in half[:2])
    way = partial(apply_rotary_pos_emb, q, k, cos, sin)
    yield Row("peer transformers, half", way, turned_half, (q, k), "eager half")

    def timm(embed: Tensor, half: bool) -> Two:
        first, second = (apply_rot_embed_cat(x, embed, half=half) for x in (q, k))
        return first, second

    way = partial(timm, torch.cat((sin[0], cos[0]), -1), half=True)
    yield Row("peer timm, half", way, turned_half, (q, k), "eager half")
    cos, sin = (table[0].repeat_interleave(2, -1) for table in interleaved[:2])
    way = partial(timm, torch.cat((sin, cos), -1), half=False)
    yield Row("peer timm, interleaved", way, turned, (q, k), "eager interleaved")

    if find_spec("rotary_embedding_torch"):
        apply_rotary_emb = import_module("rotary_embedding_torch").apply_rotary_emb

        def lucidrains(angles: Tensor) -> Two:
            return apply_rotary_emb(angles, q), apply_rotary_emb(angles, k)

        way = partial(lucidrains, torch.atan2(sin, cos))
        name = "peer rotary-embedding-torch, interleaved"
        yield Row(name, way, turned, (q, k), "eager interleaved")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def check(row: Row) -> None:
    for got, expected in zip(row.way(), row.expected, strict=True):
        rounding = 1e-5 if got.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), expected, rtol=rounding, atol=rounding)


def measure(rows: Sequence[Row], repeats: int) -> list[dict]:
    """What each row takes in ms and in copies, and whether that meets its target."""
    copies = {row.name: tuple(map(id, row.copied)) for row in rows}
    ways: dict = {copies[row.name]: partial(copy, row.copied) for row in rows}
    ways |= {row.name: row.way for row in rows}
    taken: dict = {name: [] for name in ways}
    for _ in range(repeats):
        for name in random.sample(list(ways), len(ways)):
            begun = time.perf_counter()
            ways[name]()
            taken[name].append(1e3 * (time.perf_counter() - begun))
    times = {name: median(values) for name, values in taken.items()}
    found = []
    for name, _, _, _, target in rows:
        own, copying = times[name], times[copies[name]]
        if isinstance(target, str):
            met = own > times[target] if target in times else None
        else:
            met = own <= target * copying
        row = {"row": name, "ms": own, "copy_ms": copying, "copies": own / copying}
        found.append(row | {"target": target, "met": met})
    return found


def table(found: Sequence[dict], title: str) -> Table:
    shown = Table("row", "ms", "copying, ms", "copies", "target", "met", title=title)
    for row in found:
        figures = (f"{row[key]:.2f}" for key in ("ms", "copy_ms", "copies"))
        bound = "behind " if isinstance(row["target"], str) else "≤ "
        met = {True: "yes", False: "no", None: ""}[row["met"]]
        shown.add_row(row["row"], *figures, f"{bound}{row['target']}", met)
    return shown


def keep_memory() -> None:
    """Have this process keep the memory that it frees, if it runs on glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # as malloc.h numbers them
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ("eager", "halved", "compiled", "peers")
    size, names = (8, 12, 1024, 64), ("B", "H", "L", "D")
    parser.add_argument("--rows", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--size", nargs=4, type=int, default=size, metavar=names)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", default="inductor", help="of the compiled rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    chosen = parser.parse_args(argv)

    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    q, k = torch.randn(2, *chosen.size)
    *_, length, head_dim = chosen.size
    rotations = [
        RotaryEncoding(head_dim, layout=layout)(sequence(length))
        for layout in ("interleaved", "half")
    ]
    graphs: dict[str, int] = {}
    by_backend = partial(compiled, backend=chosen.backend, graphs=graphs)
    making = dict(zip(kinds, (eager, halved, by_backend, peers), strict=True))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=4 * len(LENGTHS)):
        rows = [row for kind in chosen.rows for row in making[kind](q, k, *rotations)]
        for row in rows:
            check(row)
        found = measure(rows, chosen.repeats)
    console = Console()
    console.print(table(found, f"q and k {tuple(chosen.size)}, {chosen.threads} threads"))
    for name, count in graphs.items():
        met = "yes" if count <= 2 else "no"
        console.print(f"{name}: {count} graphs for {len(LENGTHS)} lengths (≤ 2: {met})")
    if chosen.json:
        settings = {"size": chosen.size, "threads": chosen.threads, "torch": torch.__version__}
        text = json.dumps({**settings, "rows": found, "graphs": graphs}, indent=2)
        chosen.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep_memory()
    main()
