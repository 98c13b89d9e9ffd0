"""Count what processes exchange in a training step, for each encoding.

    python scripts/communication.py --processes 8

A vision transformer (``--size``, a grid of ``--grid`` patches) takes one step in one process, whose
group pretends to be of so many; what is handed to the group is counted, not derived. Columns, in
MB of float32:

``encoding``  gradients of the encoding's own parameters, of all those in ``all``
``ddp``       gradients that are summed over the processes (DistributedDataParallel)
``fsdp``      weights that are gathered, twice, and gradients that are scattered (`FullySharded`)
``shards``    keys and values that `SequenceShards` gathers forward, of one sequence, with what it
              exchanges once per forward pass; as many gradients go back

A ring sends, in each process of R, 2 (R − 1) / R of what is summed, and (R − 1) / R of what is
gathered or scattered.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import mmpos
from mmpos.attention import SequenceShards
from mmpos.models import Transformer
from tasks.optim import POSITIONS

ENCODINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "sinusoidal": {"additive": mmpos.SinusoidalEncoding},
    "learned": {"additive": mmpos.LearnedEncoding},
    "factorized": {"additive": mmpos.FactorizedEncoding},
    "RoPE": {"rotary": partial(mmpos.RotaryEncoding, base=100)},
    "mixed RoPE, each layer": {"rotary": mmpos.MixedRotaryEncoding, "per_layer": ["rotary"]},
    "ALiBi": {"bias": mmpos.ALiBi},
    "ALiBi, learned": {"bias": partial(mmpos.ALiBi, learned=True)},
    "T5": {"bias": mmpos.T5Bias},
    "Swin's table, each layer": {"bias": mmpos.RelativePositionBias, "per_layer": ["bias"]},
    "log-CPB, each layer": {"bias": mmpos.LogCPB, "per_layer": ["bias"]},
    "Transformer-XL": {"bias": mmpos.TransformerXLBias},
}

GATHERS = ("all_gather_single", "all_gather_into_tensor")  # their names in torch's releases
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")


@contextmanager
def counted(*names: str) -> Iterator[list[int]]:
    """Bytes handed to collectives of these names: the greater of what goes in and out."""
    found: list[int] = []

    def count(own: Callable, *args: Any, **named: Any) -> Any:
        sizes = []
        for part in (*args, *named.values()):
            tensors = part if isinstance(part, list) else [part]
            sizes.append(sum(t.nbytes for t in tensors if isinstance(t, Tensor)))
        found.append(max(sizes))
        return own(*args, **named)

    own = {name: getattr(distributed, name) for name in names if hasattr(distributed, name)}
    patches = [patch.object(distributed, n, partial(count, call)) for n, call in own.items()]
    for each in patches:
        each.start()
    try:
        yield found
    finally:
        for each in patches:
            each.stop()


def step(run: Callable[..., Tensor], x: Tensor, grid: Sequence[int], **options: Any) -> None:
    run(x, mmpos.positions.grid(*grid), extent=tuple(grid), **options).square().mean().backward()


def ddp(model: Transformer, x: Tensor, grid: Sequence[int]) -> int:
    wrapped, found = DistributedDataParallel(model), []

    def count(_, bucket):  # DistributedDataParallel refuses annotations that are strings
        found.append(bucket.buffer().nbytes)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, count)
    step(wrapped, x, grid)
    return sum(found)


def fsdp(model: Transformer, x: Tensor, grid: Sequence[int], processes: int) -> int:
    mesh = init_device_mesh("cpu", (processes,))
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh)
    with counted(*GATHERS, *SCATTERS) as found:
        step(model, x, grid)
    return sum(found)


def shards(model: Transformer, x: Tensor, grid: Sequence[int], processes: int) -> int:
    """Gathered forward, by a process that has its part of one sequence."""
    share = SequenceShards()
    own = share.cut(x.shape[1])
    alike = [(own.stop - own.start, 0)] * processes  # what others would tell
    positions = mmpos.positions.grid(*grid)[own]
    with (
        counted("all_gather") as found,
        patch.object(SequenceShards, "_exchange", lambda *args: alike),
        torch.no_grad(),
    ):
        model.eval()(x[:1, own], positions, extent=tuple(grid), shards=share)
    return sum(found)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--size", default="small")
    parser.add_argument("--grid", type=int, nargs=2, default=(16, 16))
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=list(ENCODINGS))
    chosen = parser.parse_args(argv)
    grid, processes = tuple(chosen.grid), chosen.processes
    distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    table = Table(title=f"MB a step, {processes} processes, {chosen.size}, {grid[0]} × {grid[1]}")
    for name in ("", "encoding", "all", "ddp", "fsdp", "shards"):
        table.add_column(name, justify="right" if name else "left")
    try:
        for name in chosen.encodings:

            def make(name: str = name) -> Transformer:
                torch.manual_seed(0)
                return Transformer(grid, size=chosen.size, **ENCODINGS[name])

            model = make()
            x = torch.randn(2, grid[0] * grid[1], model.dim)
            parts = [part for part in model.modules() if isinstance(part, POSITIONS)]
            own = {id(p): p for part in parts for p in part.parameters()}.values()
            figures = [
                sum(parameter.nbytes for parameter in own),
                sum(parameter.nbytes for parameter in model.parameters()),
                ddp(make(), x, grid),
                fsdp(make(), x, grid, processes),
                shards(make(), x, grid, processes),
            ]
            table.add_row(name, *(f"{figure / 1e6:.4g}" for figure in figures))
    finally:
        distributed.destroy_process_group()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
