"""Where torch traces a rotation. Torch cannot trace the shape checks: run again without them."""

import os
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import mmpos
from mmpos import Rotation, rotate_

LENGTHS = (7, 12, 30, 9, 5, 7)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
LAYOUTS = ["interleaved", "half"]

if not os.environ.get("JAXTYPING_DISABLE"):

    def test_compiled_and_exported_rotations():
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--show-capture=no", __file__],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAXTYPING_DISABLE": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

else:

    def turn(x, angles, layout="interleaved", start=0):
        return mmpos.rotate(x, Rotation(angles.cos(), angles.sin(), layout, start))

    def assert_near(actual, expected, dtype):
        rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("learned", [False, True])
    def test_one_graph_for_all_lengths_with_gradients(learned, dtype, layout):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(turn, backend=graphs, fullgraph=True)
        for length in LENGTHS:
            x = torch.randn(2, 3, length, 16).to(dtype).requires_grad_()
            angles = torch.randn(3 if learned else 1, length, 6, requires_grad=learned)
            inputs = (x, angles) if learned else (x,)
            results = []
            for run in (compiled, turn):
                out = run(x, angles, layout, 3)
                grads = torch.autograd.grad(out.float().sin().sum(), inputs)
                results.append((out.detach(), *grads))
                assert out.dtype == dtype
            for actual, expected in zip(*results, strict=True):
                assert_near(actual, expected, dtype)
        assert graphs.frame_count <= 2

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_in_place_scale_and_second_angles(dtype, layout):
        torch._dynamo.reset()

        def call(x, cos, sin, scale):
            once = mmpos.rotate(x, Rotation(cos, sin, layout, second=(sin, cos), scale=scale))
            return rotate_(once, Rotation(cos, sin, layout, scale=scale))

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for length in (5, 8, 6):
            inputs = torch.randn(2, 3, length, 16).to(dtype), *torch.randn(2, 1, length, 8)
            scale = torch.rand(1, length, 1)
            assert_near(compiled(*inputs, scale), call(*inputs, scale), dtype)

    @pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_inductor(layout):
        torch._dynamo.reset()
        compiled = torch.compile(turn, fullgraph=True, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16):
            x, angles = torch.randn(2, 3, 12, 16).to(dtype).requires_grad_(), torch.randn(1, 12, 8)
            flowing = torch.randn(2, 3, 12, 16).to(dtype)
            for run in (compiled, turn):
                out = run(x, angles, layout)
                (back,) = torch.autograd.grad(out, x, flowing)
                assert_near(out, turn(x, angles, layout), dtype)
                assert_near(back, turn(flowing, -angles, layout), dtype)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_exported_and_scripted_with_any_length(dtype, layout):
        class Turn(torch.nn.Module):
            def forward(self, x, angles):
                return turn(x, angles, layout, 1)

        def inputs(length):
            return torch.randn(2, 3, length, 16).to(dtype), torch.randn(1, length, 6)

        length = torch.export.Dim("length", min=2, max=4096)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                Turn(), inputs(5), dynamic_shapes=({2: length}, {1: length})
            ).module()
            traced = torch.jit.trace(Turn(), inputs(5), check_trace=False)
        for given in map(inputs, (5, 300, 2)):
            assert_near(exported(*given), Turn()(*given), dtype)
            assert_near(traced(*given), Turn()(*given), dtype)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_function_transforms_within_compiled_code(layout):
        x, angles = torch.randn(4, 2, 5, 8), torch.randn(4, 1, 5, 4)

        def energy(x, angles):
            return turn(x, angles, layout).sin().sum()

        for call in (torch.vmap(turn), torch.vmap(torch.func.grad(energy, (0, 1)))):
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(compiled(x, angles), call(x, angles))

    def test_the_benchmark(tmp_path):
        script = Path(__file__).parents[2] / "scripts" / "bench_rotary.py"
        tiny = ["--size", "2", "3", "9", "8", "--repeats", "2", "--threads", "1"]
        given = ["--rows", "compiled", "--backend", "aot_eager", "--json", str(tmp_path / "b.json")]
        runpy.run_path(str(script))["main"]([*tiny, *given])
        assert '"graphs": {' in (tmp_path / "b.json").read_text(encoding="utf-8")
