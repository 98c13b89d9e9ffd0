"""The four terms of Transformer-XL against loops over pairs, and against models that use them."""

import math

import pytest
import torch
from transformers import Wav2Vec2ConformerConfig, XLNetConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

import mmpos
from mmpos.bias import TransformerXLBias
from mmpos.positions import absent, grid, join, sequence


def encode(offset, pairs, base, layout):
    """R of an offset on each axis, an axis after the other; None is no wave."""
    sines, cosines = [], []
    for apart, count in zip(offset, pairs, strict=True):
        for p in range(count):
            angle = None if apart is None else apart * base ** (-p / count)
            sines.append(0.0 if angle is None else math.sin(angle))
            cosines.append(0.0 if angle is None else math.cos(angle))
    if layout == "half":
        return torch.tensor(sines + cosines, dtype=torch.float64)
    both = [wave for pair in zip(sines, cosines, strict=True) for wave in pair]
    return torch.tensor(both, dtype=torch.float64)


def loop(bias, q, k, v, places, others, pairs, visible=None, scale=None):
    q, k, v = (part.double() for part in (q, k, v))
    weight, u, w = (part.detach().double() for part in (bias.weight, bias.content, bias.offset))
    weight = weight.unflatten(0, (q.shape[1], -1))
    scores = torch.zeros(*q.shape[:-1], k.shape[2], dtype=torch.float64)
    for i, j in torch.cartesian_prod(torch.arange(q.shape[2]), torch.arange(k.shape[2])).tolist():
        apart = [
            None if math.isnan(a - b) else a - b
            for a, b in zip(places[i].tolist(), others[j].tolist(), strict=True)
        ]
        wave = encode(apart, pairs, bias.base, bias.layout)
        place = weight @ wave
        score = (q[:, :, i] * (k[:, :, j] + place)).sum(-1) + (w * place).sum(-1)
        if any(part is not None for part in apart):
            score = score + (u * k[:, :, j]).sum(-1)
        scores[:, :, i, j] = score * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [9, 3, 1])
@pytest.mark.parametrize("apart", [1, 2], ids=["consecutive", "apart"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_pairs_one_by_one(layout, causal, queries, apart, scale):
    bias = TransformerXLBias(3, head_dim=8, dim=10, base=50.0, layout=layout, std=0.5)
    others = apart * sequence(9, start=296)
    places = others[-queries:]
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 5)
    visible = torch.ones(queries, 9).tril(9 - queries).bool() if causal else None
    out = mmpos.attend(q, k, v, bias=bias(places, others), causal=causal, scale=scale)
    close(out, loop(bias, q, k, v, places, others, (5,), visible, scale))


def test_the_shift_is_taken_where_it_is_less_work_and_gives_the_same():
    bias = TransformerXLBias(3, head_dim=8, dim=64, std=0.5)
    q, k, v = torch.randn(2, 3, 12, 8), torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 8)
    for places, others, shifts in (
        (sequence(12, start=18), sequence(30), True),
        (sequence(12, start=-500), sequence(30), True),
        (sequence(12), sequence(30) + 0.5, True),
        (sequence(1), sequence(30), False),
        (sequence(12).flip(0), sequence(30), False),
        (sequence(12), 2 * sequence(30), False),
        (sequence(12).expand(2, 12, 1), sequence(30), False),
        (join(absent(1, 1), sequence(11)), sequence(30), False),
    ):
        terms = bias(places, others)
        assert (terms.shifted is not None) == shifts
        out = mmpos.attend(q[:, :, : places.shape[-2]], k, v, bias=terms)
        rows = places if places.ndim == 2 else places[0]
        close(out, loop(bias, q[:, :, : len(rows)], k, v, rows, others, (32,)))


def test_no_shift_along_a_diagonal_of_two_axes():
    bias = TransformerXLBias(3, (40, 40), head_dim=8, dim=64, std=0.5)
    q, k, v = torch.randn(2, 3, 12, 8), torch.randn(2, 3, 30, 8), torch.randn(2, 3, 30, 8)
    places, others = sequence(12).expand(12, 2), sequence(30).expand(30, 2)
    out = mmpos.attend(q, k, v, bias=bias(places, others))
    close(out, loop(bias, q, k, v, places, others, (16, 16)))


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_vectors_of_offsets_are_not_rounded_under_autocast(cast):
    bias = TransformerXLBias(3, head_dim=8, dim=64).to(cast)
    plain = bias(sequence(12), sequence(30)).shifted
    with torch.autocast("cpu", torch.bfloat16):
        again = bias(sequence(12), sequence(30)).shifted
    assert plain is not None
    assert plain.dtype == torch.float32
    assert torch.equal(again, plain)


def test_axes_divide_the_waves():
    bias = TransformerXLBias(3, (5, 4), head_dim=8, dim=14, std=0.5)
    places = torch.cat((torch.full((1, 2), torch.nan), grid(5, 4)[::3].float()))
    places[2, 0] = places[3, 1] = torch.nan
    q, k, v = torch.randn(3, 1, 3, len(places), 8).unbind(0)
    out = mmpos.attend(q, k, v, bias=bias(places, places))
    close(out, loop(bias, q, k, v, places, places, (4, 3)))


