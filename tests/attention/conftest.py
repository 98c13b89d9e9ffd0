from __future__ import annotations

import inspect
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mmpos
from mmpos.attention import gradients

HEADS, HEAD_DIM = 3, 16
GRIDS = {1: (700,), 2: (5, 290), 3: (2, 3, 270)}
VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))


def _concrete(base: type) -> list[type]:
    found = [] if inspect.isabstract(base) else [base]
    for derived in base.__subclasses__():
        found += _concrete(derived)
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


@pytest.fixture
def concrete():
    return _concrete


@dataclass
class Content:
    """A bias that looks at content, and what it is tried on."""

    bias: mmpos.bias.ContentBias

    def cells(self, count: int, seed: int = 0) -> Tensor:
        """Cells of the grid in random order, those in its middle first."""
        found = mmpos.positions.grid(*self.bias.axes)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
        middle = len(found) // 2
        near = found[middle - 20 : middle + 20][order[order < 40]]  # some offsets have vectors
        return torch.cat((near, found[order]))[:count]

    def qkv(self, length: int, batch: int = 2, seed: int = 1, heads: int = HEADS):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, batch, heads, length, HEAD_DIM, generator=generator).unbind(0)

    def run(self, positions: Tensor, tensors, bias=None, **visible) -> Tensor:
        terms = (bias or self.bias)(positions, positions)
        return mmpos.attend(*tensors, bias=terms, **visible)


CASES = [
    pytest.param((cls, named, axes), id="-".join([cls.__name__, *map(str, named), f"{axes}d"]))
    for cls in _concrete(mmpos.bias.ContentBias)
    for named in VARIANTS["ARGUMENTS"].get(cls.__name__, [{"head_dim": HEAD_DIM}])
    for axes in VARIANTS["AXES"].get(cls.__name__, GRIDS)
]


@pytest.fixture(params=CASES)
def content(request) -> Content:
    cls, named, axes = request.param
    torch.manual_seed(0)
    return Content(cls(HEADS, GRIDS[axes], **named).eval())


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in tree_leaves(out):
            if isinstance(part, torch.Tensor):
                own = part.untyped_storage().nbytes() // part.element_size()
                self.numbers = max(self.numbers, own)
        return out


@pytest.fixture
def largest():
    return Largest()


@pytest.fixture(params=["whole", "blocks"])
def small_blocks(request, monkeypatch):
    """Blocks as they come, or of two queries and one head, for tensors that are small."""
    if request.param == "blocks":
        for name, size in (("_ROWS", 2), ("_FORMED", 1), ("_SCORES", 1)):
            monkeypatch.setattr(gradients, name, size)
