"""Angles are exact whatever surrounds the call: the error of cos and sin against float64."""

import copy
import math

import pytest
import torch

from mmpos import RotaryEncoding
from mmpos.frequencies import YaRN
from mmpos.rotary import MixedRotaryEncoding, MRoPE, VJEPA2Encoding, XDRoPE, XPosEncoding

CLASSES = [RotaryEncoding, MRoPE, MixedRotaryEncoding, XPosEncoding, VJEPA2Encoding, XDRoPE]
PLACES = [0, 1, 255, 257, 511, 1000, 2049, 4095, 4096]
FAR = [65_536, 100_003, 131_071, 999_983, 10**6]


@pytest.fixture(params=["plain", "autocast", "half", "bfloat16", "default dtype", "all"])
def around(request):
    """How an encoding is called, by a trainer of one kind or another."""
    how = request.param

    def call(encoding, positions):
        encoding = copy.deepcopy(encoding)
        if how in ("half", "all"):
            encoding = encoding.half()
        if how == "bfloat16":
            encoding = encoding.bfloat16()
        if how in ("default dtype", "all"):
            torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=how in ("autocast", "all")):
                return encoding(positions)
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def worst(rotation, places, base=10000.0, pairs=32) -> float:
    error = 0.0
    for row, place in enumerate(places):
        for pair in range(pairs):
            angle = place * base ** (-pair / pairs)
            error = max(
                error,
                abs(rotation.cos[..., row, pair].item() - math.cos(angle)),
                abs(rotation.sin[..., row, pair].item() - math.sin(angle)),
            )
    return error


@pytest.mark.parametrize(("places", "bound"), [(PLACES, 2e-7), (FAR, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_one_axis(around, places, bound, dtype):
    positions = torch.tensor(places, dtype=dtype).unsqueeze(-1)
    for encoding in (
        RotaryEncoding(64),
        RotaryEncoding(64, extension=YaRN(factor=1, original_length=4096)),
        MRoPE(64, 1),
        XDRoPE(64, 1),
        MixedRotaryEncoding(64, 1, base=10000.0, init="axial"),
    ):
        assert worst(around(encoding, positions), places) < bound


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_around_the_call_changes_a_bit(cls, around):
    positions = torch.rand(9, 3, dtype=torch.float64) * 4096
    encoding = cls(24, 3, **{"init": "axial"} if cls is MixedRotaryEncoding else {})
    expected, given = encoding(positions), around(encoding, positions)
    for one, two in ((expected, given), (expected.dual, given.dual)):
        assert torch.equal(one.cos, two.cos)
        assert torch.equal(one.sin, two.sin)
        for a, b in zip(one.second or (), two.second or (), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_learned_directions_are_read_as_they_are(dtype):
    """Rounded weights are other directions, but they turn exactly."""
    encoding = MixedRotaryEncoding(16, 2, heads=3).to(dtype)
    positions = torch.rand(9, 2, dtype=torch.float64) * 4096
    speeds = torch.tensor([10 ** (-(pair % 4) / 4) for pair in range(8)], dtype=torch.float64)
    weights = encoding.directions.detach().double() * speeds
    angle = (positions[:, :, None] * weights[:, None]).sum(-2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            given = encoding(positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (given.cos - angle.cos()).abs().max() < 2e-7
    assert (given.sin - angle.sin()).abs().max() < 2e-7
