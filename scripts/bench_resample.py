"""Time the resizing of tables against torch's and timm's general resamplers, on one CPU thread.

    python scripts/bench_resample.py

All ways are timed in turn, again and again, so that a busy machine slows each alike; figures are
medians, and the last column is how many times as long the quickest other takes. Each call forms
its matrices anew. One table on another grid, then one table on the grids of 64 images, 40 of them
different.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor
from torch.nn.functional import interpolate

from mmpos.resample import grid_table, grid_tables

PAIRS = [((14, 14), (24, 24)), ((16, 16), (37, 37)), ((37, 37), (16, 16))]
Ways = dict[str, Callable[[], Tensor]]


def one(old: tuple[int, int], new: tuple[int, int], dim: int) -> Ways:
    table = torch.randn(*old, dim)
    rows = table.flatten(0, 1).unsqueeze(0)

    def by_torch() -> Tensor:
        first = table.permute(2, 0, 1).unsqueeze(0)
        out = interpolate(first, size=new, mode="bicubic", antialias=True)
        return out.squeeze(0).permute(1, 2, 0).contiguous()

    return {
        "mmpos": lambda: grid_table(table, new),
        "torch": by_torch,
        "timm": lambda: resample_abs_pos_embed(rows, list(new), list(old), num_prefix_tokens=0),
    }


def many(old: tuple[int, int], dim: int, images: int = 64, different: int = 40) -> Ways:
    table = torch.randn(*old, dim)
    rows = table.flatten(0, 1).unsqueeze(0)
    draw = torch.Generator().manual_seed(0)
    cells = torch.randperm(21 * 21, generator=draw)[:different]  # sizes of 8 to 28
    sizes = [(8 + cell // 21, 8 + cell % 21) for cell in cells.tolist()]
    grids = sizes + [sizes[i] for i in torch.randint(different, (images - different,)).tolist()]

    def timm(grids: list[tuple[int, int]]) -> list[Tensor]:
        resized = [resample_abs_pos_embed(rows, list(g), list(old), 0) for g in grids]
        return [table.flatten(0, 1) for table in resized]

    def timm_once() -> Tensor:
        each = dict(zip(sizes, timm(sizes), strict=True))
        return torch.cat([each[grid] for grid in grids])

    return {
        "mmpos": lambda: grid_tables(table, grids),
        "timm": lambda: torch.cat(timm(grids)),
        "timm, once each": timm_once,
    }


def medians(ways: Ways, repeats: int) -> dict[str, float]:
    """Milliseconds of each way, after a check that they give the same."""
    expected = ways["mmpos"]().flatten()
    for way in ways.values():
        torch.testing.assert_close(way().flatten(), expected, rtol=0, atol=1e-4)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            taken[name].append(1e3 * (time.perf_counter() - begun))
    return {name: median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=50)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    columns = ("mmpos", "torch", "timm", "timm, once each")
    shown = Table("grids, D", *columns, "ratio", title="bicubic with antialias, float32: ms")
    cases = {
        f"{a}² → {b}², {d}": one((a, a), (b, b), d) for (a, _), (b, _) in PAIRS for d in (384, 768)
    }
    for dim in (384, 768):
        cases[f"16² → 64 grids, {dim}"] = many((16, 16), dim)
    with torch.no_grad():
        for name, ways in cases.items():
            found = medians(ways, repeats)
            least = min(value for way, value in found.items() if way != "mmpos")
            cells = [f"{found[way]:.2f}" if way in found else "" for way in columns]
            shown.add_row(name, *cells, f"{least / found['mmpos']:.1f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
