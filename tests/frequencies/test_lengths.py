"""Extensions that depend on the length: each sequence of a batch has its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mmpos
from mmpos import RotaryEncoding
from mmpos.frequencies import DynamicNTK, LongRoPE, YaRN
from mmpos.positions import absent, join, sequence

EXTENSIONS = [
    DynamicNTK(factor=2, original_length=64),
    LongRoPE(
        short_factor=[1 + 0.1 * i for i in range(8)],
        long_factor=[1 + i for i in range(8)],
        original_length=64,
        factor=8,
    ),
]


@pytest.fixture(params=EXTENSIONS, ids=lambda extension: type(extension).__name__)
def encoding(request):
    return RotaryEncoding(16, extension=request.param)


def same(actual, expected):
    assert torch.equal(actual.cos, expected.cos)
    assert torch.equal(actual.sin, expected.sin)


def test_a_short_sequence_keeps_its_frequencies_beside_a_long_one(encoding):
    positions = sequence(300)
    lengths = torch.tensor([40, 64, 65, 300])
    batch = encoding(positions.expand(4, -1, -1), length=lengths)
    shared = encoding(positions, length=lengths)
    same(batch, shared)
    for row, length in enumerate(lengths.tolist()):
        alone = encoding(positions, length=length)
        assert torch.equal(batch.cos[row], alone.cos)
        assert torch.equal(batch.sin[row], alone.sin)
    assert torch.equal(batch.cos[1], batch.cos[0])
    if isinstance(encoding.extension, DynamicNTK):
        assert torch.equal(batch.cos[0], RotaryEncoding(16)(positions).cos)
    assert not torch.allclose(batch.cos[3], batch.cos[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_lengths_of_any_dtype(encoding, dtype):
    positions, lengths = sequence(90), torch.tensor([40, 300])
    same(encoding(positions, length=lengths.to(dtype)), encoding(positions, length=lengths))


def test_a_frozen_length_makes_decoding_the_full_pass(encoding):
    """A prompt of 60 tokens decoded to 80 crosses the trained 64: its caller froze 80."""
    q, k = torch.randn(2, 1, 3, 80, 16)
    whole = encoding(sequence(80), length=80)
    scores = mmpos.rotate(q, whole) @ mmpos.rotate(k, whole).mT
    cache = mmpos.rotate(k[:, :, :60], encoding(sequence(60), length=80))
    for now in range(60, 80):
        one = encoding(sequence(1, start=now), length=80)
        cache = torch.cat((cache, mmpos.rotate(k[:, :, now : now + 1], one)), dim=2)
        step = mmpos.rotate(q[:, :, now : now + 1], one) @ cache.mT
        torch.testing.assert_close(step, scores[:, :, now : now + 1, : now + 1])
    moved = encoding(sequence(1, start=79), length=64)
    assert not torch.allclose(mmpos.rotate(q[:, :, 79:], moved) @ cache.mT, step, atol=1e-2)


def test_each_axis_has_its_own_length():
    extension = DynamicNTK(factor=1, original_length=8)
    encoding = RotaryEncoding(24, 3, extension=[extension, None, extension])
    positions = join(absent(1, 3), mmpos.positions.grid(2, 3, 270))
    rotation = encoding(positions, length=(2, 3, 270))
    plain = RotaryEncoding(24, 3)(positions)
    wide = RotaryEncoding(24, 3, extension=[None, None, extension])(positions, length=270)
    same(rotation, wide)
    assert torch.equal(rotation.cos[..., :8], plain.cos[..., :8])
    assert not torch.allclose(rotation.cos[..., 8:], plain.cos[..., 8:], atol=1e-2)
    rows = encoding(positions.expand(2, -1, -1), length=(torch.tensor([2, 16]), 3, 270))
    assert torch.equal(rows.cos[0], rotation.cos)
    assert torch.equal(rows.cos[1, ..., 4:], rotation.cos[..., 4:])
    assert (rows.sin[1, ..., :4] - rotation.sin[..., :4]).abs().max() > 0.02


def test_nothing_remembers_a_length(encoding):
    positions = sequence(70)
    first = encoding(positions, length=10)
    encoding(sequence(5000), length=5000)
    same(encoding(positions, length=10), first)


def test_extensions_that_do_not_ask_ignore_a_length():
    encoding = RotaryEncoding(16, extension=YaRN(factor=2, original_length=16))
    assert not encoding.needs_length
    same(encoding(sequence(9), length=torch.tensor([3, 4])), encoding(sequence(9)))


def test_autocast_and_other_defaults_change_nothing(encoding):
    positions, lengths = sequence(400), torch.tensor([50, 400])
    expected = encoding(positions, length=lengths)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            same(encoding.half()(positions, length=lengths), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_traced_lengths_are_the_eager_ones():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("traced_lengths.py"))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
