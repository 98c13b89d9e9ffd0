"""Lengths in compiled and exported code. Run by `test_lengths.py`, without shape checks."""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos.frequencies import DynamicNTK, LongRoPE
from mmpos.positions import sequence
from mmpos.rotary import MRoPE, RotaryEncoding

ENCODINGS = [
    RotaryEncoding(
        16,
        extension=LongRoPE(
            short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_length=64, factor=8
        ),
    ),
    MRoPE(16, 1, extension=DynamicNTK(factor=2, original_length=64)),
]


@pytest.fixture(params=ENCODINGS, ids=lambda e: f"{type(e).__name__}-{type(e.extension).__name__}")
def encoding(request):
    return request.param


class Whole(torch.nn.Module):
    """A model that passes on the number of its tokens."""

    def __init__(self, encoding, each):
        super().__init__()
        self.encoding, self.each = encoding, each

    def forward(self, positions, lengths):
        length = lengths if self.each else positions.shape[-2]
        return tuple(self.encoding(positions, length=length)[:2])


@pytest.mark.parametrize("each", [False, True])
def test_compiled(encoding, each):
    torch._dynamo.reset()
    model = Whole(encoding, each)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    counts = []
    for length in (5, 40, 300, 77):
        args = sequence(length), torch.tensor([length, 3 * length])
        for a, b in zip(compiled(*args), model(*args), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * 4, "the first call compiles for all lengths"


@pytest.mark.parametrize("each", [False, True])
def test_exported(encoding, each):
    model = Whole(encoding, each)
    length = torch.export.Dim("length", min=2, max=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(
            model, (sequence(9), torch.tensor([9, 27])), dynamic_shapes=({0: length}, None)
        ).module()
    for tokens in (5, 40, 300):
        args = sequence(tokens), torch.tensor([tokens, 3 * tokens])
        for a, b in zip(exported(*args), model(*args), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
