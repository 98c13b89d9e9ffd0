"""Law 10 where torch traces the code. Run by `test_traced.py`, without shape checks."""

import runpy
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

import mmpos
from mmpos.positions import absent, join

LENGTHS = (7, 12, 30, 9, 7)
ONE_AXIS = [
    name
    for name, axes in runpy.run_path(str(Path(__file__).with_name("variants.py")))["AXES"].items()
    if 2 not in axes
]
DYNAMIC = torch.export.Dim("length", min=2, max=4096)


@pytest.fixture(autouse=True)
def _two_axes_stand_for_all(request):
    for name in {"case", "encoding_case"} & set(request.fixturenames):
        case = request.getfixturevalue(name)
        if len(case.grid) != 2 and type(case.encoding).__name__ not in ONE_AXIS:
            pytest.skip("tracing takes long, and two axes stand for all")


def plain(case):
    """The encoding as a function of one tensor, which gives tensors."""
    if case.base is mmpos.AttentionBias:
        return lambda positions: (case.encoding(positions, positions),)
    if case.base is mmpos.RotaryEncoding:
        return lambda positions: tuple(case.encoding(positions)[:2])
    return lambda positions: (case.encoding(positions),)


def transformer(case):
    slot = {
        None: {},
        mmpos.AdditiveEncoding: {"additive": case.encoding},
        mmpos.RotaryEncoding: {"rotary": case.encoding},
        mmpos.AttentionBias: {"bias": case.encoding},
    }[case.base]
    return mmpos.models.Transformer(
        case.grid, dim=48, depth=2, heads=3, class_token=True, registers=1, **slot
    ).eval()


def test_every_encoding_compiles_whole_and_once_for_all_lengths(encoding_case):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    eager = plain(encoding_case)
    compiled = torch.compile(eager, backend=graphs, fullgraph=True)
    prefix = absent(1, len(encoding_case.grid))
    compiled(join(prefix, encoding_case.cells(5)))
    first = graphs.frame_count
    for length in LENGTHS:
        positions = join(prefix, encoding_case.cells(length))
        for a, b in zip(compiled(positions), eager(positions), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    assert graphs.frame_count <= first + 1, "one graph more, for a length that is not fixed"


class Plain(torch.nn.Module):
    """The encoding as a module of one tensor, which gives tensors."""

    def __init__(self, case):
        super().__init__()
        self.encoding = case.encoding
        self.call = plain(case)

    def forward(self, positions):
        return self.call(positions)


def test_onnx_gives_what_the_encoding_gives(encoding_case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    prefix = absent(1, len(encoding_case.grid))
    positions = join(prefix, encoding_case.cells(11))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Plain(encoding_case).eval(),
            (positions,),
            dynamo=True,
            dynamic_shapes=({0: DYNAMIC},),
            verbose=False,
        )
    program.save(tmp_path / "encoding.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "encoding.onnx")
    for length in (4, 30):
        positions = join(prefix, encoding_case.cells(length))
        out = session.run(None, {session.get_inputs()[0].name: positions.numpy()})
        for a, b in zip(out, plain(encoding_case)(positions), strict=True):
            torch.testing.assert_close(torch.from_numpy(a), b, rtol=0, atol=2e-5)


def test_transformer_exports_with_a_dynamic_length(case):
    model = transformer(case)
    x, positions = torch.randn(2, 12, 48), case.cells(12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        exported = torch.export.export(
            model, (x, positions), dynamic_shapes=({1: DYNAMIC}, {0: DYNAMIC})
        ).module()
    for length in LENGTHS:
        x, positions = torch.randn(2, length, 48), case.cells(length, seed=length)
        torch.testing.assert_close(
            exported(x, positions), model(x, positions), rtol=1e-5, atol=1e-5
        )


FIXED = {
    "additive": mmpos.SinusoidalEncoding,
    "rotary": mmpos.RotaryEncoding,
    "bias": mmpos.ALiBi,
}


@pytest.mark.parametrize(
    ("backend", "slots"),
    [
        pytest.param(
            "inductor",
            FIXED,
            marks=pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler"),
        ),
        ("aot_eager", {"additive": mmpos.LearnedEncoding}),
    ],
)
def test_compiled_transformer_is_the_eager_one_with_its_gradients(backend, slots):
    torch._dynamo.reset()
    model = mmpos.models.Transformer((2, 300), dim=48, depth=1, heads=3, class_token=True, **slots)
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    compiled(torch.randn(2, 5, 48), mmpos.positions.grid(2, 300)[:5])
    first = graphs.frame_count
    for length in LENGTHS:
        x, positions = torch.randn(2, length, 48), mmpos.positions.grid(2, 300)[-length:]
        losses = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(x, positions)
            out.square().mean().backward()
            losses.append((out.detach(), *[weight.grad for weight in model.parameters()]))
        for a, b in zip(*losses, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == first


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_with_the_score_mod_is_dense_attention(bias_case):
    bias, queries, keys = bias_case.encoding, bias_case.cells(5, 3), bias_case.cells(11, 4)
    keys = join(absent(1, len(bias_case.grid)), keys)
    q, k, v = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 12, 16), torch.randn(2, 3, 12, 16)
    with torch.no_grad():
        dense = mmpos.attend(q, k, v, bias=bias(queries, keys))
        flex = flex_attention(q, k, v, score_mod=bias.score_mod(queries, keys))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)
