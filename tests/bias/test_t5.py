import math

import pytest
import torch
from transformers import LayoutLMv3Config, T5Config
from transformers.models.layoutlmv3.modeling_layoutlmv3 import LayoutLMv3Encoder
from transformers.models.t5.modeling_t5 import T5Attention

import mmpos
from mmpos.bias import T5Bias
from mmpos.coordinates import Scaled
from mmpos.positions import absent, grid, join, sequence

BOTH = {
    -200: 15,
    -128: 15,
    -127: 15,
    -64: 14,
    -20: 10,
    -16: 10,
    -8: 8,
    -7: 7,
    -1: 1,
    0: 0,
    1: 17,
    7: 23,
    8: 24,
    11: 24,
    12: 25,
    16: 26,
    32: 28,
    64: 30,
    91: 31,
    127: 31,
    200: 31,
}
BEFORE = {
    0: 0,
    1: 1,
    8: 8,
    15: 15,
    16: 16,
    17: 16,
    20: 17,
    31: 21,
    32: 21,
    63: 26,
    64: 26,
    91: 29,
    92: 29,
    112: 30,
    113: 31,
    127: 31,
    128: 31,
    500: 31,
    -1: 0,
    -300: 0,
}
"""Offsets, key minus query, and distances before the query; computed apart from this package."""


def test_buckets_are_the_published_ones():
    assert T5Bias(3).bucket_of(0, list(BOTH)) == list(BOTH.values())
    before = [-distance for distance in BEFORE]
    assert T5Bias(3, bidirectional=False).bucket_of(0, before) == list(BEFORE.values())


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("buckets", "reach"),
    [
        *((32, 128), (64, 128), (32, 256), (16, 64), (8, 20), (4, 3), (128, 1024), (320, 800)),
        *((18, 128), (18, 4096), (36, 32), (54, 64), (132, 800)),
    ],
)
def test_buckets_are_those_of_transformers(buckets, reach, bidirectional):
    """In the last few, distances lie on a boundary that float64 rounds to the other side."""
    offsets = torch.arange(-2000, 2001)
    peer = T5Attention._relative_position_bucket(offsets, bidirectional, buckets, reach)
    bias = T5Bias(3, buckets=buckets, max_distance=reach, bidirectional=bidirectional)
    assert bias.bucket_of(0, offsets.tolist()) == peer.tolist()
    if not bidirectional:
        odd = T5Bias(3, buckets=buckets + 1, max_distance=reach, bidirectional=False)
        peer = T5Attention._relative_position_bucket(offsets, False, buckets + 1, reach)
        assert odd.bucket_of(0, offsets.tolist()) == peer.tolist()


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("decoder", [False, True])
@pytest.mark.parametrize("heads", [12, 7])
def test_it_is_the_bias_of_transformers_with_its_weights(heads, decoder):
    config = T5Config(d_model=64, d_kv=8, num_heads=heads, is_decoder=decoder)
    peer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    bias = T5Bias(heads, bidirectional=not decoder)
    bias.load_state_dict({"table": peer.relative_attention_bias.weight})
    positions = sequence(300)
    whole = bias(positions, positions)
    assert torch.equal(whole, peer.compute_bias(300, 300)[0])
    for past in (4, 299):
        cached = peer.compute_bias(1, past + 1, past_seen_tokens=past)[0]
        assert torch.equal(bias(positions[past : past + 1], positions[: past + 1]), cached)
        assert torch.equal(whole[:, past : past + 1, : past + 1], cached)


@pytest.mark.peer("x-transformers")
def test_it_is_x_transformers_without_its_scale():
    peer = pytest.importorskip("x_transformers.x_transformers").RelativePositionBias(
        scale=2.0, causal=True, heads=5
    )
    bias = T5Bias(5, bidirectional=False)
    bias.load_state_dict({"table": peer.relative_attention_bias.weight})
    out = bias(sequence(7, start=193), sequence(200))
    torch.testing.assert_close(2 * out, peer(7, 200), rtol=0, atol=1e-6)


