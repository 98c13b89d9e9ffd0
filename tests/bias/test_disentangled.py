"""DeBERTa's terms against loops over pairs, and against the models' own attention."""

import math

import pytest
import torch
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta.modeling_deberta import (
    DisentangledSelfAttention as First,
)
from transformers.models.deberta.modeling_deberta import build_relative_position
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention as Second,
)

import mmpos
from mmpos.bias import DisentangledBias
from mmpos.positions import absent, grid, join, sequence


def bucket(offset, span, max_distance):
    """The row of an offset, by the formula in plain Python."""
    if max_distance is not None and abs(offset) > span // 2:
        middle = span // 2
        share = math.log(abs(offset) / middle) / math.log((max_distance - 1) / middle)
        far = middle + math.ceil(share * (middle - 1) - 1e-9)
        offset = int(math.copysign(far, offset))
    return max(-span, min(span - 1, offset)) + span


def loop(bias, q, k, v, places, others, scale):
    """Sum over pairs in float64; a coordinate that is not there has no vector."""
    q, k, v = (part.double() for part in (q, k, v))
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    numbers = {name: own.detach().double() for name, own in bias.named_parameters()}
    table = numbers["table"]
    if bias.norm is not None:
        mean, spread = table.mean(-1, keepdim=True), table.var(-1, keepdim=True, correction=0)
        table = (table - mean) / (spread + bias.norm_eps).sqrt()
        table = table * numbers["norm.weight"] + numbers["norm.bias"]
    vectors = {}
    for name in ("key", "query"):
        if f"{name}.weight" in numbers:
            own = table @ numbers[f"{name}.weight"].T + numbers.get(f"{name}.bias", 0)
            vectors[name] = own.unflatten(-1, (q.shape[1], -1))
    scores = torch.zeros(*q.shape[:-1], k.shape[2], dtype=torch.float64)
    for i, j in torch.cartesian_prod(torch.arange(q.shape[2]), torch.arange(k.shape[2])).tolist():
        score = (q[:, :, i] * k[:, :, j]).sum(-1)
        for axis in range(len(table)):
            apart = float(places[i, axis] - others[j, axis])
            if math.isnan(apart):
                continue
            row = bucket(int(apart), bias.span, bias.max_distance)
            if "key" in vectors:
                score = score + (q[:, :, i] * vectors["key"][axis, row]).sum(-1)
            if "query" in vectors:
                score = score + (k[:, :, j] * vectors["query"][axis, row]).sum(-1)
        scores[:, :, i, j] = score * scale
    return scores.softmax(-1) @ v


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def random(bias):
    with torch.no_grad():
        for own in bias.parameters():
            own.normal_(std=0.5)
    return bias


@pytest.mark.parametrize("parts", [("c2p", "p2c"), ("p2c", "c2p"), ("c2p",), ("p2c",)])
@pytest.mark.parametrize(("span", "max_distance"), [(4, None), (1, None), (6, 20), (2, 12)])
@pytest.mark.parametrize("more", [{}, {"norm_eps": 0.1, "constants": (True, False), "dim": 10}])
def test_pairs_one_by_one(parts, span, max_distance, more):
    bias = random(
        DisentangledBias(3, head_dim=8, span=span, max_distance=max_distance, parts=parts, **more)
    )
    assert bias.scale == pytest.approx(1 / math.sqrt(8 * (1 + len(parts))))
    places, others = torch.tensor([300, 2, -7, 303]), torch.tensor([301, 300, 0, 298, 5, 310, -19])
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 5)
    places, others = places.unsqueeze(-1), others.unsqueeze(-1)
    for scale in (bias.scale, 0.7):
        out = mmpos.attend(q, k, v, bias=bias(places, others), scale=scale)
        close(out, loop(bias, q, k, v, places, others, scale))


def test_a_term_that_is_left_out_has_no_numbers():
    names = lambda *parts: {  # noqa: E731
        name for name, _ in DisentangledBias(3, head_dim=8, parts=parts).named_parameters()
    }
    assert names("c2p") == {"table", "key.weight"}
    assert names("p2c") == {"table", "query.weight", "query.bias"}
    assert names("p2c", "c2p") == {"table", "key.weight", "query.weight", "query.bias"}


def test_runs_of_heads_share_keys():
    bias = random(DisentangledBias(6, head_dim=8, span=3))
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out = mmpos.attend(q, k, v, bias=bias(sequence(5), sequence(5)), scale=0.2)
    close(out, loop(bias, q, k, v, sequence(5), sequence(5), 0.2))


def test_axes_have_tables_of_their_own():
    bias = random(DisentangledBias(3, (5, 4), head_dim=8, span=2))
    places = torch.cat((torch.full((1, 2), torch.nan), grid(5, 4)[::3].float()))
    places[2, 0] = torch.nan
    q, k, v = torch.randn(3, 1, 3, len(places), 8).unbind(0)
    out = mmpos.attend(q, k, v, bias=bias(places, places), scale=0.2)
    close(out, loop(bias, q, k, v, places, places, 0.2))