@pytest.mark.peer("transformers")
def test_two_sided_as_in_the_conformer():
    length, heads, width = 13, 3, 24
    config = Wav2Vec2ConformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        position_embeddings_type="relative",
        max_source_positions=40,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    peer = Wav2Vec2ConformerSelfAttention(config).eval()
    torch.nn.init.normal_(peer.pos_bias_u)
    torch.nn.init.normal_(peer.pos_bias_v)
    bias = TransformerXLBias(heads, head_dim=8, layout="interleaved")
    bias.weight.data = peer.linear_pos.weight.data
    bias.content.data, bias.offset.data = peer.pos_bias_u.data, peer.pos_bias_v.data
    x = torch.randn(2, length, width)
    table = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    expected = peer(x, relative_position_embeddings=table)[0]
    q, k, v = (
        layer(x).unflatten(-1, (heads, 8)).transpose(1, 2)
        for layer in (peer.linear_q, peer.linear_k, peer.linear_v)
    )
    for places in (sequence(length), sequence(length).expand(2, length, 1)):
        out = mmpos.attend(q, k, v, bias=bias(places, places))
        out = peer.linear_out(out.transpose(1, 2).flatten(2))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize("kind", ["uni", "bi"])
def test_one_sided_with_a_memory_as_in_xlnet(memory, kind):
    heads, width, queries = 3, 24, 7
    keys = memory + queries
    config = XLNetConfig(d_model=width, n_head=heads, n_layer=1, attn_type=kind, dropout=0.0)
    peer = XLNetRelativeAttention(config).eval()
    for weight in peer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model = XLNetModel(config)
    table = model.relative_positional_encoding(queries, keys)
    x = torch.randn(keys, 2, width)
    q = torch.einsum("lbw,whd->lbhd", x[memory:], peer.q)
    k, v = (torch.einsum("lbw,whd->lbhd", x, part) for part in (peer.k, peer.v))
    place = torch.einsum("lbw,whd->lbhd", table.expand(-1, 2, -1), peer.r)
    hidden = torch.ones(queries, keys).triu(1 + memory)[..., None, None].expand(-1, -1, 2, -1)
    expected = peer.rel_attn_core(q, k, v, place, attn_mask=hidden if kind == "uni" else None)
    bias = TransformerXLBias(heads, head_dim=width // heads)
    bias.weight.data = peer.r.data.flatten(1).T
    bias.content.data, bias.offset.data = peer.r_w_bias.data, peer.r_r_bias.data
    out = mmpos.attend(
        *(part.permute(1, 2, 0, 3) for part in (q, k, v)),
        bias=bias(sequence(queries, start=memory), sequence(keys)),
        causal=kind == "uni",
    )
    torch.testing.assert_close(out.permute(2, 0, 1, 3), expected, rtol=1e-5, atol=1e-5)


def test_offsets_of_the_upper_triangle_are_not_the_next_row():
    """Three tokens that attend both ways; the one-sided shift would read row 1 into row 0."""
    bias = TransformerXLBias(1, head_dim=2, dim=2)
    bias.weight.data, bias.content.data = torch.eye(2), torch.zeros(1, 2)
    bias.offset.data = torch.tensor([[1.0, 0.0]])  # the sine of the offset
    scores = bias(sequence(3), sequence(3)).scores(
        torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 1
    )
    expected = [[math.sin(i - j) for j in range(3)] for i in range(3)]
    torch.testing.assert_close(scores[0, 0], torch.tensor(expected))


def test_far_out_it_stays_exact():
    bias = TransformerXLBias(3, head_dim=8, std=0.5)
    near, far = sequence(9) * 3, sequence(9) * 3 + 100_000
    q, k, v = torch.randn(3, 1, 3, 9, 8).unbind(0)
    out, moved = (mmpos.attend(q, k, v, bias=bias(where, where)) for where in (near, far))
    torch.testing.assert_close(out, moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim must be even.*got 7"),
        ({"dim": 0}, "dim must be even.*got 0"),
        ({"layout": "both"}, "layout must be one of.*half.*interleaved.*got 'both'"),
        ({"base": 0.0}, "base must be above 0"),
        ({"axes": 3, "dim": 4}, "2 pairs.*3 axes"),
    ],
)
def test_arguments_that_are_none(unchecked, arguments, message):
    axes = arguments.pop("axes", 1)
    with pytest.raises(ValueError, match=message):
        TransformerXLBias(3, axes, head_dim=8, **arguments)


def test_other_heads(unchecked):
    terms = TransformerXLBias(3, head_dim=8)(sequence(2), sequence(2))
    few, narrow = torch.randn(1, 2, 2, 8), torch.randn(1, 3, 2, 6)
    with pytest.raises(ValueError, match=r"\(1, 3, 2, 2\).*\(1, 2, 2, 2\)"):
        mmpos.attend(few, few, few, bias=terms)
    with pytest.raises(ValueError, match=r"3 heads of 6.*3 of 8.*head_dim=6"):
        mmpos.attend(narrow, narrow, narrow, bias=terms)
    with pytest.raises(ValueError, match=r"2 heads of 8.*3 of 8.*heads=2"):
        terms.scores(few, few, 1.0)
