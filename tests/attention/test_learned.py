"""Gradients of a learned bias, as a whole and by blocks of queries, against the plain formula."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import mmpos
from mmpos.attention import prepare
from mmpos.bias import BiasBlocks

Q, K, HEADS = 5, 9, 6

SEGMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
PAIRS = torch.rand(2, 1, Q, K, generator=torch.Generator().manual_seed(3)) < 0.5
PAIRS[0, :, 2] = PAIRS[1, :, :2] = False
Q_INDEX = torch.tensor([[0, 5, 2, 8, 7], [300, 301, 302, 303, 304]])
K_INDEX = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1, 0], [9, 300, 301, 1, 2, 3, 302, 304, 700]])
SEEN = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 2},
    "causal window": {"causal": True, "window": 3},
    "segments": {"q_segments": SEGMENTS[-Q:], "k_segments": SEGMENTS},
    "rows of segments": {
        "q_segments": torch.stack((SEGMENTS[-Q:], SEGMENTS[:Q])),
        "k_segments": SEGMENTS,
        "causal": True,
    },
    "keys": {"mask": torch.arange(K) < torch.tensor([[4], [7]])},
    "pairs": {"mask": PAIRS},
    "pairs of heads": {"mask": PAIRS.expand(2, HEADS, Q, K).clone(), "causal": True},
    "index": {"causal": True, "window": 4, "q_index": Q_INDEX, "k_index": K_INDEX},
}


@pytest.fixture
def qkv():
    return torch.randn(2, HEADS, Q, 8), torch.randn(2, HEADS, K, 8), torch.randn(2, HEADS, K, 4)


def seen(named):
    """Which pairs are visible, pair by pair."""
    named = dict(named)
    causal, window = named.get("causal", False), named.get("window")
    q_index = named.get("q_index", torch.arange(K - Q, K).expand(2, Q))
    k_index = named.get("k_index", torch.arange(K).expand(2, K))
    visible = torch.ones(2, HEADS, Q, K, dtype=torch.bool)
    mask = named.get("mask", torch.ones(1, 1, 1, 1, dtype=torch.bool))
    visible &= mask[:, None, None] if mask.ndim == 2 else mask
    if "q_segments" in named:
        own = named["q_segments"].expand(2, Q).unsqueeze(-1)
        visible &= (own == named["k_segments"].expand(2, K).unsqueeze(-2))[:, None]
    for b in range(2):
        for i in range(Q):
            for j in range(K):
                behind = int(q_index[b, i]) - int(k_index[b, j])
                if causal and behind < 0:
                    visible[b, :, i, j] = False
                if window is not None and abs(behind) >= window:
                    visible[b, :, i, j] = False
    return visible


def as_blocks(bias):
    return BiasBlocks(lambda start, stop: bias[..., start:stop, :], (bias,))


def gradients(attention, tensors, bias, wrap=None, **named):
    leaves = [part.detach().clone().requires_grad_() for part in (*tensors, bias)]
    given = leaves[3] if wrap is None else wrap(leaves[3])
    out = attention(*leaves[:3], bias=given, **named)
    (out * torch.linspace(-1, 2, out.shape[-1], dtype=out.dtype)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("named", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
@pytest.mark.parametrize("kv_heads", [2, 6])
@pytest.mark.parametrize("rows", [(), (1,), (2,)], ids=len)
def test_the_formula(qkv, softmax_attention, small_blocks, named, wrap, kv_heads, rows):
    q, k, v = qkv[0], qkv[1][:, :kv_heads], qkv[2][:, :kv_heads]
    bias = torch.randn(*rows, HEADS, Q, K)
    actual = gradients(mmpos.attend, (q, k, v), bias, wrap, **named, scale=0.3)
    expected = gradients(softmax_attention, (q, k, v), bias, visible=seen(named), scale=0.3)
    close(actual, expected)


@pytest.mark.parametrize("named", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("shape", [(2, 1, Q, K), (HEADS, 1, K), (1, 1, Q, 1), (2, HEADS, 1, 1)])
@pytest.mark.parametrize("blocked", [False, True])
def test_what_shares_a_bias_adds_to_its_gradient(
    qkv, unchecked, softmax_attention, small_blocks, named, shape, blocked
):
    bias = torch.randn(shape)
    wrap = (lambda part: BiasBlocks(lambda *_: part, (part,))) if blocked else None
    if blocked and shape[-2] > 1:
        wrap = as_blocks
    actual = gradients(mmpos.attend, qkv, bias, wrap, **named)
    close(actual, gradients(softmax_attention, qkv, bias, visible=seen(named)))


def test_more_queries_than_keys(qkv, softmax_attention, small_blocks):
    q, k, v = qkv[1], qkv[0], qkv[2][:, :, :Q]
    bias = torch.randn(HEADS, K, Q)
    for window, index in ((3, None), (3, torch.arange(K)), (None, torch.arange(K))):
        named = {"window": window, "causal": index is not None, "q_index": index}
        places = torch.arange(Q - K, Q) if index is None else index
        behind = places[:, None] - torch.arange(Q)
        visible = behind.abs() < (window or 99)
        visible = visible & (behind >= 0) if index is not None else visible
        actual = gradients(mmpos.attend, (q, k, v), bias, **named)
        close(actual, gradients(softmax_attention, (q, k, v), bias, visible=visible))


@pytest.mark.parametrize("named", [{}, {"causal": True}, {"causal": True, "window": 50}])
def test_the_written_out_kernel(named):
    """More than one block of queries, of their usual sizes."""
    q, k, v = torch.randn(3, 2, 4, 200, 16).unbind(0)
    bias, behind = torch.randn(4, 200, 200), torch.arange(200)[:, None] - torch.arange(200)
    visible = (behind >= 0 if named else behind < 999) & (behind < named.get("window", 999))

    def peer(q, k, v, bias):
        with sdpa_kernel(SDPBackend.MATH):
            mask = bias.masked_fill(~visible, -torch.inf).unsqueeze(0)
            return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    expected = gradients(peer, (q, k, v), bias)
    for wrap in (None, as_blocks):
        close(gradients(mmpos.attend, (q, k, v), bias, wrap, **named), expected)


@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_of_gradients(small_blocks, wrap, kv_heads):
    q = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, 3, 4, dtype=torch.bool).tril(1)
    mask[0, :, 1] = False

    def call(q, k, v, bias):
        return mmpos.attend(q, k, v, bias=wrap(bias) if wrap else bias, mask=mask)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(call, (q, k, v, bias), fast_mode=True)


def test_gradients_as_a_function(qkv, softmax_attention):
    """torch.func.grad, which needs no leaf."""
    bias = torch.randn(HEADS, Q, K)

    def loss(bias):
        return mmpos.attend(*qkv, bias=bias, causal=True).square().sum()

    def peer(bias):
        lower = torch.ones(Q, K).tril(K - Q).bool()
        return softmax_attention(*qkv, bias=bias, visible=lower).square().sum()

    close([torch.func.grad(loss)(bias)], [torch.func.grad(peer)(bias)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
def test_half_precision_with_a_bias_in_float32(softmax_attention, dtype, wrap):
    tensors = torch.randn(3, 2, HEADS, 70, 16).to(dtype).unbind(0)
    bias = 300 + 3 * torch.randn(HEADS, 70, 70)  # in bfloat16 it would be whole multiples of 2
    actual = gradients(mmpos.attend, tensors, bias, wrap, causal=True)
    assert [part.dtype for part in actual] == [dtype] * 4 + [torch.float32]
    lower = torch.ones(70, 70).tril().bool()
    expected = gradients(softmax_attention, tensors, bias, visible=lower)
    for a, b in zip(actual, expected, strict=True):
        assert (a.double() - b.double()).norm() < 2e-2 * b.double().norm()


@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
def test_autocast(qkv, wrap):
    bias = 30 * torch.randn(HEADS, Q, K)
    lower = [part.bfloat16() for part in qkv]
    expected = gradients(mmpos.attend, lower, bias, wrap)
    with torch.autocast("cpu", torch.bfloat16):
        actual = gradients(mmpos.attend, qkv, bias, wrap)  # and the backward pass under it too
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))


@pytest.mark.parametrize("frozen", ["bias", "qkv", "k", "none of it"])
@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
def test_what_asks_for_no_gradient_gets_none(qkv, softmax_attention, frozen, wrap):
    bias = torch.randn(HEADS, Q, K)
    expected = gradients(softmax_attention, qkv, bias)[1:]
    leaves = [part.clone().requires_grad_() for part in (*qkv, bias)]
    for part in {
        "bias": leaves[3:],
        "qkv": leaves[:3],
        "k": leaves[1:2],
        "none of it": leaves,
    }[frozen]:
        part.requires_grad_(False)
    out = mmpos.attend(*leaves[:3], bias=wrap(leaves[3]) if wrap else leaves[3])
    assert out.requires_grad == (frozen != "none of it")
    if out.requires_grad:
        (out * torch.linspace(-1, 2, 4)).sum().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        if leaf.requires_grad:
            torch.testing.assert_close(leaf.grad, gradient.to(leaf.dtype), rtol=1e-4, atol=1e-5)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wrap", [None, as_blocks], ids=["dense", "form"])
def test_activation_checkpoints(qkv, wrap, reentrant):
    bias = torch.randn(HEADS, Q, K)

    def again(*tensors, bias):
        call = lambda *given: mmpos.attend(*given, bias=bias, causal=True).tanh()  # noqa: E731
        return checkpoint(call, *tensors, use_reentrant=reentrant)

    def once(*tensors, bias):
        return mmpos.attend(*tensors, bias=bias, causal=True).tanh()

    actual, expected = (gradients(call, qkv, bias, wrap) for call in (again, once))
    close(actual, expected, 0)


def test_no_gradient_is_recorded_where_none_is_asked_for(qkv):
    bias = torch.randn(HEADS, Q, K, requires_grad=True)
    expected = mmpos.attend(*qkv, bias=bias, causal=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for given in (bias, as_blocks(bias)):
                out = mmpos.attend(*qkv, bias=given, causal=True)
                assert not out.requires_grad
                torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("named", [{}, {"causal": True}, {"mask": torch.arange(256) < 250}])
def test_what_is_formed_is_smaller_than_all_weights(largest, monkeypatch, named):
    monkeypatch.setattr("mmpos.attention.gradients._FORMED", 1 << 15)
    batch, heads, length = 3, 2, 256
    if "mask" in named:
        named = {"mask": named["mask"].expand(batch, length)}
    tensors = torch.randn(3, batch, heads, length, 8).unbind(0)
    bias = torch.randn(heads, length, length)
    with largest:
        gradients(mmpos.attend, tensors, bias, **named)
    assert largest.numbers == heads * length**2


@pytest.mark.parametrize("shape", [(4, Q, K), (3, HEADS, Q, K), (HEADS, K, Q), (1, 2, HEADS, Q, K)])
def test_a_learned_bias_of_another_shape(unchecked, qkv, shape):
    with pytest.raises(ValueError, match=r"which does not fit .*\(2, 6, 5, 9\)"):
        mmpos.attend(*qkv, bias=torch.zeros(shape, requires_grad=True))


def test_what_was_prepared_for_others(unchecked, qkv):
    _, k, v = qkv
    bias = torch.zeros(HEADS, Q, K, requires_grad=True)
    once = prepare(Q, K, bias=bias, causal=True)
    with pytest.raises(ValueError, match="for 5 queries and 9 keys, given are 9 and 9"):
        mmpos.attend(k, k, v, prepared=once)
    once = prepare(Q, K, bias=bias, mask=torch.ones(3, K, dtype=torch.bool))
    with pytest.raises(ValueError, match="given for a batch of 3, the batch has 2"):
        mmpos.attend(*qkv, prepared=once)
    once = prepare(Q, K, bias=bias, mask=torch.ones(1, 4, 1, K, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(1, 4, 1, 9\).*\(2, 6, 5, 9\)"):
        mmpos.attend(*qkv, prepared=once)
    index = torch.zeros(3, Q, dtype=torch.long)
    with pytest.raises(ValueError, match="given for a batch of 3, the batch has 2"):
        mmpos.attend(*qkv, bias=bias, causal=True, q_index=index)
