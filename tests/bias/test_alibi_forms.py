"""ALiBi beyond the published bias: other slopes, factors for axes, two sides, and a key channel."""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import mmpos
from mmpos import ALiBi
from mmpos.bias.alibi import alibi_slopes
from mmpos.coordinates import Scaled
from mmpos.positions import absent, grid, join, sequence

S = 2**-0.25
GOLDEN = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    16: [0.5 ** (step / 2) for step in range(1, 17)],
    25: [0.5 ** (step / 2) for step in range(1, 17)]
    + [0.8408964152537145, 0.5946035575013604, 0.42044820762685714, 0.2973017787506802]
    + [0.21022410381342854, 0.14865088937534005, 0.10511205190671426, 0.07432544468767001]
    + [0.052556025953357115],
    40: [S**step for step in range(1, 33)]
    + [0.9170040432046712, 0.7711054127039704, 0.6484197773255047, 0.5452538663326288]
    + [0.45850202160233555, 0.38555270635198513, 0.32420988866275235, 0.27262693316631437],
}
"""Computed from the published code, apart from this package; see also `test_alibi.GOLDEN`."""


@pytest.mark.parametrize("heads", GOLDEN)
def test_slopes_are_the_published_ones(heads):
    assert alibi_slopes(heads) == pytest.approx(GOLDEN[heads], rel=1e-12)


def by_formula(slopes, queries, keys, scale, right=None):
    return torch.tensor(
        [
            [
                [
                    -(right[head] if right and k > q else slope)
                    * math.hypot(*(f * (a - b) for f, a, b in zip(scale, q, k, strict=True)))
                    for k in keys
                ]
                for q in queries
            ]
            for head, slope in enumerate(slopes)
        ]
    )


@pytest.mark.parametrize("learned", [False, True])
def test_a_frame_may_count_for_more_than_a_cell(learned):
    queries, keys = grid(2, 3, 300)[590:601].tolist(), grid(2, 2, 3).tolist()
    scale, slopes = (8.0, 1.0, 0.25), (0.3, 0.0625, 1.0)
    bias = ALiBi(3, 3, axis_scale=scale, slopes=slopes, learned=learned)
    out = bias(torch.tensor(queries), torch.tensor(keys))
    torch.testing.assert_close(out, by_formula(slopes, queries, keys, scale))


@pytest.mark.parametrize("learned", [False, True])
def test_keys_after_the_query_may_have_other_slopes(learned):
    queries, keys = [[0.0], [270.5], [-3.25]], [[float(at)] for at in (-4, 0, 7, 300)]
    left, right = (0.5, 0.0, 0.125), (0.1, 2.0, 0.0)
    if learned:
        left, right = (0.5, 0.2, 0.125), (0.1, 2.0, 0.3)
    bias = ALiBi(3, slopes=left, right_slopes=right, learned=learned)
    out = bias(torch.tensor(queries), torch.tensor(keys))
    torch.testing.assert_close(out, by_formula(left, queries, keys, [1.0], right))


@pytest.mark.peer("x-transformers")
def test_it_is_x_transformers_with_queries_at_the_end():
    peer = pytest.importorskip("x_transformers.x_transformers").AlibiPositionalBias(12)
    for queries, keys in ((5, 5), (3, 300)):
        out = ALiBi(12)(sequence(queries, start=keys - queries), sequence(keys))
        torch.testing.assert_close(out, peer(queries, keys), rtol=1e-6, atol=1e-5)


def test_learned_slopes_begin_at_the_given_ones_and_stay_positive():
    positions = sequence(9)
    bias = ALiBi(6, learned=True, right_slopes=alibi_slopes(6))
    assert {name: tuple(own.shape) for name, own in bias.named_parameters()} == {
        "log_factor": (6,),
        "right_log_factor": (6,),
    }
    torch.testing.assert_close(bias(positions, positions), ALiBi(6)(positions, positions))
    optimizer = torch.optim.SGD(bias.parameters(), lr=10.0)
    for _ in range(20):
        optimizer.zero_grad()
        (-bias(positions, positions)).mean().backward()
        optimizer.step()
    left, right = bias.head_slopes(torch.device("cpu"))
    assert (left > 0).all() and right is not None and (right > 0).all()
    assert (left < torch.tensor(alibi_slopes(6))).all()
    bias.reset_parameters()
    torch.testing.assert_close(bias(positions, positions), ALiBi(6)(positions, positions))


def test_the_gradient_of_a_slope_is_the_distance():
    bias = ALiBi(2, 2, slopes=(0.5, 2.0), learned=True)
    bias(torch.tensor([[1, 7]]), torch.tensor([[4, 3], [1, 7]])).sum().backward()
    assert bias.log_factor is not None
    torch.testing.assert_close(bias.log_factor.grad, torch.tensor([-2.5, -10.0]))


def causal(q, k, v, bias):
    return mmpos.attend(q, k, v, bias=bias, causal=True)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("heads", [3, 8, 12])
