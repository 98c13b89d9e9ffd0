"""Pairs are turned as the formula says, however tensors lie in memory and whatever their dtype."""

from itertools import product

import pytest
import torch

import mmpos
from mmpos import Rotation
from mmpos.rotary import turn

LAYOUTS = ["interleaved", "half"]
SHAPE = (2, 3, 7, 27)  # 27 features: pairs are at even and odd offsets
TABLES = [(1, 7), (2, 1, 7), (3, 7), (2, 3, 7), (1, 1), (2, 1, 1, 7)]
UNIT = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def formula(x, rotation) -> torch.Tensor:
    """One pair after the other, in float64."""
    cos, sin, layout, start, second, scale, _ = rotation
    cos_b, sin_b = (cos, sin) if second is None else second
    out = x.double().clone() if scale is None else x.double() * scale
    given, pairs = out.clone(), cos.shape[-1]
    for pair in range(pairs):
        a, b = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + pairs)
        first, other = given[..., start + a], given[..., start + b]
        out[..., start + a] = first * cos[..., pair] - other * sin[..., pair]
        out[..., start + b] = first * sin_b[..., pair] + other * cos_b[..., pair]
    return out


def tables(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 400 * torch.randn(shape, dtype=torch.float64)
    return angles.cos().float(), angles.sin().float()


def assert_turned(out, x, rotation):
    """To the rounding of the result once, and that of float32 sums."""
    expected = formula(x, rotation)
    wide = torch.promote_types(x.dtype, rotation.cos.dtype)
    bound = 1.001 * UNIT[x.dtype] * expected.abs() + 8 * UNIT[wide] * (1 + x.double().abs().max())
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert ((out.double() - expected).abs() <= bound).all()
    start, end = rotation.start, rotation.start + 2 * rotation.cos.shape[-1]
    if rotation.scale is None:
        assert torch.equal(out[..., :start], x[..., :start])
        assert torch.equal(out[..., end:], x[..., end:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_formula(unchecked, table, dtype, layout):
    for start, pairs in ((0, 8), (3, 8), (11, 8), (4, 11), (0, 13), (1, 13)):
        x = 3 * torch.randn(SHAPE if len(table) < 4 else (2, *SHAPE)).to(dtype)
        rotation = Rotation(*tables(*table, pairs), layout, start)
        assert_turned(mmpos.rotate(x, rotation), x, rotation)


def test_values_by_hand():
    """A quarter turn, and 3 + 4i turned by the angle of 0.6 + 0.8i: -1.4 + 4.8i."""
    x = torch.tensor([[[1.0, 0.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[[0.0, 0.6]]]), torch.tensor([[[1.0, 0.8]]])
    turned = torch.tensor([[[0.0, 1.0, -1.4, 4.8]]])
    for layout, order in (("interleaved", [0, 1, 2, 3]), ("half", [0, 2, 1, 3])):
        out = mmpos.rotate(x[..., order], Rotation(cos, sin, layout))
        torch.testing.assert_close(out, turned[..., order])


def views(dtype) -> dict[str, torch.Tensor]:
    """Heads ``[2, 3, 7, 16]`` as they lie in memory."""
    numbers = torch.randn(2 * 7 * 3 * 3 * 16 + 1).to(dtype)
    qkv = numbers[:-1].view(2, 7, 3, 3, 16)
    wide = torch.randn(2, 3, 7, 27).to(dtype)
    return {
        "contiguous": torch.randn(2, 3, 7, 16).to(dtype),
        "of a projection": qkv[:, :, 1].transpose(1, 2),
        "at an odd place": numbers[1 : 1 + 2 * 3 * 7 * 16].view(2, 3, 7, 16),
        "with odd strides": wide[..., :16],
        "with odd strides at an odd place": wide[..., 5:21],
        "every other feature": torch.randn(2, 3, 7, 32).to(dtype)[..., ::2],
        "features first": torch.randn(16, 7, 3, 2).to(dtype).permute(3, 2, 1, 0),
        "one head for all": torch.randn(2, 1, 7, 16).to(dtype).expand(-1, 3, -1, -1),
        "one number": torch.randn(1, 1, 1, 1).to(dtype).expand(2, 3, 7, 16),
        "no batch": torch.randn(3, 7, 16).to(dtype),
        "three batches": torch.randn(2, 2, 1, 3, 7, 16).to(dtype),
    }


VIEWS = list(views(torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("block", [1, 100, 2**20])
def test_memory(monkeypatch, view, dtype, layout, block):
    """Also where one block holds less than a token, or several and a rest."""
    monkeypatch.setattr(turn, "BLOCK", block)
    for start, pairs in ((0, 8), (3, 5)):
        x = views(dtype)[view]
        before = x.clone()
        rotation = Rotation(*tables(1, 7, pairs), layout, start)
        out = mmpos.rotate(x, rotation)
        assert_turned(out, x, rotation)
        assert out.is_contiguous()
        assert torch.equal(x, before)
        assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("table", [(2, 1, 7), (3, 7), (2, 3, 1)], ids=str)
def test_blocks_take_their_own_part_of_the_tables(unchecked, monkeypatch, table, layout):
    for block, dtype in product((1, 40, 150, 400), (torch.float32, torch.bfloat16)):
        monkeypatch.setattr(turn, "BLOCK", block)
        x = torch.randn(2, 3, 7, 16).to(dtype)
        rotation = Rotation(*tables(*table, 8), layout)
        assert_turned(mmpos.rotate(x, rotation), x, rotation)


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 7, 16), (3, 0, 4), (0, 3, 4), (2, 9, 5), (1, 1)])
@pytest.mark.parametrize("block", [1, 6, 30, 113, 10**6])
def test_blocks_cover_all_once(monkeypatch, shape, block):
    monkeypatch.setattr(turn, "BLOCK", block)
    seen = torch.zeros(shape, dtype=torch.long)
    for index in turn._blocks(seen.shape):
        assert seen[index].numel() <= max(block, shape[-1])
        seen[index] += 1
    assert seen.eq(1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 0, 16), (0, 3, 7, 16), (2, 0, 7, 16)])
def test_nothing_to_turn(shape, dtype, layout):
    x = torch.randn(shape).to(dtype).requires_grad_()
    rotation = Rotation(*tables(1, shape[-2], 6), layout, 1)
    out = mmpos.rotate(x, rotation)
    out.sum().backward()
    assert out.shape == shape and out.dtype == dtype and x.grad.shape == shape
    assert mmpos.rotate_(x.detach(), rotation).shape == shape


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
def test_scale_multiplies_all_features(dtype, layout):
    x = torch.randn(2, 3, 7, 16).to(dtype)
    for start, pairs in ((0, 8), (0, 5), (3, 5), (0, 0)):
        for scale in (torch.rand(1, 7, 1) + 1, torch.rand(2, 1, 7, 1) + 1):
            rotation = Rotation(*tables(1, 7, pairs), layout, start, scale=scale)
            assert_turned(mmpos.rotate(x, rotation), x, rotation)


def test_a_rotation_of_no_pairs_changes_nothing():
    x = torch.randn(2, 3, 7, 16)
    assert mmpos.rotate(x, Rotation(*tables(1, 7, 0), "half")) is x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
def test_second_angles(dtype, layout):
    x = torch.randn(2, 3, 7, 16).to(dtype)
    for (start, pairs), scale in product(((0, 8), (3, 6)), (None, torch.rand(1, 7, 1))):
        second = tables(1, 7, pairs)
        rotation = Rotation(*tables(1, 7, pairs), layout, start, second, scale)
        assert_turned(mmpos.rotate(x, rotation), x, rotation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_may_be_wider_or_narrower_than_what_is_turned(layout):
    cos, sin = tables(1, 7, 8)
    x = torch.randn(2, 3, 7, 16)
    exact = Rotation(cos.double(), sin.double(), layout)
    assert_turned(mmpos.rotate(x, exact), x, exact)
    rough = Rotation(cos.bfloat16(), sin.bfloat16(), layout)
    out = mmpos.rotate(x.bfloat16(), rough)
    expected = formula(x.bfloat16(), rough)
    assert ((out.double() - expected).abs() <= 2**-8 * 1.001 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
def test_no_angle_changes_no_bit_and_infinite_pairs_stay_alone(dtype, layout):
    x = torch.randn(2, 3, 7, 22).to(dtype)
    x[..., 3] = -0.0
    still = Rotation(torch.ones(1, 7, 11), torch.zeros(1, 7, 11), layout)
    assert torch.equal(mmpos.rotate(x, still), x)
    x[0, 0, 0, 4] = torch.inf
    out = mmpos.rotate(x, Rotation(*tables(1, 7, 11), layout))
    assert out.isfinite().logical_not().sum() <= 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", UNIT)
def test_autocast_and_other_devices_compute_the_same(dtype, layout):
    x, rotation = torch.randn(2, 3, 7, 16).to(dtype), Rotation(*tables(1, 7, 6), layout, 2)
    for same in (rotation, rotation._replace(second=tables(1, 7, 6))):
        plain = mmpos.rotate(x, same)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(mmpos.rotate(x, same), plain)
    meta = Rotation(*(table.to("meta") for table in rotation[:2]), layout, 2)
    assert mmpos.rotate(x.to("meta"), meta).shape == x.shape
    wide = (table.to(torch.promote_types(dtype, torch.float32)) for table in rotation[:2])
    assert_turned(turn.formula(x, *wide, layout, 2), x, rotation)


def test_features_alone_are_no_heads(unchecked):
    with pytest.raises(ValueError, match=r"x has shape \(16,\), read as \[..., head, length"):
        mmpos.rotate(torch.randn(16), Rotation(torch.ones(8), torch.zeros(8), "half"))
