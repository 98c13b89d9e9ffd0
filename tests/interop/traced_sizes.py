"""Image models where torch traces them. Run by `test_traced_sizes.py`, without shape checks."""

import warnings
from functools import partial

import pytest
import timm
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mmpos
from mmpos.interop.timm import replace
from mmpos.models import Classifier, PatchEmbedding, Transformer

SIZES = [(64, 96), (96, 64), (128, 80), (80, 144), (160, 112)]
SLOTS = {"additive": None, "rotary": partial(mmpos.RotaryEncoding, base=100), "bias": mmpos.ALiBi}
SMALL = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}


def timms(**more):
    """With ``dynamic_img_pad`` no size is formatted into a message, which would fix it."""
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL, **more}).eval()
    replace(model, **SLOTS)
    return model


def ours():
    encoder = Transformer((4, 4), dim=48, depth=2, heads=3, class_token=True, **SLOTS)
    network = Classifier(PatchEmbedding(48, (16, 16)), encoder, {"class": 5}).eval()
    return Flat(network)


class Flat(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        return self.network(images)["class"]


@pytest.mark.parametrize(
    "model",
    [ours, partial(timms, dynamic_img_size=True, dynamic_img_pad=True)],
    ids=["mmpos", "timm"],
)
def test_one_graph_serves_all_sizes(model):
    torch._dynamo.reset()
    eager = model()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, backend=graphs, fullgraph=True, dynamic=True)
    first = None
    for size in SIZES:
        images = torch.randn(2, 3, *size)
        results = []
        for run in (eager, compiled):
            eager.zero_grad()
            out = run(images)
            out.square().sum().backward()
            results.append((out.detach(), *[weight.grad for weight in eager.parameters()]))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        first = graphs.frame_count if first is None else first
    assert graphs.frame_count == first


@pytest.mark.parametrize("model", [ours, timms])
def test_exported_models_give_the_same(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    eager, images = model(), torch.randn(1, 3, 64, 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = eager(images)
        program = torch.export.export(eager, (images,))
        torch.testing.assert_close(program.module()(images), expected)
        onnx = torch.onnx.export(eager, (images,), dynamo=True, verbose=False)
        assert onnx is not None
        onnx.save(tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (out,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=1e-5)