def test_one_number_for_each_key_attends_as_the_bias_under_a_causal_mask(heads):
    length = 300
    q, k, v = torch.randn(3, 2, heads, length, 8)
    positions = sequence(length, start=70)
    own = ALiBi(heads).key_bias(positions)
    assert own.shape == (heads, length)
    spread = own.unsqueeze(-2).expand(-1, length, -1)
    whole = causal(q, k, v, ALiBi(heads)(positions, positions))
    torch.testing.assert_close(causal(q, k, v, spread), whole, rtol=1e-4, atol=1e-5)
    step = mmpos.attend(q[:, :, -1:], k, v, bias=spread[:, -1:])
    torch.testing.assert_close(step, whole[:, :, -1:], rtol=1e-4, atol=1e-5)
    bloom = build_alibi_tensor(torch.ones(1, length), heads, torch.float32)
    published = causal(q, k, v, bloom.expand(-1, length, -1))
    torch.testing.assert_close(causal(q, k, v, spread), published, rtol=1e-4, atol=1e-5)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("heads", [8, 12, 14, 16])
def test_one_number_for_each_key_is_mpts(heads):
    own = ALiBi(heads).key_bias(sequence(300)).float()
    mpt = build_mpt_alibi_tensor(heads, 300).squeeze(1)
    torch.testing.assert_close(own, mpt, rtol=1e-6, atol=0)


def test_numbers_of_keys_are_finest_at_the_last():
    """In bfloat16 the last eight of 8192 are all the same if counted from the first, as BLOOM's."""
    own = ALiBi(8).key_bias(sequence(8192))
    assert own[0, -8:].bfloat16().tolist() == [-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]
    far = ALiBi(8).key_bias(sequence(8192, start=1_700_000_000))
    assert torch.equal(far, own)
    with pytest.raises(ValueError, match=r"these go back.*call the bias for pairs"):
        ALiBi(8).key_bias(sequence(8192).flip(0))


def test_numbers_of_keys_follow_readings_factors_rows_and_slopes():
    rows = torch.stack((sequence(5), sequence(5, start=2) * 3))
    bias = ALiBi(3, axis_scale=[2.0], slopes=(1.0, 0.5, 0.25), learned=True)
    out = bias.key_bias(rows)
    assert out.shape == (2, 3, 5)
    assert out[1, 1].tolist() == [-12.0, -9.0, -6.0, -3.0, 0.0]
    out[:, 0].sum().backward()
    scaled = ALiBi(3, (4,), coordinates=Scaled()).key_bias(sequence(8), extent=(8,))
    torch.testing.assert_close(scaled, ALiBi(3).key_bias(sequence(8)) / 2)


def test_numbers_of_keys_are_refused_where_there_are_none(unchecked):
    with pytest.raises(ValueError, match="one axis only, this bias has 2: call the bias for pairs"):
        ALiBi(3, 2).key_bias(grid(2, 2))
    with pytest.raises(ValueError, match="key without a place has bias 0 to every query"):
        ALiBi(3).key_bias(join(absent(1, 1), sequence(3)))
    with pytest.raises(TypeError, match="float16"):
        ALiBi(3).key_bias(sequence(3).half())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slopes": (0.5, 0.25)}, "slopes must be one for each of the 3 heads, got 2"),
        ({"right_slopes": [1.0] * 4}, "right_slopes must be one for each of the 3 heads, got 4"),
        ({"slopes": (0.5, -0.25, 1)}, r"slopes must be finite and 0 or more, got \[0.5, -0.25"),
        ({"slopes": (0.5, math.nan, 1)}, "slopes must be finite and 0 or more"),
        ({"slopes": (0.5, math.inf, 1)}, "slopes must be finite and 0 or more"),
        ({"slopes": (0.5, 0.0, 1), "learned": True}, "slopes must be finite and above 0"),
        ({"right_slopes": [1.0] * 3, "axes": 2}, "one axis, this bias has 2: drop them"),
        ({"axis_scale": (1.0, 2.0)}, "axis_scale must be 1 factors above 0.*got"),
        ({"axis_scale": (1.0, 0.0), "axes": (4, 4)}, "axis_scale must be 2 factors above 0.*got"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        ALiBi(3, **arguments)


def test_it_is_rebuilt_from_its_spec():
    bias = ALiBi(3, (4, 6), distance="l1", axis_scale=[1, 2.5], slopes=[1, 2, 3], learned=True)
    again = mmpos.build(bias.spec())
    assert repr(again) == repr(bias)
    assert "slopes=(1, 2, 3), learned=True" in repr(bias)


@pytest.mark.parametrize("distance", ["euclidean", "l1", "linf"])
def test_tokens_without_a_place_leave_gradients_finite(distance):
    places = join(absent(1, 2), grid(2, 3)).requires_grad_()
    bias = ALiBi(2, 2, distance=distance)(places, places)
    bias.sum().backward()
    assert places.grad is not None and places.grad[1:].isfinite().all() and places.grad.any()
