"""Law 10 for biases that look at content: the same call gives the same answer."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mmpos


def test_other_calls_and_copies(content):
    positions, tensors = content.cells(11), content.qkv(11)
    expected = content.run(positions, tensors)
    for length in (1, 40, 3):
        content.run(content.cells(length, length), content.qkv(length))
    rebuilt = mmpos.build(content.bias.spec())
    rebuilt.load_state_dict(content.bias.state_dict())
    for twin in (
        content.bias,
        copy.deepcopy(content.bias),
        pickle.loads(pickle.dumps(content.bias)),
        rebuilt.eval(),
    ):
        assert torch.equal(content.run(positions, tensors, bias=twin), expected)
        assert repr(twin) == repr(content.bias)
    assert not list(content.bias.buffers())


def test_half_precision_rounds_what_is_learned_and_the_output(content):
    positions, tensors = content.cells(11) + 300, content.qkv(11)
    for dtype in (torch.bfloat16, torch.float16):
        cast = copy.deepcopy(content.bias).to(dtype)
        lower = [part.to(dtype) for part in tensors]
        out = content.run(positions, lower, bias=cast)
        assert out.dtype == dtype
        wide = copy.deepcopy(cast).float()
        expected = content.run(positions, [part.float() for part in lower], bias=wide)
        torch.testing.assert_close(out, expected.to(dtype))


def test_autocast_rounds_q_k_and_v_alone(content):
    positions, tensors = content.cells(11) + 300, content.qkv(11)
    expected = content.run(positions, [part.bfloat16() for part in tensors])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(content.run(positions, tensors), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(content, dtype):
    positions, tensors = content.cells(11), content.qkv(11)
    expected = content.run(positions, tensors)
    torch.set_default_dtype(dtype)
    try:
        again = content.run(positions, tensors)
        assert all(part.dtype == dtype for part in mmpos.build(content.bias.spec()).parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, expected)


def test_meta_device_then_materialised(content):
    bare = copy.deepcopy(content.bias).to("meta").to_empty(device="cpu")
    for part in bare.parameters():
        nn.init.constant_(part, torch.nan)
    torch.manual_seed(0)
    bare.reset_parameters()
    for part, own in zip(bare.parameters(), content.bias.parameters(), strict=True):
        assert torch.equal(part, own)


def test_inference_mode_then_training(content):
    positions, tensors = content.cells(11), content.qkv(11)
    with torch.inference_mode():
        expected = content.run(positions, tensors)
    content.bias.train()
    out = content.run(positions, tensors)
    torch.testing.assert_close(out, expected)
    out.sum().backward()


def test_wrong_positions_are_refused(content, unchecked):
    axes = len(content.bias.axes)
    with pytest.raises(ValueError, match=rf"\(5, {axes + 1}\).*{axes} axes"):
        content.bias(torch.zeros(5, axes + 1), torch.zeros(5, axes + 1))
    half = torch.zeros(5, axes, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="not exact"):
        content.bias(half, half)
