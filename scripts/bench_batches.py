"""Time training on packed and on padded documents, and decoding with a cache.

    OMP_WAIT_POLICY=passive python scripts/bench_batches.py

``training``: real tokens per CPU-second of a forward and backward pass of a causal transformer with
RoPE over the same documents, of 32 to 512 tokens, padded to the longest in a batch, or packed in
one row with their segments. Both give the same loss and gradients
(`tests/attention/test_documents.py`).
``decoding``: CPU-milliseconds of one more token after so many in a cache, those of attention to as
many keys in as many layers, and the rest, which is to stay what it is.
Ways take turns, and figures are medians.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import mmpos
from mmpos.attention import KVCache
from mmpos.models import Transformer
from mmpos.positions import packed, padded, sequence

DIM, HEADS = 192, 3


def model(depth: int) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        1,
        dim=DIM,
        depth=depth,
        heads=HEADS,
        causal=True,
        rotary=mmpos.RotaryEncoding,
    )


def training(lengths: Sequence[int], depth: int) -> dict[str, Callable[[], None]]:
    made = model(depth)
    texts = [torch.randn(length, DIM) for length in lengths]
    rows = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(rows.shape[1]) < torch.tensor(lengths).unsqueeze(-1)
    positions, segments = packed(lengths)
    row = torch.cat(texts).unsqueeze(0)

    def step(run: Callable[[], torch.Tensor]) -> None:
        made.zero_grad()
        run().square().sum().backward()

    return {
        "padded": partial(step, lambda: made(rows, padded(mask), mask=mask)[mask]),
        "packed": partial(step, lambda: made(row, positions, segments=segments[None])),
    }


def decoding(cached: Sequence[int], depth: int) -> dict[tuple[str, int], Callable[[], None]]:
    ways = {}
    made = model(depth).eval()
    for count in cached:
        cache = KVCache()
        with torch.no_grad():
            made(torch.randn(1, count, DIM), sequence(count), cache=cache)

        def step(cache: KVCache = cache) -> None:
            with torch.no_grad():
                made(torch.randn(1, 1, DIM), sequence(1, start=cache.tokens), cache=cache)

        keys = torch.randn(depth, 2, 1, HEADS, count, DIM // HEADS)
        query = torch.randn(1, HEADS, 1, DIM // HEADS)

        def attention(query: torch.Tensor = query, keys: torch.Tensor = keys) -> None:
            with torch.no_grad():
                for k, v in keys:
                    mmpos.attend(query, k, v)

        ways |= {("whole", count): step, ("attention", count): attention}
    return ways


def times(ways: dict, repeats: int) -> dict:
    """Median CPU-seconds of each way."""
    taken = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in random.sample(list(ways), len(ways)):
            begun = time.process_time()
            ways[name]()
            if turn:  # the first warms up
                taken[name].append(time.process_time() - begun)
    return {name: median(values) for name, values in taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--cached", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    draw = random.Random(0)
    lengths = [
        draw.randint(min(32, chosen.longest), chosen.longest) for _ in range(chosen.documents)
    ]
    console = Console()

    found = times(training(lengths, chosen.depth), chosen.repeats)
    shown = Table("batch", "tokens per CPU-second", "ratio", title=f"{sum(lengths)} tokens")
    for name, seconds in found.items():
        rate = sum(lengths) / seconds
        shown.add_row(name, f"{rate:.0f}", f"{found['padded'] / seconds:.2f}")
    console.print(shown)

    found = times(decoding(chosen.cached, chosen.depth), 10 * chosen.repeats)
    shown = Table("cached tokens", "ms", "of which attention", "rest", title="one more token")
    for count in chosen.cached:
        whole, part = (1e3 * found[kind, count] for kind in ("whole", "attention"))
        shown.add_row(str(count), f"{whole:.2f}", f"{part:.2f}", f"{whole - part:.2f}")
    console.print(shown)


if __name__ == "__main__":
    main()
