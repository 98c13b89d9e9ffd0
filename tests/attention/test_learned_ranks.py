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
from mmpos.bias import BiasBlocks

torch.set_num_threads(1)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 23))

    def forward(self, kind):
        behind = torch.arange(12).unsqueeze(-1) - torch.arange(12) + 11
        if kind == "dense":
            return self.table[:, behind]
        return BiasBlocks(lambda a, b: self.table[:, behind[a:b]], (self.table,))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.bias = Table() if kind in ("dense", "blocks") else {
            "shaw": mmpos.bias.ShawBias, "xl": mmpos.bias.TransformerXLBias
        }[kind](3, head_dim=8)
        self.layers = nn.ModuleList(nn.Linear(24, 72) for _ in range(2))

    def forward(self, x):
        where = mmpos.positions.sequence(12)
        bias = self.bias(self.kind) if isinstance(self.bias, Table) else self.bias(where, where)
        prepared = mmpos.attention.prepare(12, 12, bias=bias, causal=True)
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
            x = x + mmpos.attend(q, k, v, prepared=prepared).transpose(1, 2).flatten(2)
        return x


def train(wrap, x, kind):
    torch.manual_seed(0)
    model = Net(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wrap(model)
    for _ in range(3):
        optimizer.zero_grad()
        run(x).square().mean().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def rank(index, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    for kind in ("dense", "blocks", "shaw", "xl"):
        x = torch.randn(4, 12, 24, generator=torch.Generator().manual_seed(1)).double()
        mine = train(nn.parallel.DistributedDataParallel, x[2 * index : 2 * index + 2], kind)
        torch.testing.assert_close(mine, train(lambda model: model, x, kind), rtol=0, atol=1e-12)
        both = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(both, mine)
        assert torch.equal(*both), kind
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank, args=(sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
def test_two_ranks_learn_a_bias_as_one_process_with_twice_the_batch(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path / "store")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr[-4000:]
