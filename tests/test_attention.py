"""`attend` against a plain softmax in float64, and its refusals."""

import pytest
import torch

import mmpos
from mmpos.attention import prepare

Q, K = 5, 9


@pytest.fixture
def qkv():
    return torch.randn(2, 6, Q, 8), torch.randn(2, 6, K, 8), torch.randn(2, 6, K, 4)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def loop(visible) -> torch.Tensor:
    """True where ``visible(query, key)``, the last query being as late as the last key."""
    return torch.tensor([[visible(i, j) for j in range(K)] for i in range(K - Q, K)])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, lambda i, j: True),
        ({"causal": True}, lambda i, j: j <= i),
        ({"window": 3}, lambda i, j: abs(i - j) < 3),
        ({"window": 1}, lambda i, j: i == j),
        ({"window": 3, "causal": True}, lambda i, j: i - 3 < j <= i),
        ({"window": 99, "causal": True}, lambda i, j: j <= i),
    ],
    ids=["all", "causal", "window", "self", "causal window", "wide window"],
)
@pytest.mark.parametrize("biased", [False, True])
def test_order_is_aligned_at_the_last_query_and_key(
    qkv, softmax_attention, arguments, rule, biased
):
    bias = torch.randn(1, 6, Q, K) if biased else None
    out = mmpos.attend(*qkv, bias=bias, **arguments)
    close(out, softmax_attention(*qkv, bias=0 if bias is None else bias, visible=loop(rule)))


def test_one_query_sees_the_whole_cache(qkv, softmax_attention):
    q, k, v = qkv
    out = mmpos.attend(q[:, :, :1], k, v, causal=True)
    close(out, softmax_attention(q[:, :, :1], k, v))


def test_square_causal_attention(qkv, softmax_attention):
    _, k, v = qkv
    lower = torch.tensor([[j <= i for j in range(K)] for i in range(K)])
    close(mmpos.attend(k, k, v, causal=True), softmax_attention(k, k, v, visible=lower))


def test_indices_of_a_batch_row_each(qkv, softmax_attention):
    q_index = torch.tensor([[0, 5, 2, 8, 7], [300, 301, 302, 303, 304]])
    k_index = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1, 0], [9, 300, 301, 1, 2, 3, 302, 304, 700]])
    rule = torch.tensor(
        [
            [[0 <= i - j < 4 for j in ks] for i in qs]
            for qs, ks in zip(q_index, k_index, strict=True)
        ]
    )
    out = mmpos.attend(*qkv, causal=True, window=4, q_index=q_index, k_index=k_index)
    close(out, softmax_attention(*qkv, visible=rule[:, None]))


@pytest.mark.parametrize("batch", [False, True])
def test_segments(qkv, softmax_attention, batch):
    q_segments = torch.tensor([[0, 1, 1, 7, 7], [2, 2, 2, 0, 0]])
    k_segments = torch.tensor([[1, 1, 0, 7, 7, 7, 7, 0, 2], [0, 0, 0, 0, 2, 2, 2, 2, 2]])
    if not batch:
        q_segments, k_segments = q_segments[0], k_segments[0]
    same = q_segments.unsqueeze(-1) == k_segments.unsqueeze(-2)
    out = mmpos.attend(*qkv, q_segments=q_segments, k_segments=k_segments)
    close(out, softmax_attention(*qkv, visible=same.unsqueeze(-3)))


