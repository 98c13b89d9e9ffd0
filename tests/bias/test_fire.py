import math

import pytest
import torch

import mmpos
from mmpos.bias import FIREBias
from mmpos.coordinates import Index, Scaled
from mmpos.positions import absent, grid, join, sequence

RATIOS = {(10, 0): 0.34631731543016947, (64, 0): 1.0, (128, 0): 1.0, (0, 0): 0.0}
RATIOS |= {(128, 64): 0.7625648457813774, (256, 192): 0.6100378427124324}
"""For c = 0.1 and L = 64 at (query, key); computed apart from this package."""


def naive(bias: FIREBias, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The formula in float64, with a hidden layer for each pair, as one would write it first."""
    own = {name: weight.double() for name, weight in bias.named_parameters()}
    c = bias.c * own["log_c"].exp()
    least = bias.threshold * own["log_threshold"].exp()
    i, j = queries.double(), keys.double().mT
    ratio = torch.log(c * (i - j).abs() + 1) / torch.log(c * torch.maximum(i, least) + 1)
    inner = (ratio.unsqueeze(-1) * own["weight_in"] + own["bias_in"]).relu()
    return (inner @ own["weight_out"].T + own["bias_out"]).movedim(-1, -3)


def test_ratios_are_the_published_formulas():
    bias = FIREBias(2, threshold=64.0)
    for (query, key), expected in RATIOS.items():
        ratio = bias.ratio(torch.tensor(query).double(), torch.tensor(key).double())
        assert ratio.item() == pytest.approx(expected, rel=1e-6)


def test_equal_distances_further_on_have_other_numbers():
    assert not FIREBias.relative
    bias = FIREBias(2, threshold=64.0)
    first, later = (bias(sequence(1, start=at), sequence(1, start=at - 64)) for at in (128, 256))
    assert (first - later).abs().min() > 1e-3
    near = [bias(sequence(1, start=at), sequence(1, start=at - 5)) for at in (9, 64)]
    torch.testing.assert_close(*near)  # up to the threshold all queries are treated alike


@pytest.mark.parametrize(("heads", "hidden"), [(12, 32), (3, 1), (7, 40)])
def test_it_is_the_formula_with_its_gradients(heads, hidden):
    bias = FIREBias(heads, hidden=hidden, c=0.3, threshold=40.0)
    with torch.no_grad():
        bias.log_c += 0.5
        bias.log_threshold -= 0.25
        if hidden > 1:
            bias.weight_in[1:3] = 0.0
            bias.bias_in[1:3] = torch.tensor([0.75, -0.5])
            bias.weight_in[3:6] = torch.tensor([0.5, -0.5, 0.25])  # that bend at one ratio
            bias.bias_in[3:6] = torch.tensor([-0.25, 0.25, -0.125])
    queries = join(sequence(80, start=-7), sequence(50, start=290) + 0.3)
    keys = sequence(333) * 0.9
    gradient = torch.randn(heads, 130, 333)
    results = []
    for out in (bias(queries, keys), naive(bias, queries, keys)):
        bias.zero_grad()
        out.backward(gradient.to(out))
        results.append([out.detach().double(), *(own.grad.clone() for own in bias.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))


def test_a_step_against_a_cache_is_a_new_row_at_each_length():
    bias = FIREBias(4, threshold=16.0)
    whole = bias(sequence(40), sequence(40))
    for now in (0, 5, 39):
        step = bias(sequence(1, start=now), sequence(now + 1))
        assert torch.equal(step, whole[:, now : now + 1, : now + 1])


def test_keys_after_the_query_have_finite_numbers():
    bias = FIREBias(4, threshold=3.0)
    out = bias(sequence(3), sequence(5000))
    assert out.isfinite().all()
    torch.testing.assert_close(
        out[:, 0, 7:8], naive(bias, sequence(1), sequence(8))[:, 0, 7:].float()
    )


def test_tokens_without_a_place_have_none():
    bias = FIREBias(4, threshold=3.0)
    places = join(absent(2, 1), sequence(5)).requires_grad_()
    out = bias(places, places)
    assert not out[:, :2].any() and not out[..., :2].any()
    assert torch.equal(out[:, 2:, 2:], bias(sequence(5), sequence(5)))
    out.sum().backward()
    assert places.grad is not None and places.grad[2:].isfinite().all()
    assert all(own.grad is not None and own.grad.isfinite().all() for own in bias.parameters())


def test_the_factor_and_the_threshold_stay_positive():
    bias, positions = FIREBias(2, c=0.1, threshold=8.0), sequence(30)
    optimizer = torch.optim.Adam([bias.log_c, bias.log_threshold], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        bias.ratio(positions.double(), positions.double().mT).sum().backward()
        optimizer.step()
    assert bias.log_c.item() < -1 and bias.ratio(positions, positions.mT).isfinite().all()
    bias.reset_parameters()
    assert bias.log_c.item() == bias.log_threshold.item() == 0


def test_layers_begin_as_linear_ones():
    torch.manual_seed(3)
    bias = FIREBias(500, hidden=400)
    for own, bound in ((bias.weight_in, 1.0), (bias.bias_in, 1.0), (bias.weight_out, 0.05)):
        assert own.abs().max() <= bound and own.std().item() == pytest.approx(
            bound / 3**0.5, rel=0.1
        )


def test_readings_change_the_unit_and_disturbances_pass():
    bias = FIREBias(3, (8,), coordinates=Scaled())
    out = bias(sequence(16), sequence(16), extent=(16,))
    torch.testing.assert_close(out, FIREBias.dense(bias, *[sequence(16).double() / 2] * 2))
    moved = FIREBias(3, threshold=2.0, coordinates=Index(shift=50.0)).train()
    assert not torch.equal(moved(sequence(9), sequence(9)), moved.eval()(sequence(9), sequence(9)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axes": 2}, "FIRE is for one axis, got 2"),
        ({"axes": (4, 4)}, "FIRE is for one axis, got 2"),
        ({"hidden": 0}, "hidden must be 1 or more, got 0"),
        ({"c": 0.0}, "c and threshold must be above 0, got 0.0 and 512.0"),
        ({"threshold": -1.0}, "c and threshold must be above 0, got 0.1 and -1.0"),
        ({"threshold": math.inf}, "c and threshold must be above 0"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        FIREBias(3, **arguments)


def test_other_axes_are_refused(unchecked):
    with pytest.raises(ValueError, match="length, 1"):
        FIREBias(3)(grid(2, 2), grid(2, 2))


def test_it_is_rebuilt_from_its_spec():
    bias = FIREBias(3, (700,), hidden=8, c=0.5, threshold=64)
    assert repr(mmpos.build(bias.spec())) == repr(bias)
