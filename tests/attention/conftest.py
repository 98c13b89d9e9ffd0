import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmpos.attention import gradients


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
