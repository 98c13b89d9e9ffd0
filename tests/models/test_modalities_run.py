"""Several modalities in one sequence: in two processes, compiled and exported."""

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
from mmpos.models import Classifier, FrameEmbedding, Modalities, PatchEmbedding, Symbols
from mmpos.models import Transformer

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(1)
TEXT = torch.randint(9, (2, 4), generator=draw)
IMAGE = torch.randn(2, 1, 4, 4, generator=draw).double()
AUDIO = torch.randn(1, 3, 6, generator=draw).double()
HAS = {"audio": torch.tensor([True, False])}


def step(layout, wrap, inputs, masks=None):
    torch.manual_seed(0)
    made = {"text": Symbols(24, 9), "image": PatchEmbedding(24, (2, 2), 1)}
    tokens = Modalities({**made, "audio": FrameEmbedding(24, 3)}, layout)
    grid = tokens.grid({"text": (4,), "image": (2, 2), "audio": (3,)})
    encoder = Transformer(grid, dim=24, depth=1, heads=2, rotary=mmpos.RotaryEncoding)
    model = Classifier(tokens, encoder, {"kind": 3}, pool="mean").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    run = wrap(model)
    for _ in range(3):
        optimizer.zero_grad()
        run(inputs, masks)["kind"].square().sum(-1).mean().backward()
        optimizer.step()
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert (after != before).any()
    return after


def rank(index, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    own = {"text": TEXT[index, None], "image": IMAGE[index, None]}
    own |= {} if index else {"audio": AUDIO}
    both = {"text": TEXT, "image": IMAGE, "audio": torch.cat((AUDIO, torch.nan * AUDIO))}
    for layout in ("missing", "mrope", "sequence"):
        mine = step(layout, nn.parallel.DistributedDataParallel, own)
        whole = step(layout, lambda model: model, both, HAS)
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)
        each = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(each, mine)
        assert torch.equal(*each), layout
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank, args=(sys.argv[1],), nprocs=2, start_method="fork")
"""

TRACED = """
import torch
from mmpos.models import Modalities, PatchEmbedding, Symbols, TubeletEmbedding

made = {
    "text": Symbols(8, 5),
    "image": PatchEmbedding(8, (2, 2), 1),
    "video": TubeletEmbedding(8, (2, 2, 2), 1),
}
inputs = {"text": torch.randint(5, (2, 3)), "image": torch.randn(2, 1, 4, 4)}
text = torch.tensor([[True] * 3, [True, False, False]])
masks = {"text": text, "image": torch.tensor([False, True])}
for layout in ("missing", "mrope", "sequence"):
    torch._dynamo.reset()
    both = Modalities(made, layout)
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    whole = {**inputs, "video": torch.randn(2, 1, 3, 4, 4)}
    for given in ((inputs,), (inputs, masks), (whole,)):
        for got, wanted in zip(compiled(*given), both(*given), strict=True):
            assert (got is None) == (wanted is None), layout
            if wanted is not None:
                torch.testing.assert_close(got, wanted, equal_nan=True)


class Of(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.both = both

    def forward(self, text, mask, image, real, clip, frames):
        inputs = {"text": text, "image": image, "video": clip}
        found = self.both(inputs, {"text": mask, "image": real, "video": frames})
        return found.values, found.positions, found.mask


for layout in ("missing", "mrope", "sequence"):
    both = Modalities(made, layout).eval()
    rows, length = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "length"))
    clip = torch.randn(2, 1, 3, 4, 4), torch.arange(3) < torch.tensor([[3], [2]])
    image = inputs["image"], torch.ones(2, 4, 4, dtype=torch.bool)
    given = inputs["text"], text, *image, *clip
    shapes = ({0: rows, 1: length}, {0: rows, 1: length}, *[{0: rows}] * 4)
    exported = torch.export.export(Of(), given, dynamic_shapes=shapes).module()
    other = torch.randint(5, (3, 7)), torch.arange(7) < torch.tensor([[7], [2], [5]])
    other = (*other, *(torch.cat((part, part[:1])) for part in (*image, *clip)))
    for got, wanted in zip(exported(*other), Of()(*other), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)
"""


def run(code: str, *arguments: object, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.skipif(sys.platform != "linux", reason="forks its ranks")
def test_a_rank_without_sound_trains_beside_one_with_it(tmp_path: Path) -> None:
    run(RANKS, tmp_path / "store")


def test_compiled_and_exported_code_gives_the_same() -> None:
    run(TRACED, JAXTYPING_DISABLE="1")
