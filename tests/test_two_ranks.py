import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
import mmpos
from mmpos.positions import grid

SLOTS = {
    "none": {},
    "sinusoidal": {"additive": mmpos.SinusoidalEncoding},
    "learned": {"additive": mmpos.LearnedEncoding},
    "rope": {"rotary": mmpos.RotaryEncoding},
    "alibi": {"bias": mmpos.ALiBi},
}


def step(wrap, x, slots):
    torch.manual_seed(0)
    model = mmpos.models.Transformer(
        (3, 4), dim=24, depth=1, heads=3, class_token=True, **slots
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wrap(model)
    for _ in range(3):
        optimizer.zero_grad()
        run(x, grid(3, 4), extent=(3, 4))[:, 0].square().mean().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def rank(index, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    for name, slots in SLOTS.items():
        x = torch.randn(4, 12, 24, generator=torch.Generator().manual_seed(1)).double()
        mine = step(nn.parallel.DistributedDataParallel, x[2 * index : 2 * index + 2], slots)
        torch.testing.assert_close(mine, step(lambda model: model, x, slots), rtol=0, atol=1e-12)
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both), name
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank, args=(sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
def test_two_ranks_are_one_process_with_twice_the_batch(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path / "store")],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-4000:]
