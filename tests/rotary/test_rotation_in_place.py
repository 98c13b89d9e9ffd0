import pytest
import torch

import mmpos
from mmpos import Rotation, rotate_
from mmpos.rotary import turn

LAYOUTS = ["interleaved", "half"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rotation(layout, *table: int, start: int = 0, **other) -> Rotation:
    angles = torch.randn(table)
    return Rotation(angles.cos(), angles.sin(), layout, start, **other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", [(1, 7, 8), (2, 1, 7, 5), (3, 7, 5)], ids=str)
@pytest.mark.parametrize("block", [100, 2**20])
def test_as_rotate(monkeypatch, block, table, dtype, layout):
    monkeypatch.setattr(turn, "BLOCK", block)
    for start in (0, 3, 4):
        x = torch.randn(2, 3, 7, 22).to(dtype)
        turning = rotation(layout, *table, start=start)
        expected = mmpos.rotate(x, turning)
        where = x.data_ptr()
        assert rotate_(x, turning) is x
        assert x.data_ptr() == where
        torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_change_their_own_part_of_a_projection(dtype, layout):
    turning = rotation(layout, 1, 7, 8)
    qkv = torch.randn(2, 7, 3, 3, 16).to(dtype)
    before = qkv.clone()
    q = qkv[:, :, 0].transpose(1, 2)
    rotate_(q, turning)
    expected = mmpos.rotate(before[:, :, 0].transpose(1, 2), turning)
    torch.testing.assert_close(qkv[:, :, 0].transpose(1, 2), expected)
    assert torch.equal(qkv[:, :, 1:], before[:, :, 1:])
    odd = torch.randn(2, 3, 7, 33).to(dtype)[..., 1::2]
    expected = mmpos.rotate(odd, turning)
    torch.testing.assert_close(rotate_(odd, turning), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_second_angles_and_no_pairs(dtype, layout):
    scale = torch.rand(1, 7, 1) + 1
    second = torch.randn(1, 7, 8), torch.randn(1, 7, 8)
    for other in ({"scale": scale}, {"second": second}, {"scale": scale, "second": second}):
        for table in ((1, 7, 8), (1, 7, 0)):
            if table[-1] == 0 and "second" in other:
                continue
            for head_dim in (16, 18):
                x = torch.randn(2, 3, 7, head_dim).to(dtype)
                turning = rotation(layout, *table, **other)
                expected = mmpos.rotate(x, turning)
                torch.testing.assert_close(rotate_(x, turning), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inference_mode_vmap_and_forward_derivatives(layout):
    turning = rotation(layout, 1, 7, 8)
    x, tangent = torch.randn(2, 2, 3, 7, 16)
    expected = mmpos.rotate(x, turning)
    with torch.inference_mode():
        torch.testing.assert_close(rotate_(x.clone(), turning), expected)
    torch.testing.assert_close(torch.func.vmap(lambda x: rotate_(x.clone(), turning))(x), expected)
    _, forward = torch.func.jvp(lambda x: rotate_(x.clone(), turning), (x,), (tangent,))
    torch.testing.assert_close(forward, mmpos.rotate(tangent, turning))


def test_what_needs_a_gradient_is_not_overwritten():
    turning, x = rotation("half", 1, 7, 8), torch.randn(2, 3, 7, 16)
    learned = turning._replace(cos=turning.cos.clone().requires_grad_())
    with pytest.raises(ValueError, match="overwrites x, and the rotation requires a gradient: use"):
        rotate_(x, learned)
    with torch.no_grad():
        torch.testing.assert_close(rotate_(x.clone(), learned), mmpos.rotate(x, turning))
    for needed in (x.clone().requires_grad_(), x.clone().requires_grad_() * 1):
        with pytest.raises(ValueError, match="overwrites x, and x requires a gradient: use rotate"):
            rotate_(needed, turning)
        with torch.no_grad(), pytest.raises(ValueError, match="x requires a gradient"):
            rotate_(needed, turning)


def test_shared_memory_is_not_overwritten():
    turning = rotation("half", 1, 7, 8)
    for shared in (
        torch.randn(2, 1, 7, 16).expand(-1, 3, -1, -1),
        torch.randn(2, 3, 7, 1).expand(-1, -1, -1, 16),
        torch.randn(2, 3, 22).unfold(-1, 16, 1),
    ):
        with pytest.raises(ValueError, match=r"share memory.*use rotate, or x\.contiguous"):
            rotate_(shared, turning)
    single = torch.randn(3, 7, 16).as_strided((1, 3, 7, 16), (0, 112, 16, 1))  # of one batch
    assert rotate_(single, turning) is single


def test_it_checks_as_rotate_does(unchecked):
    with pytest.raises(ValueError, match="x has 8 features in a head"):
        rotate_(torch.randn(1, 3, 7, 8), rotation("half", 1, 7, 8))
    with pytest.raises(TypeError, match=r"floating to be turned, got torch\.int64"):
        rotate_(torch.ones(1, 3, 7, 16, dtype=torch.long), rotation("half", 1, 7, 8))
