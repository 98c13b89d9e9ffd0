"""Time and memory of attention with each kind of bias, against attention without.

    OMP_WAIT_POLICY=passive python scripts/bench_attention.py --rows learned --json bench.json

All ways of a table are timed in turn, in random order, again and again, so that a busy machine
slows each alike; times are medians, and ratios are to the first way. On a machine that does other
things too, threads should not spin while they wait (as above), or ways of many short steps seem
several times as slow as they are. Peak memory is that of a fresh process that does nothing else;
its ratio is to that of the first way.

fixed    forward, a bias without gradient: prepared once, in three dimensions as torch would take
         it, built for each call, and one for each sample
learned  forward and backward, a bias with gradient: whole, by blocks of queries, and torch's own
shared   the same through several layers that share a bias, which is formed once, or by each layer
keys     forward, causal: ALiBi as a number for each key and for each pair; errors are those of
         some rows, against float64
content  forward and backward: biases that look at queries and keys
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import mmpos
from mmpos.attention import prepare
from mmpos.bias import ClippedRelativeBias, ContentBias, ShawBias, TransformerXLBias
from mmpos.bias.alibi import alibi_slopes
from mmpos.positions import sequence

LAYERS = 4
Call = Callable[[], Tensor | None]
Ways = dict[str, Callable[[], Call]]
"""Each makes what it needs, and gives what is timed."""


class Sizes(NamedTuple):
    """Of queries, keys and values."""

    batch: int
    heads: int
    length: int
    head_dim: int

    def tensors(self, gradient: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(self, requires_grad=gradient) for _ in range(3)]

    def bias(self, gradient: bool = False) -> Tensor:
        return torch.randn(self.heads, self.length, self.length, requires_grad=gradient)


def fixed(size: Sizes) -> Ways:
    q, k, v = size.tensors()
    where, alibi = sequence(size.length), mmpos.ALiBi(size.heads)

    def once(positions: Tensor) -> Call:
        prepared = prepare(size.length, size.length, bias=alibi(positions, positions))
        return lambda: mmpos.attend(q, k, v, prepared=prepared)

    def as_it_is() -> Call:
        bias = alibi(where, where)
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return {
        "no bias": lambda: lambda: mmpos.attend(q, k, v),
        "prepared once": lambda: once(where),
        "torch, 3-D": as_it_is,
        "built for each call": lambda: lambda: mmpos.attend(q, k, v, bias=alibi(where, where)),
        "one for each sample": lambda: once(where.expand(size.batch, size.length, 1)),
    }


def backward(forward: Callable[[], Tensor]) -> Call:
    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    return both


def learned(size: Sizes) -> Ways:
    q, k, v = size.tensors(gradient=True)
    where, clipped = sequence(size.length), ClippedRelativeBias(size.heads, distance=128)

    def whole(gradient: bool, causal: bool = False) -> Call:
        bias = size.bias(gradient)
        return backward(lambda: mmpos.attend(q, k, v, bias=bias, causal=causal))

    def by_torch() -> Call:
        bias = size.bias(gradient=True)
        return backward(lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias[None]))

    def by_blocks() -> Tensor:
        return mmpos.attend(q, k, v, bias=clipped.blocks(where, where))

    return {
        "no bias": lambda: backward(lambda: mmpos.attend(q, k, v)),
        "fixed": lambda: whole(False),
        "whole": lambda: whole(True),
        "by blocks": lambda: backward(by_blocks),
        "torch": by_torch,
        "no bias, causal": lambda: backward(lambda: mmpos.attend(q, k, v, causal=True)),
        "whole, causal": lambda: whole(True, causal=True),
    }


def shared(size: Sizes) -> Ways:
    x, k, v = size.tensors(gradient=True)
    where, clipped = sequence(size.length), ClippedRelativeBias(size.heads, distance=128)

    def layers(form: Callable | None) -> Call:
        def forward() -> Tensor:
            bias = None if form is None else form(where, where)
            once, out = prepare(size.length, size.length, bias=bias), x
            for _ in range(LAYERS):
                out = out + mmpos.attend(out, k, v, prepared=once)
            return out

        return backward(forward)

    return {
        "no bias": lambda: layers(None),
        "formed once": lambda: layers(clipped),
        "by each layer": lambda: layers(clipped.blocks),
    }


def keys(size: Sizes) -> Ways:
    q, k, v = size.tensors()
    where, alibi = sequence(size.length), mmpos.ALiBi(size.heads)

    def by_key() -> Call:
        bias = alibi.key_bias(where)
        return lambda: mmpos.attend(q, k, v, key_bias=bias, causal=True)

    def by_pair() -> Call:
        once = prepare(size.length, size.length, bias=alibi(where, where), causal=True)
        return lambda: mmpos.attend(q, k, v, prepared=once)

    ways: Ways = {
        "no bias": lambda: lambda: mmpos.attend(q, k, v, causal=True),
        "for each key": by_key,
    }
    return ways if size.length > 4096 else {**ways, "for each pair": by_pair}


def content(size: Sizes) -> Ways:
    tensors, where = size.tensors(gradient=True), sequence(size.length)

    def terms(made: Callable[..., ContentBias]) -> Call:
        bias = made(size.heads, head_dim=size.head_dim)
        return backward(lambda: mmpos.attend(*tensors, bias=bias(where, where)))

    return {
        "no bias": lambda: backward(lambda: mmpos.attend(*tensors)),
        "ShawBias": lambda: terms(ShawBias),
        "TransformerXLBias": lambda: terms(TransformerXLBias),
    }


KINDS: dict[str, tuple[Callable[[Sizes], Ways], Sizes]] = {
    "fixed": (fixed, Sizes(2, 12, 2048, 64)),
    "learned": (learned, Sizes(1, 12, 2048, 64)),
    "shared": (shared, Sizes(1, 12, 2048, 64)),
    "keys": (keys, Sizes(1, 12, 16384, 64)),
    "content": (content, Sizes(2, 8, 512, 64)),
}


def error_of_keys(size: Sizes, out: Tensor) -> float:
    """The largest error of some rows against ALiBi by pairs, all of it in float64."""
    q, k, v = (part.double() for part in size.tensors())
    last = size.length - 1
    rows = torch.tensor(sorted({*range(0, size.length, max(1, size.length // 41)), 1, last}))
    slopes = torch.tensor(alibi_slopes(size.heads), dtype=torch.float64)
    behind = rows.unsqueeze(-1) - torch.arange(size.length)
    scores = q[:, :, rows] @ k.mT * size.head_dim**-0.5
    scores = scores - slopes[:, None, None] * behind
    exact = scores.masked_fill(behind < 0, -torch.inf).softmax(-1) @ v
    return (out[:, :, rows] - exact).abs().max().item()


def peak_memory() -> float:
    """The most memory that this process has held, in MB; what went before it does not count."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def peak_of(kind: str, way: str, size: Sizes, threads: int) -> float:
    command = [sys.executable, __file__, "--rows", kind, "--threads", str(threads), "--peak", way]
    command += ["--size", *map(str, size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def times(ways: dict[str, Call], repeats: int) -> dict[str, float]:
    """Milliseconds of each way."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in random.sample(list(ways), len(ways)):
            begun = time.perf_counter()
            ways[name]()
            if turn:  # the first warms up
                taken[name].append(1e3 * (time.perf_counter() - begun))
    return {name: median(values) for name, values in taken.items()}


def measure(kind: str, size: Sizes, repeats: int, threads: int, memory: bool) -> list[dict]:
    ways = {name: make() for name, make in KINDS[kind][0](size).items()}
    taken = times(ways, repeats)
    rows = [{"way": name, "ms": ms} for name, ms in taken.items()]
    for row in rows:
        row["ratio"] = row["ms"] / rows[0]["ms"]
        if kind == "keys" and row["way"] != "no bias":
            out = ways[row["way"]]()
            assert out is not None
            row["error"] = error_of_keys(size, out)
        if memory:
            row["MB"] = peak_of(kind, row["way"], size, threads)
            row["MB ratio"] = row["MB"] / rows[0]["MB"]
    return rows


def table(rows: Sequence[dict], title: str) -> Table:
    forms = {"way": "", "ms": ".0f", "ratio": ".2f", "MB": ".0f", "MB ratio": ".2f", "error": ".1e"}
    columns = [name for name in forms if any(name in row for row in rows)]
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*(format(row[name], forms[name]) if name in row else "" for name in columns))
    return shown


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--size", nargs=4, type=int, metavar=("B", "H", "L", "D"), help="one for all tables"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not start other processes")
    parser.add_argument("--peak", metavar="WAY", help="run one way once, and print its peak in MB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    chosen = parser.parse_args(argv)

    torch.set_num_threads(chosen.threads)
    found = {}
    for kind in chosen.rows:
        ways, size = KINDS[kind]
        size = Sizes(*chosen.size) if chosen.size else size
        with torch.set_grad_enabled(kind not in ("fixed", "keys")):
            if chosen.peak:
                ways(size)[chosen.peak]()()
                print(peak_memory())
                return
            found[kind] = {
                "size": size,
                "rows": measure(kind, size, chosen.repeats, chosen.threads, not chosen.no_memory),
            }
    console = Console()
    for kind, result in found.items():
        title = f"{kind}: B, H, L, D = {tuple(result['size'])}, float32, {chosen.threads} threads"
        console.print(table(result["rows"], title))
    if chosen.json:
        settings = {"threads": chosen.threads, "torch": torch.__version__}
        text = json.dumps({**settings, "tables": found}, indent=2)
        chosen.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
