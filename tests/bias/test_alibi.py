import math
from collections.abc import Callable

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import mmpos
from mmpos import ALiBi
from mmpos.bias.alibi import Distance, alibi_slopes
from mmpos.coordinates import Centered, Index, Scaled
from mmpos.positions import absent, grid, join, sequence

GOLDEN = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
    12: [
        *[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
        *[0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849],
    ],
    14: [
        *[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
        *[0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849],
        *[0.044194173824159244, 0.022097086912079626],
    ],
}
"""Computed from the published code, apart from this package."""


def published(heads: int) -> list[float]:
    """The rule of the paper's code, in its own recursive form."""
    if math.log2(heads).is_integer():
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        return [start * start**head for head in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return published(closest) + published(2 * closest)[0::2][: heads - closest]


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("heads", range(1, 41))
def test_slopes_are_the_published_ones(heads):
    assert alibi_slopes(heads) == pytest.approx(published(heads), rel=1e-12)
    assert alibi_slopes(heads) == pytest.approx(GOLDEN.get(heads, published(heads)), rel=1e-12)
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bloom)
    bias = ALiBi(heads)(torch.tensor([[0]]), torch.tensor([[1]])).flatten()
    torch.testing.assert_close(-bias, bloom)


@pytest.mark.peer("transformers")
@pytest.mark.parametrize("heads", [3, 8])
def test_it_attends_as_bloom_does_under_a_causal_mask(softmax_attention, heads):
    length = 300
    q, k, v = torch.randn(3, 2, heads, length, 8)
    bloom = build_alibi_tensor(torch.ones(2, length), heads, torch.float32)
    bloom = bloom.reshape(2, heads, 1, length).double()
    lower = torch.ones(length, length).tril().bool()
    expected = softmax_attention(q, k, v, bias=bloom - bloom.amax(-1, True), visible=lower)
    bias = ALiBi(heads)(sequence(length), sequence(length))
    out = mmpos.attend(q, k, v, bias=bias, causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_it_is_symmetric_for_encoders():
    bias = ALiBi(3)(sequence(4), sequence(4))
    assert bias[2].tolist() == [[-0.25 * abs(i - j) for j in range(4)] for i in range(4)]


def test_long_contexts_stay_exact():
    bias = ALiBi(8)(torch.tensor([[8192]]), torch.arange(8193).unsqueeze(-1))
    assert bias[0, 0, -8:].tolist() == [-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]


DISTANCES: dict[Distance, Callable[[list[float]], float]] = {
    "euclidean": lambda gaps: math.sqrt(sum(gap * gap for gap in gaps)),
    "l1": sum,
    "linf": max,
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("sizes", [(7,), (4, 4), (2, 300), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_distances_between_cells(sizes, distance, heads):
    cells = grid(*sizes)[-40:].tolist()
    expected = [
        [
            [
                -slope * DISTANCES[distance]([abs(a - b) for a, b in zip(q, k, strict=True)])
                for k in cells
            ]
            for q in cells
        ]
        for slope in published(heads)
    ]
    positions = torch.tensor(cells)
    bias = ALiBi(heads, len(sizes), distance=distance)(positions, positions)
    torch.testing.assert_close(bias, torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)])
def test_it_attends_as_cromas_formula(softmax_attention, sizes):
    """CROMA's bias is built by a double loop over patches, here on rectangles too."""
    height, width = sizes
    places = [(y, x) for y in range(height) for x in range(width)]
    expected = torch.zeros(6, len(places), len(places), dtype=torch.float64)
    for head, slope in enumerate(published(6)):
        for i, (y, x) in enumerate(places):
            for j, (v, u) in enumerate(places):
                expected[head, i, j] = -slope * math.sqrt((y - v) ** 2 + (x - u) ** 2)
    q, k, v = torch.randn(3, 2, 6, len(places), 8)
    bias = ALiBi(6, 2)(grid(*sizes), grid(*sizes))
    torch.testing.assert_close(bias.double(), expected, rtol=1e-6, atol=1e-6)
    out = mmpos.attend(q, k, v, bias=bias)
    want = softmax_attention(q, k, v, bias=expected)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_several_axes_on_one_of_them_are_one_axis():
    for axis in range(3):
        positions = torch.full((7, 3), 2.0)
        positions[:, axis] = torch.arange(7) * 50.5
        for distance in DISTANCES:
            bias = ALiBi(3, 3, distance=distance)(positions, positions)
            turns = positions[:, axis : axis + 1]
            assert torch.equal(bias, ALiBi(3)(turns, turns))


def test_an_axis_that_one_of_the_two_lacks_does_not_count():
    text, image = torch.tensor([[3.0, math.nan]]), torch.tensor([[7.0, 100.0]])
    for distance in DISTANCES:
        bias = ALiBi(1, 2, distance=distance)
        assert bias(text, image).item() == bias(image, text).item() == -4 / 256
    assert not ALiBi(3, 2)(join(absent(1, 2), image), absent(2, 2)).any()


def test_readings_change_the_unit():
    positions = grid(4, 6)
    plain = ALiBi(3, 2)(positions, positions)
    scaled = ALiBi(3, (2, 3), coordinates=Scaled())(positions, positions, extent=(4, 6))
    torch.testing.assert_close(scaled, plain / 2)
    square = ALiBi(3, 1, coordinates=Centered())(sequence(8), sequence(8), extent=(8,))
    torch.testing.assert_close(square, ALiBi(3)(sequence(8), sequence(8)) / 4)


def test_a_disturbance_is_the_same_for_queries_and_keys():
    shifted = ALiBi(3, 2, coordinates=Index(shift=5.0)).train()
    positions = grid(3, 4)
    still = ALiBi(3, 2)(positions, positions)
    torch.testing.assert_close(shifted(positions, positions), still, rtol=0, atol=1e-5)
    scaled = ALiBi(3, 2, coordinates=Index(rescale=4.0)).train()(positions, positions[:5])
    ratio = scaled[still[..., :5] != 0] / still[..., :5][still[..., :5] != 0]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio))
    assert ratio[0] != 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads must be a whole number of 1 or more, got 0"),
        ({"heads": 3, "axes": 0}, "axes must be a whole number of 1 or more"),
        ({"heads": 3, "distance": "cosine"}, "distance must be one of.*linf.*got 'cosine'"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        ALiBi(**arguments)


@pytest.mark.parametrize("swap", [False, True])
def test_queries_and_keys_are_both_checked(unchecked, swap):
    pair = [grid(2, 2), sequence(4)]
    with pytest.raises(ValueError, match=r"\(4, 1\), expected \[..., length, 2\]"):
        ALiBi(3, 2)(*(reversed(pair) if swap else pair))
    pair = [sequence(4), sequence(4).half()]
    with pytest.raises(TypeError, match="float16"):
        ALiBi(3)(*(reversed(pair) if swap else pair))


@pytest.mark.parametrize("start", [2**24, 1_700_000_000])
def test_distances_are_exact_far_out(start):
    places = mmpos.positions.sequence(3, start=start)
    assert torch.equal(
        mmpos.ALiBi(2)(places, places), mmpos.ALiBi(2)(places - start, places - start)
    )


@pytest.mark.parametrize("distance", ["euclidean", "l1", "linf"])
def test_positions_have_finite_gradients(distance):
    """At distance 0 too, where a root has none."""
    places = mmpos.positions.grid(2, 3).float().requires_grad_()
    mmpos.ALiBi(2, 2, distance=distance)(places, places).sum().backward()
    assert places.grad is not None and places.grad.isfinite().all()
