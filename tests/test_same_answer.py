"""Law 10: the same call gives the same answer, whatever was done before or around it."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import mmpos
from mmpos import coordinates
from mmpos.positions import absent, join


@pytest.fixture
def positions(encoding_case):
    return join(absent(1, len(encoding_case.grid)), encoding_case.cells(11))


@pytest.fixture
def expected(encoding_case, values, positions):
    return values(encoding_case, positions)


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def is_fixed(case) -> bool:
    return not list(case.encoding.parameters())


def test_a_second_call_after_others(encoding_case, values, positions, expected):
    for length in (1, 40, 3):
        values(encoding_case, encoding_case.cells(length, seed=length))
    assert_same(values(encoding_case, positions), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_rounds_what_is_learned_and_nothing_else(
    encoding_case, values, positions, expected, dtype
):
    cast = copy.deepcopy(encoding_case.encoding).to(dtype)
    out = values(encoding_case, positions, cast)
    if is_fixed(encoding_case):
        assert_same(out, expected)
    rounded = copy.deepcopy(cast).float()
    for a, b in zip(out, values(encoding_case, positions, rounded), strict=True):
        torch.testing.assert_close(a.float(), b.to(dtype).float() if a.dtype == dtype else b)
    assert_same(values(encoding_case, positions), expected)


def test_autocast(encoding_case, values, positions, expected):
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(values(encoding_case, positions), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(encoding_case, values, expected, dtype):
    """Trainers in true half precision set it around the forward pass, and around construction."""
    torch.set_default_dtype(dtype)
    try:
        rebuilt = type(encoding_case.encoding)(
            {"AdditiveEncoding": 48, "RotaryEncoding": 16, "AttentionBias": 3}[
                encoding_case.base.__name__
            ],
            encoding_case.grid,
            **encoding_case.named,
        )
        positions = join(absent(1, len(encoding_case.grid)), encoding_case.cells(11))
        same = encoding_case.encoding if not is_fixed(encoding_case) else rebuilt
        assert_same(values(encoding_case, positions, same.eval()), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_meta_device_then_materialised(encoding_case, values, positions, expected):
    meta = copy.deepcopy(encoding_case.encoding).to("meta")
    bare = meta.to_empty(device="cpu")
    for weight in bare.parameters():
        nn.init.constant_(weight, torch.nan)  # what to_empty leaves may be anything
    if is_fixed(encoding_case):
        assert_same(values(encoding_case, positions, bare), expected)
        return
    torch.manual_seed(0)
    bare.reset_parameters()
    assert_same(values(encoding_case, positions, bare), expected)


def test_inference_mode_then_training(encoding_case, values, positions, expected):
    encoding = encoding_case.encoding
    with torch.inference_mode():
        assert_same(values(encoding_case, positions), expected)
    encoding.train()
    out = values(encoding_case, positions)
    assert_same(out, expected)
    weight = torch.ones((), requires_grad=True)
    torch.stack([(part * weight).sum() for part in out]).sum().backward()
    assert weight.grad is not None
    assert all(own.grad is not None and own.grad.any() for own in encoding.parameters())


def test_deep_copies_and_pickles(encoding_case, values, positions, expected):
    encoding = encoding_case.encoding
    for twin in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert_same(values(encoding_case, positions, twin), expected)
        assert repr(twin) == repr(encoding)


def test_a_fixed_encoding_keeps_nothing(encoding_case, values, positions):
    encoding = encoding_case.encoding
    assert not list(encoding.buffers())
    if is_fixed(encoding_case):
        assert not encoding.state_dict()
    before = {name: id(value) for name, value in vars(encoding).items()}
    values(encoding_case, positions)
    assert {name: id(value) for name, value in vars(encoding).items()} == before
    assert not [value for value in vars(encoding).values() if isinstance(value, torch.Tensor)]


def test_state_dict_rebuilds_it(encoding_case, values, positions, expected):
    twin = copy.deepcopy(encoding_case.encoding)
    for weight in twin.parameters():
        nn.init.ones_(weight)
    twin.load_state_dict(encoding_case.encoding.state_dict())
    assert_same(values(encoding_case, positions, twin), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rotated_heads_keep_their_dtype_and_are_rounded_once(rotary_case, dtype):
    x = torch.randn(2, 3, 11, 16).to(dtype)
    rotation = rotary_case.encoding(rotary_case.cells(11))
    out = mmpos.rotate(x, rotation)
    assert out.dtype == dtype
    torch.testing.assert_close(out, mmpos.rotate(x.double(), rotation).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mmpos.rotate(x, rotation), out)


@pytest.mark.parametrize("reading", [coordinates.Scaled, coordinates.Centered])
def test_a_reading_survives_half_precision(encoding_case, reading):
    if "coordinates" not in vars(encoding_case.encoding):
        pytest.skip("reads cells only")
    encoding = copy.deepcopy(encoding_case.encoding)
    encoding.coordinates = reading()
    positions = encoding_case.cells(11)
    args = (positions, positions) if encoding_case.base is mmpos.AttentionBias else (positions,)
    extent = [2 * size for size in encoding_case.grid]
    encoding.bfloat16()  # rounds what is learned, before and after alike
    try:
        expected = copy.deepcopy(encoding).float()(*args, extent=extent)
    except ValueError as refused:
        assert "whole" in str(refused) or "no number" in str(refused)
        pytest.skip("reads whole cells only")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            again = encoding(*args, extent=extent)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(tree_leaves(again), tree_leaves(expected), strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
        elif is_fixed(encoding_case):
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)
