"""A bias of keys alone against a plain softmax in float64, and that it forms no square."""

import pytest
import torch

import mmpos
from mmpos.attention import key_bias as channel
from mmpos.attention import prepare
from mmpos.bias import BiasBlocks

L, HEADS = 13, 6


@pytest.fixture
def qkv():
    return torch.randn(2, HEADS, L, 8), torch.randn(2, HEADS, L, 8), torch.randn(2, HEADS, L, 8)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def slopes(heads):
    return torch.linspace(0.7, 0.004, heads, dtype=torch.float64)


def lower(length=L):
    return torch.ones(length, length).tril().bool()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("features", [8, 4, 12, 40])
@pytest.mark.parametrize("shape", [(HEADS, L), (2, HEADS, L), (1, HEADS, L)])
@pytest.mark.parametrize("recorded", [False, True])
def test_causal(softmax_attention, kv_heads, features, shape, recorded):
    q, keys = torch.randn(2, HEADS, L, 8), 50 * torch.randn(shape)
    k, v = torch.randn(2, kv_heads, L, 8), torch.randn(2, kv_heads, L, features)
    with torch.set_grad_enabled(recorded):
        out = mmpos.attend(q, k, v, key_bias=keys, causal=True)
    close(out, softmax_attention(q, k, v, bias=keys.unsqueeze(-2), visible=lower()))


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -2.5, 1e-3])
def test_the_scale_does_not_touch_it(qkv, softmax_attention, scale):
    keys = 5 * torch.randn(HEADS, L)
    out = mmpos.attend(*qkv, key_bias=keys, causal=True, scale=scale)
    expected = softmax_attention(*qkv, bias=keys.unsqueeze(-2), visible=lower(), scale=scale)
    close(out, expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float64])
def test_dtypes(softmax_attention, dtype, tolerance, bias_dtype):
    length = 300
    q, k, v = torch.randn(3, 1, 3, length, 16).to(dtype).unbind(0)
    keys = (slopes(3).unsqueeze(-1) * torch.arange(length)).to(bias_dtype)
    with torch.no_grad():
        out = mmpos.attend(q, k, v, key_bias=keys, causal=True)
    assert out.dtype == dtype
    expected = softmax_attention(q, k, v, bias=keys.unsqueeze(-2), visible=lower(length))
    close(out, expected, tolerance)


def test_zeros_are_no_bias(qkv):
    out = mmpos.attend(*qkv, key_bias=torch.zeros(HEADS, L), causal=True)
    close(out, mmpos.attend(*qkv, causal=True).double())


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_neighbours_stay_apart_at_thousands(softmax_attention, window, offset):
    """Scores of up to 11,000: in float32 they are whole multiples of 0.001."""
    length = 4000
    q, k, v = torch.randn(3, 1, 2, length, 8).unbind(0)
    keys = torch.tensor([[2.7], [0.3]], dtype=torch.float64) * torch.arange(length) + offset
    with torch.no_grad():
        out = mmpos.attend(q, k, v, key_bias=keys, causal=True, window=window)
    for start, stop in ((0, 60), (1970, 2030), (3940, 4000)):
        expected = softmax_attention(
            q[:, :, start:stop],
            k[:, :, :stop],
            v[:, :, :stop],
            bias=(keys[:, :stop] - keys[:, start : start + 1]).unsqueeze(-2),
            visible=lower(stop)[start:] & ~lower(stop).tril(-(window or length))[start:],
        )
        close(out[:, :, start:stop], expected, 3e-6)


@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_is_as_large_as_the_square(largest, recorded):
    length = 400
    q, k, v = torch.randn(3, 1, 2, length, 8, requires_grad=recorded).unbind(0)
    keys = torch.randn(2, length, requires_grad=recorded)
    with torch.set_grad_enabled(recorded), largest:
        out = mmpos.attend(q, k, v, key_bias=keys, causal=True)
        if recorded:
            out.sum().backward()
    assert largest.numbers < length * length // 4


def test_heads_go_one_after_the_other_where_no_gradient_is_asked_for(qkv, monkeypatch):
    keys = torch.randn(HEADS, L)
    q, k, v = qkv
    expected = mmpos.attend(q, k[:, :2], v[:, :2], key_bias=keys, causal=True)
    for numbers in (1, 2 * 4 * L * 12, 1 << 30):
        monkeypatch.setattr(channel, "_COPY", numbers)
        with torch.no_grad():
            out = mmpos.attend(q, k[:, :2], v[:, :2], key_bias=keys, causal=True)
        torch.testing.assert_close(out, expected)
        with torch.inference_mode():
            assert torch.equal(mmpos.attend(q, k[:, :2], v[:, :2], key_bias=keys, causal=True), out)


