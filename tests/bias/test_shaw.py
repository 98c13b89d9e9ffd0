"""Shaw's vectors against loops over pairs, and against models that use them."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.vits.modeling_vits import VitsAttention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    Wav2Vec2BertConfig,
    Wav2Vec2BertSelfAttention,
)

import mmpos
from mmpos.positions import absent, grid, join, sequence


def loop(q, k, v, keys, values, row, scale=None):
    """Sum over pairs in float64; ``row(axis, i, j)`` is a row of the table of an axis, or None."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (part.double() for part in (q, k, v))
    keys, values = keys.detach().double(), None if values is None else values.detach().double()
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                scores, contents = [], []
                for j in range(k.shape[2]):
                    key, content = k[b, h, j].clone(), v[b, h, j].clone()
                    for axis in range(len(keys)):
                        own = row(axis, i, j)
                        if own is not None:
                            key += keys[axis, own]
                            content += 0 if values is None else values[axis, own]
                    scores.append(
                        q[b, h, i] @ key * (q.shape[-1] ** -0.5 if scale is None else scale)
                    )
                    contents.append(content)
                out[b, h, i] = torch.stack(scores).softmax(0) @ torch.stack(contents)
    return out


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("distance", [3, (2, 5), 0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_pairs_one_by_one(values, distance, scale):
    bias = mmpos.bias.ShawBias(3, head_dim=8, distance=distance, values=values, std=1.0)
    places, others = torch.tensor([300, 2, -7, 303]), torch.tensor([301, 300, 0, 298, 5, 310, -9])
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    behind, ahead = (distance, distance) if isinstance(distance, int) else distance

    def row(axis, i, j):
        return max(-behind, min(ahead, int(others[j]) - int(places[i]))) + behind

    terms = bias(places.unsqueeze(-1), others.unsqueeze(-1))
    out = mmpos.attend(q, k, v, bias=terms, scale=scale)
    close(out, loop(q, k, v, bias.key_table, bias.value_table, row, scale))


def test_runs_of_heads_share_keys():
    bias = mmpos.bias.ShawBias(6, head_dim=8, distance=2, std=1.0)
    q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    out = mmpos.attend(q, k, v, bias=bias(sequence(4), sequence(4)))
    k, v = (torch.stack([part[:, h // 3] for h in range(6)], 1) for part in (k, v))
    row = lambda axis, i, j: max(-2, min(2, j - i)) + 2  # noqa: E731
    close(out, loop(q, k, v, bias.key_table, bias.value_table, row))


def test_axes_have_tables_of_their_own():
    bias = mmpos.bias.ShawBias(3, (5, 4), head_dim=8, distance=2, std=1.0)
    places = torch.cat((torch.full((1, 2), torch.nan), grid(5, 4)[::3].float()))
    places[2, 0] = torch.nan
    q, k, v = torch.randn(3, 1, 3, len(places), 8).unbind(0)

    def row(axis, i, j):
        apart = places[j, axis] - places[i, axis]
        return None if apart.isnan() else max(-2, min(2, int(apart))) + 2

    out = mmpos.attend(q, k, v, bias=bias(places, places))
    close(out, loop(q, k, v, bias.key_table, bias.value_table, row))


def test_without_clip_far_offsets_have_no_vector():
    bias = mmpos.bias.ShawBias(3, head_dim=8, distance=(1, 2), clip=False, std=1.0)
    q, k, v = torch.randn(3, 1, 3, 7, 8).unbind(0)
    out = mmpos.attend(q, k, v, bias=bias(sequence(7), sequence(7)))
    row = lambda axis, i, j: j - i + 1 if -1 <= j - i <= 2 else None  # noqa: E731
    close(out, loop(q, k, v, bias.key_table, bias.value_table, row))


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [3, 5, 21])
def test_vits(length):
    config = SimpleNamespace(
        hidden_size=24, num_attention_heads=3, attention_dropout=0.0, window_size=4, use_bias=True
    )
    peer = VitsAttention(config).eval()
    bias = mmpos.bias.ShawBias(3, head_dim=8, distance=4, clip=False)
    bias.key_table.data, bias.value_table.data = peer.emb_rel_k.data, peer.emb_rel_v.data
    x = torch.randn(2, length, 24)
    q, k, v = (
        layer(x).unflatten(-1, (3, 8)).transpose(1, 2)
        for layer in (peer.q_proj, peer.k_proj, peer.v_proj)
    )
    out = mmpos.attend(q, k, v, bias=bias(sequence(length), sequence(length)))
    out = peer.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, peer(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [5, 90])
def test_wav2vec2_bert(length):
    config = Wav2Vec2BertConfig(
        hidden_size=24,
        num_attention_heads=3,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=64,
        right_max_position_embeddings=8,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    peer = Wav2Vec2BertSelfAttention(config).eval()
    bias = mmpos.bias.ShawBias(3, head_dim=8, distance=(64, 8), values=False)
    bias.key_table.data = peer.distance_embedding.weight.data.unsqueeze(0)
    x = torch.randn(2, length, 24)
    q, k, v = (
        layer(x).unflatten(-1, (3, 8)).transpose(1, 2)
        for layer in (peer.linear_q, peer.linear_k, peer.linear_v)
    )
    out = mmpos.attend(q, k, v, bias=bias(sequence(length), sequence(length)))
    out = peer.linear_out(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, peer(x)[0], rtol=1e-5, atol=1e-5)


def test_gradients_reach_both_tables():
    bias = mmpos.bias.ShawBias(3, head_dim=8, distance=2)
    q, k, v = torch.randn(3, 1, 3, 7, 8).unbind(0)
    mmpos.attend(q, k, v, bias=bias(sequence(7), sequence(7))).square().sum().backward()
    for table in (bias.key_table, bias.value_table):
        assert table.grad is not None
        assert table.grad.isfinite().all()
        assert table.grad[0].abs().amax(-1).min() > 0


@pytest.mark.parametrize("distance", [-1, (2, -1), (1, 2, 3)])
def test_distances_that_are_none(unchecked, distance):
    with pytest.raises(ValueError, match=r"one number of 0 or more, or two.*got"):
        mmpos.bias.ShawBias(3, head_dim=8, distance=distance)


def test_differences_that_are_not_whole(unchecked):
    bias = mmpos.bias.ShawBias(3, head_dim=8)
    places = torch.tensor([[0.5], [1.5], [-300.5]])
    bias(places, places)
    with pytest.raises(ValueError, match=r"0\.5 apart.*differences of whole positions"):
        bias(places, places.round())


def test_heads_of_another_width(unchecked):
    bias = mmpos.bias.ShawBias(3, head_dim=8)
    terms = bias(sequence(2), sequence(2))
    q = torch.randn(1, 3, 2, 6)
    with pytest.raises(ValueError, match=r"heads have 6 features, the vectors 8.*head_dim=6"):
        mmpos.attend(q, q, q, bias=terms)
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"values have 6 features.*8.*head_dim"):
        mmpos.attend(q, q, q[..., :6], bias=terms)


def test_sizes_that_are_none(unchecked):
    for heads, head_dim, name in ((0, 8, "heads"), (3, 0, "head_dim")):
        with pytest.raises(ValueError, match=rf"^{name} must be .*1 or more, got 0"):
            mmpos.bias.ShawBias(heads, head_dim=head_dim)
    assert mmpos.bias.ShawBias(3, head_dim=8)(join(absent(1, 1), sequence(2)), sequence(3))
