"""Half precision rounds the learned numbers, and nothing else."""

import copy

import pytest
import torch

from mmpos.additive import FactorizedEncoding, FourierEncoding, LearnedEncoding
from mmpos.coordinates import Centered, Index, Scaled
from mmpos.positions import absent, join

GRID = (5, 290)
CASES = [
    (LearnedEncoding, {"prefix_rows": 1}),
    (LearnedEncoding, {"coordinates": Index()}),
    (FactorizedEncoding, {}),
    (FactorizedEncoding, {"combine": "product", "coordinates": Index()}),
    (FourierEncoding, {}),
    (FourierEncoding, {"seed": 1}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "named"), CASES)
def test_a_cast_encoding_is_the_one_with_rounded_weights(cls, named, dtype):
    encoding = cls(48, GRID, **named)
    positions = torch.rand(20, 2) * torch.tensor(GRID) - 0.5
    if not getattr(encoding, "coordinates", None):
        positions = positions.round().abs().clamp(max=torch.tensor(GRID) - 1)
    positions = join(absent(1, 2), positions)
    cast = copy.deepcopy(encoding).to(dtype)
    rounded = copy.deepcopy(cast).float()
    out = cast(positions)
    assert out.dtype == torch.float32
    assert torch.equal(out, rounded(positions))
    assert not torch.equal(out, encoding(positions))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cast(positions), out)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(cast(positions), out)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("reading", [Scaled(offset=0.5), Centered()])
@pytest.mark.parametrize("cls", [LearnedEncoding, FactorizedEncoding, FourierEncoding])
def test_a_reading_is_exact_whatever_is_the_default(cls, reading):
    encoding = cls(48, GRID, coordinates=reading).bfloat16()
    positions = torch.rand(20, 2) * torch.tensor((9, 500))
    expected = encoding(positions, extent=(10, 501))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(encoding(positions, extent=(10, 501)), expected)
    finally:
        torch.set_default_dtype(torch.float32)