SEGMENTS = torch.tensor([0] * 5 + [1] * 8)
MASK = torch.tensor([[True] * 11 + [False] * 2, [False] * 3 + [True] * 10])
INDEX = torch.randperm(L, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"mask": MASK},
        {"causal": True, "mask": MASK},
        {"causal": True, "window": 4},
        {"window": 3},
        {"causal": True, "q_segments": SEGMENTS, "k_segments": SEGMENTS},
        {"causal": True, "q_index": INDEX, "k_index": INDEX},
        {"mask": torch.rand(1, HEADS, L, L, generator=torch.Generator().manual_seed(1)) < 0.4},
    ],
    ids=lambda named: "-".join(named) or "all",
)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("biased", ["", "fixed", "learned", "blocks"])
def test_it_is_added_to_whatever_else_there_is(qkv, named, learned, biased):
    keys = 3 * torch.randn(HEADS, L)
    dense = torch.randn(HEADS, L, L) if biased else torch.zeros(HEADS, L, L)
    gradients = []
    for by_keys in (True, False):
        leaves = [part.clone().requires_grad_() for part in qkv]
        own = keys.clone().requires_grad_(learned)
        other = dense.clone().requires_grad_(biased not in ("", "fixed"))
        added = own.unsqueeze(-2) + other
        if by_keys and biased == "blocks":
            blocks = BiasBlocks(lambda start, stop, all=other: all[:, start:stop], (other,))
            out = mmpos.attend(*leaves, bias=blocks, key_bias=own, **named)
        elif by_keys:
            out = mmpos.attend(*leaves, bias=other if biased else None, key_bias=own, **named)
        else:
            out = mmpos.attend(*leaves, bias=added.double().float(), **named)
        (out * torch.arange(8)).sum().backward()
        grown = [part for part in (*leaves, own, other) if part.requires_grad]
        gradients.append([out.detach(), *(part.grad for part in grown)])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_step_and_a_chunk_against_a_cache(qkv):
    q, k, v = qkv
    keys = slopes(HEADS).unsqueeze(-1) * torch.arange(L)
    whole = mmpos.attend(q, k, v, key_bias=keys, causal=True)
    for start, stop in ((12, 13), (0, 1), (4, 9)):
        some = (q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop])
        step = mmpos.attend(*some, key_bias=keys[:, :stop], causal=True)
        torch.testing.assert_close(step, whole[:, :, start:stop], rtol=1e-4, atol=1e-5)


def test_a_bias_of_keys_needs_no_square_where_all_queries_see_the_same(qkv):
    keys = torch.randn(HEADS, L)
    for named in ({}, {"mask": MASK}):
        given = prepare(L, L, key_bias=keys, **named).mask
        assert given is not None
        assert given.shape[-2:] == (1, L)
    assert prepare(1, L, key_bias=keys, causal=True).mask is not None


def test_gradients_are_right():
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    keys = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, keys):
        return mmpos.attend(q, k, v, key_bias=keys, causal=True)

    assert torch.autograd.gradcheck(call, (*tensors, keys))


def test_alibi(qkv):
    alibi, positions = mmpos.ALiBi(HEADS), mmpos.positions.sequence(L, start=700)
    pairs = mmpos.attend(*qkv, bias=alibi(positions, positions), causal=True)
    keys = mmpos.attend(*qkv, key_bias=alibi.key_bias(positions), causal=True)
    torch.testing.assert_close(keys, pairs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(qkv, dtype):
    keys = 300 * torch.randn(HEADS, L)
    expected = mmpos.attend(*(part.to(dtype) for part in qkv), key_bias=keys, causal=True)
    with torch.autocast("cpu", dtype):
        assert torch.equal(mmpos.attend(*qkv, key_bias=keys, causal=True), expected)


@pytest.mark.parametrize(("bits", "pieces"), [(8, 3), (11, 3), (16, 2), (24, 2), (4, 1)])
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 46336.4])
def test_split(bits, pieces, size):
    x = size * torch.linspace(-1, 0.7, 5000, dtype=torch.float64)
    x.requires_grad_()
    parts = channel.split(x, bits, pieces)
    assert len(parts) == pieces
    torch.testing.assert_close(sum(steps * unit for steps, unit in parts), x, rtol=1e-15, atol=0)
    for i, (steps, unit) in enumerate(parts):
        assert torch.frexp(unit)[0] == 0.5
        assert steps.abs().max() <= 2**bits
        if i + 1 < pieces:
            assert torch.equal(steps, steps.round())
    (gradient,) = torch.autograd.grad(sum((s * u).sum() for s, u in parts), x)
    torch.testing.assert_close(gradient, torch.ones_like(gradient))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (torch.ones(HEADS, L).long(), TypeError, "key_bias.*must be floating, got torch.int64"),
        (torch.ones(HEADS, L - 1), ValueError, "key_bias is for 12 tokens, there are 13"),
        (torch.ones(4, L), ValueError, r"\(1, 4, 1, 13\).*\(2, 6, 13, 13\)"),
        (torch.ones(3, HEADS, L), ValueError, r"\(3, 6, 1, 13\).*\(2, 6, 13, 13\)"),
        (torch.ones(1, 2, HEADS, L), ValueError, r"\(1, 2, 6, 1, 13\).*\(2, 6, 13, 13\)"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_what_does_not_fit(unchecked, qkv, keys, error, message, causal):
    with pytest.raises(error, match=message):
        mmpos.attend(*qkv, key_bias=keys, causal=causal)


def test_beside_prepared(unchecked, qkv):
    once = prepare(L, L, causal=True)
    with pytest.raises(ValueError, match="none of these can be given beside it"):
        mmpos.attend(*qkv, key_bias=torch.ones(HEADS, L), prepared=once)