def test_positions_of_each_row():
    bias = random(DisentangledBias(3, head_dim=8, span=5))
    rows = torch.stack((sequence(6), 3 * sequence(6) + 300))
    q, k, v = torch.randn(3, 2, 3, 6, 8).unbind(0)
    out = mmpos.attend(q, k, v, bias=bias(rows, rows), scale=0.2)
    for row in range(2):
        own = [part[row : row + 1] for part in (q, k, v)]
        close(out[row : row + 1], loop(bias, *own, rows[row], rows[row], 0.2))


def test_rows():
    plain = DisentangledBias(3, head_dim=8, span=4)
    assert plain.rows_of([-9, -4, -3, 0, 3, 4, 9]) == [0, 0, 1, 4, 7, 7, 7]
    assert plain.rows_of([]) == []
    buckets = DisentangledBias(3, head_dim=8, span=256, max_distance=512)  # DeBERTa V3
    assert buckets.rows_of([0, 1, 128, -128]) == [256, 257, 384, 128]
    assert buckets.rows_of([129, 511, 512, 10**6]) == [385, 511, 511, 511]
    assert buckets.rows_of([-511, -512, -(10**6)]) == [1, 0, 0]
    rows = buckets.rows_of(range(-700, 700))
    assert rows == sorted(rows)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