@pytest.mark.parametrize(
    "shape", [(2, K), (1, K), (2, 1, Q, K), (1, 6, Q, K), (1, 1, Q, K), (2, 1, 1, K), (1, 1, Q, 1)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_masks_of_keys_and_of_pairs(qkv, softmax_attention, shape, biased):
    mask = torch.rand(shape) < 0.6
    bias = torch.randn(6, Q, K) if biased else None
    pairs = mask[:, None, None] if len(shape) == 2 else mask
    out = mmpos.attend(*qkv, mask=mask, bias=bias)
    close(out, softmax_attention(*qkv, visible=pairs, bias=0 if bias is None else bias))


def test_everything_at_once(qkv, softmax_attention):
    q, k, v = qkv
    mask, bias = torch.rand(2, K) < 0.8, torch.randn(2, 6, Q, K)
    segments = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    out = mmpos.attend(
        q,
        k[:, :2],
        v[:, :2],
        bias=bias,
        mask=mask,
        causal=True,
        window=4,
        q_segments=segments[-Q:],
        k_segments=segments,
        scale=0.3,
    )
    visible = loop(lambda i, j: i - 4 < j <= i and segments[i] == segments[j]) & mask[:, None, None]
    expected = softmax_attention(q, k[:, :2], v[:, :2], bias=bias, visible=visible, scale=0.3)
    close(out, expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads_share_keys_in_runs(qkv, softmax_attention, kv_heads):
    q, k, v = qkv[0], qkv[1][:, :kv_heads], qkv[2][:, :kv_heads]
    bias = torch.randn(6, Q, K)
    close(mmpos.attend(q, k, v, bias=bias), softmax_attention(q, k, v, bias=bias))
    close(mmpos.attend(q, k, v, causal=True), softmax_attention(q, k, v, visible=loop(int.__ge__)))


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, 2.5])
def test_the_scale_does_not_touch_the_bias(qkv, softmax_attention, scale):
    bias = 3 * torch.randn(6, Q, K)
    out = mmpos.attend(*qkv, bias=bias, scale=scale)
    close(out, softmax_attention(*qkv, bias=bias, scale=scale))
    if scale == 0.0:
        close(out, bias.double().softmax(-1) @ qkv[2].double())


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_bias_of_another_dtype(qkv, softmax_attention, q_dtype, bias_dtype):
    q, k, v = (part.to(q_dtype) for part in qkv)
    bias = torch.randn(6, Q, K).to(bias_dtype)
    out = mmpos.attend(q, k, v, bias=bias, causal=True)
    assert out.dtype == q_dtype
    expected = softmax_attention(q, k, v, bias=bias.to(q_dtype), visible=loop(int.__ge__))
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3}.get(q_dtype, 1e-5)
    close(out, expected, tolerance)


def test_gradients_are_those_of_the_formula(qkv, softmax_attention):
    bias, mask = torch.randn(6, Q, K), torch.rand(2, 1, Q, K) < 0.5
    mask[0, :, 2] = False
    gradients = []
    for attention, visible in ((mmpos.attend, "mask"), (softmax_attention, "visible")):
        leaves = [part.clone().requires_grad_() for part in (*qkv, bias)]
        out = attention(*leaves[:3], bias=leaves[3], **{visible: mask})
        (out * torch.arange(4)).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_blind_rows_are_zero_and_leave_finite_gradients(qkv, biased):
    leaves = [part.requires_grad_() for part in qkv]
    bias = torch.randn(6, Q, K, requires_grad=True) if biased else None
    mask = torch.ones(2, 1, Q, K, dtype=torch.bool)
    mask[0, :, 1] = mask[1] = False
    out = mmpos.attend(*leaves, mask=mask, bias=bias)
    assert not out[0, :, 1].any()
    assert not out[1].any()
    out.square().sum().backward()
    for leaf in [*leaves, *([] if bias is None else [bias])]:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert leaves[0].grad is not None
    assert not leaves[0].grad[0, :, 1].any()
    assert not leaves[2].grad[1].any()


@pytest.mark.parametrize("biased", [False, True])
def test_no_kernel_meets_a_row_without_a_key(biased):
    mask = torch.ones(2, 1, Q, K, dtype=torch.bool)
    mask[0, :, 1] = mask[1] = False
    bias = torch.randn(6, Q, K) if biased else None
    given = prepare(Q, K, mask=mask, bias=bias).mask
    assert given is not None
    assert (given > -torch.inf).any(-1).all()


def test_prepared_once_is_the_same_as_given_each_time(qkv):
    bias, mask = torch.randn(6, Q, K), torch.rand(2, K) < 0.5
    once = prepare(Q, K, bias=bias, mask=mask, causal=True, window=3)
    for scale in (None, 0.7):
        direct = mmpos.attend(*qkv, bias=bias, mask=mask, causal=True, window=3, scale=scale)
        assert torch.equal(mmpos.attend(*qkv, prepared=once, scale=scale), direct)


def test_segments_and_masks_leave_causality_in_place(qkv, softmax_attention):
    segments = torch.zeros(K, dtype=torch.long)
    everything = torch.ones(2, K, dtype=torch.bool)
    expected = softmax_attention(*qkv, visible=loop(int.__ge__))
    same = {"q_segments": segments[:Q], "k_segments": segments}
    for extra in (same, {"mask": everything}, {**same, "mask": everything}):
        close(mmpos.attend(*qkv, causal=True, **extra), expected)
