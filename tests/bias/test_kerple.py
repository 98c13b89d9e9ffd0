import math
from itertools import product

import pytest
import torch

import mmpos
from mmpos.bias import ALiBi, KerpleBias
from mmpos.coordinates import Scaled
from mmpos.positions import grid, sequence


def set_to(bias: KerpleBias, r1: list[float], r2: list[float]) -> KerpleBias:
    bias.load_state_dict({"r1": torch.tensor(r1), "r2": torch.tensor(r2)})
    return bias


KERNELS = {
    "log": lambda r1, r2, far: -r1 * math.log(1 + r2 * far),
    "power": lambda r1, r2, far: -r1 * far**r2,
}
DISTANCES = {
    "euclidean": math.hypot,
    "l1": lambda *gaps: sum(gaps),
    "linf": lambda *gaps: max(gaps),
}


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("sizes", [(400,), (3, 300), (2, 3, 30)])
@pytest.mark.parametrize("form", KERNELS)
def test_kernels_of_the_distance(form, sizes, distance):
    r1, r2 = [0.7, 1.9, 0.05], [0.3, 1.8, 1.0]
    bias = set_to(KerpleBias(3, len(sizes), form=form, distance=distance), r1, r2)
    queries, keys = (grid(*sizes)[-20:] + 0.5).tolist(), grid(*sizes)[::11].tolist()

    def far(q: list[float], k: list[float]) -> float:
        return DISTANCES[distance](*(abs(a - b) for a, b in zip(q, k, strict=True)))

    expected = [
        [[KERNELS[form](r1[head], r2[head], far(q, k)) for k in keys] for q in queries]
        for head in range(3)
    ]
    out = bias(torch.tensor(queries), torch.tensor(keys))
    torch.testing.assert_close(out, torch.tensor(expected), rtol=2e-6, atol=1e-6)


def test_a_power_of_one_is_alibi():
    slopes = [0.5, 0.0625, 0.25]
    bias = set_to(KerpleBias(3, 2, form="power"), slopes, [1.0, 1.0, 1.0])
    positions = grid(3, 40)
    alibi = ALiBi(3, 2, slopes=slopes)(positions, positions)
    torch.testing.assert_close(bias(positions, positions), alibi)


@pytest.mark.parametrize(("form", "most"), [("log", 7.0), ("power", 2.0)])
def test_numbers_are_held_as_in_the_published_code(form, most):
    bias = set_to(KerpleBias(4, form=form), [-1.0, 0.0, 0.01, 5.0], [0.5, -3.0, 7.0, 7.0])
    held = set_to(KerpleBias(4, form=form), [0.01, 0.01, 0.01, 5.0], [0.5, 0.01, most, most])
    positions = sequence(20)
    assert torch.equal(bias(positions, positions), held(positions, positions))
    assert bias.r1.tolist() == [-1.0, 0.0, pytest.approx(0.01), 5.0], "reading changes no weight"


@pytest.mark.parametrize("form", ["log", "power"])
def test_a_gradient_leads_back_from_where_they_are_held(form):
    positions = sequence(6)
    gaps = (positions - positions.mT).abs()
    for sign in (1.0, -1.0):
        bias = set_to(KerpleBias(3, form=form), [-0.5, 0.5, -0.5], [-0.5, 3.0, 0.5])
        (sign * bias(positions, positions)).sum().backward()
        r1, r2 = bias.r1.grad, bias.r2.grad
        assert r1 is not None and r2 is not None and r1[1] != 0 and r2[2] != 0
        inwards = sign > 0  # a step against the gradient raises what is too small
        assert [bool(own) for own in (r1[0], r1[2], r2[0])] == [inwards] * 3
        assert bool(r2[1]) == (form == "log" or not inwards)
        assert r1[0] <= 0 and r2[0] <= 0
    bias = set_to(KerpleBias(1, form=form), [-0.2], [-0.2])
    optimizer = torch.optim.Adam(bias.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        (bias(positions, positions) + gaps / 2).square().mean().backward()
        optimizer.step()
    assert bias.r1.item() > 0.1 and bias.r2.item() > 0.1


@pytest.mark.parametrize(("form", "most"), [("log", (2, 1)), ("power", (1, 2))])
def test_they_begin_as_in_the_published_code(form, most):
    bias = KerpleBias(4000, form=form)
    for own, top in zip((bias.r1, bias.r2), most, strict=True):
        assert own.min() >= 0 and own.max() <= top
        assert own.mean().item() == pytest.approx(top / 2, rel=0.05)


def test_gradients_are_finite_at_distance_zero():
    for form, axes in product(("log", "power"), (1, 2)):
        places = grid(2, 3)[:, -axes:].float().requires_grad_()
        bias = set_to(KerpleBias(2, axes, form=form), [1.0, 2.0], [0.5, 0.3])
        bias(places, places).sum().backward()
        assert places.grad is not None and places.grad.isfinite().all()
        assert all(own.grad is not None and own.grad.isfinite().all() for own in bias.parameters())


def test_readings_change_the_unit():
    bias = KerpleBias(3, (4,), coordinates=Scaled())
    plain = KerpleBias(3)
    plain.load_state_dict(bias.state_dict())
    out = bias(sequence(8), sequence(8), extent=(8,))
    torch.testing.assert_close(out, plain(sequence(8) / 2, sequence(8) / 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "exp"}, "form must be one of.*'log', 'power'.*got 'exp'"),
        ({"distance": "cosine"}, "distance must be one of.*got 'cosine'"),
        ({"heads": 0}, "heads must be a whole number of 1 or more, got 0"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        KerpleBias(**{"heads": 3, **arguments})


def test_it_is_rebuilt_from_its_spec():
    bias = KerpleBias(3, (4, 6), form="power", distance="linf")
    assert repr(mmpos.build(bias.spec())) == repr(bias)
