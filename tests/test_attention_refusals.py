"""What `attend` refuses says what was given, what was expected, and the way out."""

import pytest
import torch

import mmpos
from mmpos.attention import prepare

Q, K = 5, 9


@pytest.fixture
def qkv():
    return torch.randn(2, 6, Q, 8), torch.randn(2, 6, K, 8), torch.randn(2, 6, K, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be 1 or more, got 0"),
        ({"q_segments": torch.zeros(Q).long()}, ValueError, "q_segments and k_segments.*both"),
        ({"k_segments": torch.zeros(K).long()}, ValueError, "q_segments and k_segments.*both"),
        ({"mask": torch.zeros(2, K)}, TypeError, "mask must be boolean.*float32.*bias"),
        ({"mask": torch.ones(2, Q, K).bool()}, ValueError, r"\(2, 5, 9\), expected keys.*pairs"),
        ({"mask": torch.ones(2, Q).bool()}, ValueError, r"\(2, 1, 1, 5\).*\(2, 6, 5, 9\)"),
        ({"mask": torch.ones(3, K).bool()}, ValueError, r"\(3, 1, 1, 9\).*\(2, 6, 5, 9\)"),
        ({"bias": torch.zeros(4, Q, K)}, ValueError, r"\(1, 4, 5, 9\).*\(2, 6, 5, 9\)"),
        ({"bias": torch.zeros(6, K, Q)}, ValueError, r"\(1, 6, 9, 5\).*\(2, 6, 5, 9\)"),
        ({"bias": torch.zeros(1, 2, 6, Q, K)}, ValueError, r"\(1, 2, 6, 5, 9\).*\(2, 6, 5, 9\)"),
    ],
    ids=lambda value: None if isinstance(value, type) else "",
)
def test_arguments_that_do_not_fit(unchecked, qkv, arguments, error, message):
    with pytest.raises(error, match=message):
        mmpos.attend(*qkv, **arguments)


def test_more_causal_queries_than_keys(unchecked, qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match=r"9 queries to 5 keys.*q_index"):
        mmpos.attend(k, q, v[:, :, :Q], causal=True)
    index = torch.arange(K)
    out = mmpos.attend(k, q, v[:, :, :Q], causal=True, q_index=index)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


def test_heads_that_cannot_be_shared(unchecked, qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key heads"):
        mmpos.attend(q, k[:, :4], v[:, :4])


def test_what_was_prepared_for_others(unchecked, qkv):
    q, k, v = qkv
    square = prepare(K, K, causal=True)
    with pytest.raises(ValueError, match=r"prepared is for as many queries.*5 queries and 9 keys"):
        mmpos.attend(q, k, v, prepared=square)


def test_nothing_is_dropped_beside_prepared(unchecked, qkv):
    with pytest.raises(ValueError, match=r"prepared.*window"):
        mmpos.attend(*qkv, prepared=prepare(Q, K), window=3)


def test_a_bias_for_a_whole_batch_of_batches(unchecked, qkv):
    with pytest.raises(ValueError, match=r"\(2, 6, 5, 9, 1\).*\(2, 6, 5, 9\)"):
        mmpos.attend(*qkv, bias=torch.zeros(2, 6, Q, K, 1))
