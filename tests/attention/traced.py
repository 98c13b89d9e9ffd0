"""Attention where torch traces the code. Run by `test_traced.py`, without shape checks."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mmpos
from mmpos.bias import BiasBlocks

LENGTHS = (7, 30, 9)
DYNAMIC = torch.export.Dim("length", min=2, max=4096)
HEADS = 3


class Learned(nn.Module):
    """One attention layer whose bias is learned, in each of the forms that attention takes."""

    def __init__(self, kind, masked):
        super().__init__()
        self.kind, self.masked = kind, masked
        self.table = nn.Parameter(torch.randn(HEADS, 200))
        content = {
            "shaw": mmpos.bias.ShawBias,
            "xl": mmpos.bias.TransformerXLBias,
            "deberta": mmpos.bias.DisentangledBias,
        }.get(kind)
        self.content = content(HEADS, head_dim=8, std=0.5) if content else None
        self.qkv = nn.Linear(24, 72)

    def forward(self, x):
        length = x.shape[1]
        behind = torch.arange(length).unsqueeze(-1) - torch.arange(length) + 100
        bias = keys = None
        if self.content is not None:
            where = mmpos.positions.sequence(length)
            bias = self.content(where, where)
        elif self.kind == "dense":
            bias = self.table[:, behind]
        elif self.kind == "blocks":
            bias = BiasBlocks(lambda a, b: self.table[:, behind[a:b]], (self.table,))
        elif self.kind == "keys":
            keys = self.table[:, :1] * torch.arange(length)
        mask = torch.arange(length).expand(len(x), length) != 1 if self.masked else None
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        return mmpos.attend(q, k, v, bias=bias, key_bias=keys, causal=True, mask=mask)


KINDS = ("dense", "blocks", "keys", "shaw", "xl", "deberta")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["causal", "masked"])
def layer(request, kind):
    return Learned(kind, request.param)


def grown(layer, run, x):
    layer.zero_grad()
    out = run(x)
    (out * torch.linspace(-1, 2, 8)).sum().backward()
    return [out.detach(), *(part.grad for part in layer.parameters() if part.grad is not None)]


def test_compiled_whole_and_once_for_all_lengths_with_gradients(layer):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=graphs, fullgraph=True, dynamic=True)
    compiled(torch.randn(2, 5, 24))
    first = graphs.frame_count
    for length in LENGTHS:
        x = torch.randn(2, length, 24)
        for a, b in zip(grown(layer, compiled, x), grown(layer, layer, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == first


def test_compiled_under_autocast(kind):
    layer = Learned(kind, False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(2, 9, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(x), layer(x), rtol=2e-2, atol=2e-2)


def test_attention_compiled_with_what_was_prepared_before():
    q, k, v = torch.randn(3, 2, HEADS, 9, 8).unbind(0)
    bias = torch.randn(HEADS, 9, 9, requires_grad=True)
    once = mmpos.attention.prepare(9, 9, bias=bias, causal=True)
    compiled = torch.compile(mmpos.attend, backend="aot_eager", fullgraph=True)
    found = []
    for run in (compiled, mmpos.attend):
        bias.grad = None
        out = run(q, k, v, prepared=once)
        out.square().sum().backward()
        found.append((out.detach(), bias.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_exported_with_a_dynamic_length(layer):
    layer.eval()
    x = torch.randn(2, 12, 24)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({1: DYNAMIC},)).module()
        for length in LENGTHS:
            x = torch.randn(2, length, 24)
            torch.testing.assert_close(exported(x), layer(x), rtol=1e-4, atol=1e-5)
