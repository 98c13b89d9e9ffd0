"""The derivative of a rotation, of every order and by every way that torch has."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import mmpos
from mmpos import Rotation

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:FutureWarning"  # torch's own, in forward derivatives
)
LAYOUTS = ["interleaved", "half"]


def turn(x, angles, layout="interleaved", start=0) -> torch.Tensor:
    return mmpos.rotate(x, Rotation(angles.cos(), angles.sin(), layout, start))


def plain(x, angles, layout="interleaved", start=0) -> torch.Tensor:
    """The same of ordinary operations."""
    pairs = angles.shape[-1]
    before, turned, after = x.split((start, 2 * pairs, x.shape[-1] - start - 2 * pairs), dim=-1)
    first = torch.arange(pairs) * (2 if layout == "interleaved" else 1)
    other = first + (1 if layout == "interleaved" else pairs)
    a, b, cos, sin = turned[..., first], turned[..., other], angles.cos(), angles.sin()
    out = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((before, out[..., torch.cat((first, other)).argsort()], after), dim=-1)


def random(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


CASES = [
    pytest.param((1, 2, 3), 0, "interleaved", id="shared"),
    pytest.param((1, 2, 2), 1, "half", id="shared, a part"),
    pytest.param((2, 1, 2, 2), 2, "interleaved", id="of each sample, a part"),
    pytest.param((2, 2, 3), 0, "half", id="of each head"),
]


@pytest.mark.parametrize(("table", "start", "layout"), CASES)
@pytest.mark.parametrize("learned", [False, True])
def test_derivatives_of_first_and_second_order(table, start, layout, learned):
    x, angles = random(2, 2, 2, 6), random(*table, grad=learned)
    call = partial(turn, layout=layout, start=start)
    if not learned:
        call, inputs = partial(call, angles=angles), (x,)
    else:
        inputs = (x, angles)
    ways = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": False}
    assert gradcheck(call, inputs, check_batched_forward_grad=True, **ways)
    del ways["check_forward_ad"]
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True, **ways)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_turn_back_in_float32_and_are_rounded_once(dtype, layout):
    x = torch.randn(2, 3, 7, 16).to(dtype).requires_grad_()
    angles, flowing = 300 * torch.randn(1, 7, 6), torch.randn(2, 3, 7, 16).to(dtype)
    (back,) = torch.autograd.grad(turn(x, angles, layout, 3), x, flowing)
    assert back.dtype == dtype
    expected = plain(flowing.double(), -angles.double(), layout, 3)
    torch.testing.assert_close(back, expected.to(dtype), rtol=1e-2, atol=2e-6)
    torch.testing.assert_close(back, mmpos.rotate(flowing, rotation(-angles, layout, 3)))


def rotation(angles, layout, start) -> Rotation:
    return Rotation(angles.cos(), angles.sin(), layout, start)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", [(1, 7, 6), (3, 7, 6), (2, 1, 7, 6)])
def test_learned_angles_have_the_gradient_of_ordinary_operations(table, dtype, layout):
    x = torch.randn(2, 3, 7, 16).to(dtype).requires_grad_()
    angles, flowing = torch.randn(table, requires_grad=True), torch.randn(2, 3, 7, 16).to(dtype)
    got = torch.autograd.grad(turn(x, angles, layout, 3), (x, angles), flowing)
    wide = plain(x.float(), angles, layout, 3)
    expected = torch.autograd.grad(wide, (x, angles), flowing.float())
    for actual, wanted in zip(got, expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(
            actual, wanted, rtol=1e-2 if dtype != angles.dtype else 1e-4, atol=1e-4
        )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_angles_and_scales_have_gradients(layout, scaled):
    x, flowing = random(2, 3, 5, 8), random(2, 3, 5, 8, grad=False)
    cos, sin, cos_b, sin_b = random(4, 1, 5, 3)
    scale = random(1, 5, 1) if scaled else None
    for second in (None, (cos_b, sin_b)):
        out = mmpos.rotate(x, Rotation(cos, sin, layout, 1, second, scale))
        leaves = [x, cos, sin, *(second or ()), *([] if scale is None else [scale])]
        grown = x if scale is None else x * scale
        twice = (cos, sin) if second is None else second
        order = [0, 1, 2, 3, 4, 5] if layout == "interleaved" else [0, 3, 1, 4, 2, 5]
        turned = grown[..., 1:7][..., order].unflatten(-1, (3, 2))
        a, b = turned.unbind(-1)
        pairs = torch.stack((a * cos - b * sin, a * twice[1] + b * twice[0]), -1).flatten(-2)
        back = torch.tensor(order).argsort()
        expected = torch.cat((grown[..., :1], pairs[..., back], grown[..., 7:]), -1)
        for got, wanted in zip(
            torch.autograd.grad(out, leaves, flowing, retain_graph=True),
            torch.autograd.grad(expected, leaves, flowing, retain_graph=True),
            strict=True,
        ):
            assert_same(got, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_activation_is_kept_unless_angles_are_learned(dtype, layout):
    leaf = torch.randn(2, 3, 7, 16).to(dtype).requires_grad_()
    for learned in (False, True):
        angles = torch.randn(1, 7, 6, requires_grad=learned)
        x = leaf * 1
        kept = weakref.ref(x)
        out = turn(x, angles, layout)
        del x
        gc.collect()
        assert (kept() is not None) == learned
        out.sum().backward()


IN_DIMS = [(0, None), (None, 0), (0, 0), (2, 1), (-1, 0)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("in_dims", IN_DIMS)
@pytest.mark.parametrize("table", [(1, 5, 3), (2, 1, 5, 3)])
def test_vmap_is_a_loop(table, in_dims, layout):
    def batched(shape, at):
        if at is None:
            return random(*shape, grad=False)
        return torch.stack([random(*shape, grad=False) for _ in range(4)], dim=at)

    x, angles = batched((2, 3, 5, 8), in_dims[0]), batched(table, in_dims[1])
    parts = [
        [t] * 4 if at is None else t.unbind(at) for t, at in zip((x, angles), in_dims, strict=True)
    ]
    expected = torch.stack([plain(a, b, layout, 1) for a, b in zip(*parts, strict=True)])
    call = partial(turn, layout=layout, start=1)
    assert_same(vmap(call, in_dims)(x, angles), expected)
    energy = lambda x, angles: call(x, angles).sin().sum()  # noqa: E731
    for number in (0, 1):
        got = vmap(grad(energy, number), in_dims)(x, angles)
        loop = [grad(energy, number)(a, b) for a, b in zip(*parts, strict=True)]
        assert_same(got, torch.stack(loop))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_function_transforms(layout):
    x, angles = random(2, 3, 4, grad=False), random(1, 3, 2, grad=False)
    call, expected = partial(turn, layout=layout), partial(plain, layout=layout)
    for number in (0, 1):
        wanted = jacrev(expected, number)(x, angles)
        for jacobian in (jacrev, jacfwd):
            assert_same(jacobian(call, number)(x, angles), wanted)
    energy, wanted = (lambda x, a, f=f: f(x, a).square().sin().sum() for f in (call, expected))
    for got, real in zip(
        hessian(energy, (0, 1))(x, angles), hessian(wanted, (0, 1))(x, angles), strict=True
    ):
        for one, other in zip(got, real, strict=True):
            assert_same(one, other)
    tangents = random(2, 3, 4, grad=False), random(1, 3, 2, grad=False)
    assert_same(jvp(call, (x, angles), tangents), jvp(expected, (x, angles), tangents))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_many_gradients_at_once(dtype, layout):
    x = torch.randn(2, 3, 5, 8).to(dtype).requires_grad_()
    angles, flowing = torch.randn(3, 5, 3, requires_grad=True), torch.randn(4, 2, 3, 5, 8).to(dtype)
    out = turn(x, angles, layout, 1)
    get = partial(torch.autograd.grad, out, (x, angles), retain_graph=True)
    together = get(flowing, is_grads_batched=True)
    for got, each in zip(together, zip(*map(get, flowing), strict=True), strict=True):
        torch.testing.assert_close(
            got, torch.stack(each), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