def test_deberta(length, terms):
    config = DebertaConfig(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=terms,
        max_relative_positions=7,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    peer, table = First(config).eval(), torch.randn(14, 24)
    bias = DisentangledBias(3, head_dim=8, span=7, parts=terms)
    bias.table.data = table.unsqueeze(0)
    if bias.key is not None:
        bias.key.weight = peer.pos_proj.weight
    if bias.query is not None:
        bias.query = peer.pos_q_proj
    x = torch.randn(2, length, 24)
    q, k, v = peer.in_proj(x).unflatten(-1, (3, 24)).transpose(1, 2).chunk(3, -1)
    q, v = (part + own.view(3, 1, 8) for part, own in ((q, peer.q_bias), (v, peer.v_bias)))
    out = mmpos.attend(q, k, v, bias=bias(sequence(length), sequence(length)), scale=bias.scale)
    seen = torch.ones(2, 1, length, length)
    where = build_relative_position(x, x)
    expected, _ = peer(x, seen, relative_pos=where, rel_embeddings=table)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("length", [3, 60])
def test_deberta_v2(length):
    config = DebertaV2Config(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=6,
        max_relative_positions=30,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    peer, table = Second(config).eval(), torch.randn(12, 24)
    bias = DisentangledBias(3, head_dim=8, span=6, max_distance=30, constants=(True, True))
    bias.table.data = table.unsqueeze(0)
    bias.key, bias.query = peer.pos_key_proj, peer.pos_query_proj
    x = torch.randn(2, length, 24)
    q, k, v = (
        own(x).unflatten(-1, (3, 8)).transpose(1, 2)
        for own in (peer.query_proj, peer.key_proj, peer.value_proj)
    )
    out = mmpos.attend(q, k, v, bias=bias(sequence(length), sequence(length)), scale=bias.scale)
    expected, _ = peer(x, torch.ones(2, 1, length, length), rel_embeddings=table)
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_of_keys_is_not_seen_in_weights():
    bias = DisentangledBias(3, head_dim=8, span=4, constants=(True, True))
    q, k, v = torch.randn(3, 1, 3, 7, 8).unbind(0)
    run = lambda: mmpos.attend(q, k, v, bias=bias(sequence(7), sequence(7)))  # noqa: E731
    before = run()
    torch.nn.init.normal_(bias.key.bias)
    torch.testing.assert_close(run(), before)
    torch.nn.init.normal_(bias.query.bias)
    assert (run() - before).abs().max() > 1e-2


def test_layers_that_share_a_table():
    first, second = (DisentangledBias(3, head_dim=8, span=4, norm_eps=1e-7) for _ in range(2))
    second.share_table(first)
    both = torch.nn.ModuleList((first, second))
    assert second.table is first.table
    assert second.norm is first.norm
    assert len(list(both.parameters())) == 3 + 2 * 3
    q, k, v = torch.randn(3, 1, 3, 5, 8).unbind(0)
    for own in both:
        mmpos.attend(q, k, v, bias=own(sequence(5), sequence(5))).square().sum().backward()
    whole = first.table.grad.clone()
    both.zero_grad()
    mmpos.attend(q, k, v, bias=first(sequence(5), sequence(5))).square().sum().backward()
    assert not torch.allclose(first.table.grad, whole)


@pytest.mark.parametrize("more", [{"span": 5}, {"span": 4, "norm_eps": 1e-5}])
def test_tables_that_cannot_be_shared(unchecked, more):
    bias = DisentangledBias(3, head_dim=8, span=4)
    table = bias.table
    with pytest.raises(ValueError, match=r"a table \(1, .*norm_eps=.* cannot serve a bias for \(1"):
        bias.share_table(DisentangledBias(3, head_dim=8, **more))
    assert bias.table is table


@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16])
def test_vectors_are_not_rounded_under_autocast(cast):
    bias = DisentangledBias(3, head_dim=8, span=4, norm_eps=1e-7).to(cast)
    plain = bias.vectors()
    with torch.autocast("cpu", torch.bfloat16):
        again = bias.vectors()
    for a, b in zip(plain, again, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == (1, 3, 8, 8)
        assert torch.equal(a, b)


def test_far_out_it_stays_exact():
    bias = random(DisentangledBias(3, head_dim=8, span=4))
    near, far = sequence(9), sequence(9) + 10_000_000
    q, k, v = torch.randn(3, 1, 3, 9, 8).unbind(0)
    out, moved = (mmpos.attend(q, k, v, bias=bias(where, where)) for where in (near, far))
    assert torch.equal(out, moved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"span": 0}, "span and dim must be 1 or more, got 0 and 24"),
        ({"dim": 0}, "got 512 and 0"),
        ({"parts": ()}, "one or both of .*got"),
        ({"parts": ("p2p",)}, r"parts must be one or both.*\('p2p',\)"),
        ({"parts": ("c2p", "c2p")}, "each once"),
        ({"constants": (True,)}, r"constants are two.*got \(True,\)"),
        ({"span": 8, "max_distance": 5}, "with max_distance=5, span must be.* below 4.*got span=8"),
        ({"span": 7, "max_distance": 50}, "span must be even.*got span=7"),
        ({"span": 1, "max_distance": 50}, "span must be even.*got span=1"),
    ],
)
def test_arguments_that_are_none(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        DisentangledBias(3, head_dim=8, **arguments)
    assert "\n" not in str(raised.value)


def test_differences_that_are_not_whole(unchecked):
    bias = DisentangledBias(3, head_dim=8)
    places = torch.tensor([[0.5], [1.5], [-300.5]])
    bias(places, places)
    with pytest.raises(ValueError, match=r"0\.5 apart.*differences of whole positions"):
        bias(places.round() + 0.5, places.round())


def test_differences_that_are_not_whole_where_one_cannot_look(monkeypatch):
    bias = random(DisentangledBias(3, head_dim=8, span=4))
    monkeypatch.setattr("mmpos.bias.disentangled.looking", lambda positions: False)
    places = sequence(4).float()
    q = torch.randn(1, 3, 4, 8)
    whole = bias(places, places).scores(q, q, 1.0)
    places[2] += 0.25
    scores = bias(places, sequence(4)).scores(q, q, 1.0)
    assert scores[:, :, 2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(scores[:, :, others], whole[:, :, others])
    rows = torch.stack((places, sequence(4).float()))
    q = torch.randn(2, 3, 4, 8)
    scores = bias(rows, rows).scores(q, q, 1.0)
    assert scores[0, :, 2].isnan().sum() == 3 * 3
    assert scores[1].isfinite().all()


def test_heads_of_another_width(unchecked):
    terms = DisentangledBias(3, head_dim=8)(sequence(2), sequence(2))
    narrow, few = torch.randn(1, 3, 2, 6), torch.randn(1, 2, 2, 8)
    with pytest.raises(ValueError, match=r"3 heads of 6.*3 of 8.*head_dim=6"):
        mmpos.attend(narrow, narrow, narrow, bias=terms)
    with pytest.raises(ValueError, match=r"2 heads of 8.*3 of 8.*heads=2"):
        terms.scores(few, few, 1.0)


def test_tokens_without_a_place():
    bias = random(DisentangledBias(3, head_dim=8, span=4, constants=(True, True)))
    places = join(absent(1, 1), sequence(4))
    q, k, v = torch.randn(3, 1, 3, 5, 8).unbind(0)
    out = mmpos.attend(q, k, v, bias=bias(places, places), scale=0.2)
    close(out, loop(bias, q, k, v, places, places, 0.2))


def test_in_a_transformer():
    from functools import partial

    model = mmpos.models.Transformer(
        1,
        dim=24,
        depth=2,
        heads=3,
        bias=partial(DisentangledBias, span=6),
        per_layer=["bias"],
    )
    x = torch.randn(2, 9, 24)
    out = model(x, sequence(9))
    assert torch.equal(model(x, sequence(9) + 300), out)
    assert not torch.allclose(model(x, 2 * sequence(9)), out)