@pytest.mark.peer("transformers")
def test_several_axes_add_up_as_in_layoutlm():
    config = LayoutLMv3Config(num_attention_heads=6, hidden_size=48, num_hidden_layers=0)
    peer = LayoutLMv3Encoder(config)
    places = torch.randint(0, 1000, (2, 40, 2))
    boxes = places[..., [1, 1, 1, 0]]  # x, y, x, y: x of the first corner, y of the last are read
    bias = T5Bias(6, 2, buckets=config.rel_2d_pos_bins, max_distance=config.max_rel_2d_pos)
    tables = (peer.rel_pos_y_bias.weight.t(), peer.rel_pos_x_bias.weight.t())
    bias.load_state_dict({"table": torch.cat(tables)})
    torch.testing.assert_close(bias(places, places), peer._cal_2d_pos_emb(boxes))


def by_formula(offset: float, buckets: int, reach: int, both: bool) -> int:
    offset = math.trunc(offset)
    first, count = 0, buckets
    if both:
        count = buckets // 2
        first = count if offset > 0 else 0
    elif offset > 0:
        offset = 0
    exact, distance = count // 2, abs(offset)
    if distance < exact:
        return first + distance
    beyond = (count - exact) * math.log(distance / exact) / math.log(reach / exact)
    return first + min(count - 1, exact + math.floor(beyond + 1e-5))


@pytest.mark.parametrize("both", [False, True])
def test_each_axis_has_its_buckets(both):
    buckets, reach = (8, 6, 32), (20, 10, 300)
    bias = T5Bias(2, 3, buckets=buckets, max_distance=reach, bidirectional=both)
    places = grid(2, 3, 290)[::13][-40:].float()
    places[:, 1] *= 1.75
    places[3, 0], places[5] = math.nan, math.nan
    table = bias.table.tolist()

    def number(query: list[float], key: list[float]) -> float:
        total, first = 0.0, 0
        for axis in range(3):
            offset = key[axis] - query[axis]
            if not math.isnan(offset):
                row = first + by_formula(offset, buckets[axis], reach[axis], both)
                total += table[row][1]
            first += buckets[axis]
        return total

    expected = [[number(query, key) for key in places.tolist()] for query in places.tolist()]
    every = bias(places, places)
    torch.testing.assert_close(every[1], torch.tensor(expected), rtol=0, atol=1e-6)
    alone = torch.cat([bias(places[i : i + 1], places) for i in range(40)], 1)
    torch.testing.assert_close(every, alone, rtol=0, atol=1e-7)


def test_a_fraction_counts_as_the_whole_number_towards_zero():
    bias = T5Bias(2)
    out = bias(torch.tensor([[0.5]]), torch.tensor([[0.9], [0.1], [2.4], [-1.5], [-1.9]]))
    assert torch.equal(out[:, 0], bias.table[[0, 0, 17, 2, 2]].t())


def test_the_last_bucket_has_no_end():
    bias = T5Bias(2)
    far = torch.tensor([[1_700_000_000], [-1_700_000_000]])
    assert torch.equal(bias(torch.tensor([[0]]), far)[:, 0], bias.table[[31, 15]].t())


def test_positions_decide_and_readings_change_them():
    bias = T5Bias(3, (8,), coordinates=Scaled())
    plain = T5Bias(3)
    plain.load_state_dict(bias.state_dict())
    out = bias(2 * sequence(8), 2 * sequence(8), extent=(16,))
    assert torch.equal(out, plain(sequence(8), sequence(8)))


def test_tokens_without_a_place_have_none():
    bias = T5Bias(3, 2)
    places = join(absent(2, 2), grid(3, 4))
    out = bias(places, places)
    assert not out[:, :2].any() and not out[..., :2].any() and out[:, 2:, 2:].all()
    out.sum().backward()
    assert bias.table.grad is not None
    pairs, heads = 12 * 12 * 2, 3
    assert bias.table.grad.sum().item() == pairs * heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buckets": 33}, "divided evenly between two directions, got 33: pass 34, or bidir"),
        ({"buckets": 2}, "buckets must be 4 or more, got 2"),
        ({"buckets": 1, "bidirectional": False}, "buckets must be 2 or more, got 1"),
        ({"max_distance": 8}, "max_distance must be above 8, the number of.*got 8"),
        ({"max_distance": -5}, "max_distance must be above 8"),
        ({"buckets": (32, 64)}, r"buckets must be one for all or for each of 1 axes, got \(32"),
        ({"max_distance": [9] * 3, "axes": 2}, r"max_distance must be one for all or .* 2 axes"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        T5Bias(3, **arguments)


def test_it_is_rebuilt_from_its_spec():
    bias = T5Bias(3, 2, buckets=[8, 16], max_distance=[20, 40], bidirectional=False)
    assert repr(mmpos.build(bias.spec())) == repr(bias)
