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
        ({"window": 0}, ValueError, "window must be a whole number of 1 or more, got 0"),
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


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 1, 2, 4), (1, 1, 2, 4), (1, 1, 3, 4)),
        ((1, 1, 6, 4), (1, 1, 4, 4), (1, 1, 6, 4)),
        ((1, 4, 2, 4), (1, 4, 2, 4), (1, 2, 2, 4)),
        ((2, 1, 2, 4), (1, 1, 2, 4), (1, 1, 2, 4)),
        ((1, 1, 2, 4), (1, 1, 2, 8), (1, 1, 2, 4)),
    ],
)
def test_queries_keys_and_values_that_do_not_go_together(unchecked, q, k, v):
    with pytest.raises(ValueError, match=r"of one batch, got .* and \("):
        mmpos.attend(torch.randn(q), torch.randn(k), torch.randn(v))


def test_a_bias_that_is_no_number(unchecked):
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"must be floating, got torch.bool"):
        mmpos.attend(q, q, q, bias=torch.ones(1, 2, 2, dtype=torch.bool))


@pytest.mark.parametrize("name", ["q_index", "k_index", "q_segments", "k_segments"])
def test_indices_and_segments_of_another_length(unchecked, name):
    q = torch.randn(1, 1, 6, 4)
    given = {"q_segments": torch.zeros(6).long(), "k_segments": torch.zeros(6).long()}
    given = given if name in given else {}
    with pytest.raises(ValueError, match=f"{name} is for 1 tokens, there are 6"):
        mmpos.attend(q, q, q, causal=True, **{**given, name: torch.zeros(1).long()})
