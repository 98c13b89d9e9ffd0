import math

import pytest
import torch
from transformers.models.sam.configuration_sam import SamVisionConfig
from transformers.models.sam.modeling_sam import SamPositionalEmbedding

import mmpos
from mmpos.additive import FourierEncoding
from mmpos.coordinates import Centered, Scaled
from mmpos.positions import absent, grid, join, sequence


def waves(positions, frequencies):
    """``[cos(x W) | sin(x W)]`` in plain Python."""
    rows = []
    for position in positions:
        known = [0.0 if math.isnan(x) else x for x in position]
        columns = zip(*frequencies, strict=True)
        angles = [sum(x * w for x, w in zip(known, column, strict=True)) for column in columns]
        rows.append([math.cos(a) for a in angles] + [math.sin(a) for a in angles])
    return rows


def formula(encoding, positions) -> torch.Tensor:
    """Algorithm 1 of Li et al., number by number in plain Python."""
    w1, b1, w2, b2 = (
        weight.tolist()
        for weight in (
            encoding.hidden_weight,
            encoding.hidden_bias,
            encoding.out_weight,
            encoding.out_bias,
        )
    )
    rows = []
    for position, wave in zip(
        positions, waves(positions, encoding.frequencies.tolist()), strict=True
    ):
        x = [value / math.sqrt(len(wave)) for value in wave]
        hidden = [sum(a * b for a, b in zip(x, row, strict=True)) for row in w1]
        hidden = [value + bias for value, bias in zip(hidden, b1, strict=True)]
        hidden = [value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in hidden]
        out = [sum(a * b for a, b in zip(hidden, row, strict=True)) for row in w2]
        absent = all(math.isnan(c) for c in position)
        rows.append([0.0 if absent else o + b for o, b in zip(out, b2, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def scattered(axes):
    generator = torch.Generator().manual_seed(4)
    positions = torch.rand(20, axes, generator=generator, dtype=torch.float64) * 900 - 100
    positions[3, 0] = math.nan
    positions[5] = math.nan
    return positions


@pytest.mark.parametrize(
    ("dim", "axes", "named"),
    [
        (24, 1, {}),
        (24, 2, {"std": 0.1}),
        (13, 2, {"features": 10, "hidden": 7}),
        (24, 3, {"hidden": 30, "std": 3.0}),
    ],
)
def test_formula(dim, axes, named):
    encoding = FourierEncoding(dim, axes, **named)
    for bias in (encoding.hidden_bias, encoding.out_bias):
        assert bias is not None
        torch.nn.init.normal_(bias)
    positions = scattered(axes)
    expected = formula(encoding, positions.tolist())
    for _ in range(2):
        torch.testing.assert_close(encoding(positions).double(), expected, rtol=0, atol=1e-6)
    single = positions.float()
    expected = formula(encoding, single.tolist())
    torch.testing.assert_close(encoding(single).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_without_a_hidden_layer_the_waves_are_the_encoding(axes):
    encoding = FourierEncoding(24, axes, hidden=0)
    assert [name for name, _ in encoding.named_parameters()] == ["frequencies"]
    assert encoding.frequencies is not None
    positions = scattered(axes)
    expected = torch.tensor(waves(positions.tolist(), encoding.frequencies.tolist()))
    expected[positions.isnan().all(-1)] = 0
    torch.testing.assert_close(encoding(positions), expected, rtol=0, atol=1e-6)


@pytest.mark.peer("transformers")
def test_sam_numbers_points_so():
    """Its sines come first, and it says x, y."""
    peer = SamPositionalEmbedding(SamVisionConfig(num_pos_feats=12, scale=1.5))
    height, width = 5, 290
    cells = grid(height, width) + 0.5
    points = torch.stack((cells[:, 1] / width, cells[:, 0] / height), -1)
    theirs = peer(points).detach()
    encoding = FourierEncoding(24, 2, hidden=0, std=2 * math.pi * 1.5, coordinates=Centered())
    assert encoding.frequencies is not None
    encoding.frequencies.data = 2 * math.pi * peer.positional_embedding.data.flip(0)
    ours = encoding(grid(height, width), extent=(height, width)).roll(12, dims=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_fixed_frequencies_are_those_of_a_normal_distribution_and_their_seed():
    def frequencies(seed, axes=2, pairs=1000, std=1.0):
        """From the sine of a step too small to turn far."""
        encoding = FourierEncoding(2 * pairs, axes, seed=seed, hidden=0, std=std)
        assert not list(encoding.parameters()) and not encoding.state_dict()
        step = 0.02 / std
        out = encoding(torch.eye(axes, dtype=torch.float64) * step).double()
        return out[:, pairs:].asin() / step

    one, two, other = frequencies(1), frequencies(1), frequencies(2)
    assert torch.equal(one, two)
    assert one.mean().abs() < 0.07 and one.std().item() == pytest.approx(1, abs=0.05)
    assert one.pow(4).mean().item() == pytest.approx(3, abs=0.6)
    below = (one.flatten().sort().values.unsqueeze(-1) < torch.tensor([-1.0, 0.0, 1.0])).double()
    torch.testing.assert_close(
        below.mean(0), torch.tensor([0.1587, 0.5, 0.8413]).double(), rtol=0, atol=0.03
    )
    pairs = torch.corrcoef(torch.cat((one, other)))
    assert (pairs - torch.eye(4)).abs().max() < 0.12
    wide = frequencies(1, std=5.0)
    torch.testing.assert_close(wide, 5 * one, rtol=0, atol=1e-3)
    assert len(frequencies(0).unique()) == 2000


def test_fixed_frequencies_never_change():
    """What was trained with them would not understand others. In plain Python's whole numbers."""

    def hashed(word):
        for _ in range(2):
            word = ((word ^ (word >> 16)) * 0x45D9F3B) % 2**32
        return word ^ (word >> 16)

    def normal(index, count, seed):
        u, v = ((hashed(hashed(i) ^ seed) + 0.5) / 2**32 for i in (index, index + count))
        return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)

    for seed, axes, pairs in [(0, 1, 5), (7, 2, 3), (2**32 - 1, 3, 50)]:
        count = axes * pairs
        expected = [normal(index, count, seed) for index in range(1, count + 1)]
        encoding = FourierEncoding(2 * pairs, axes, seed=seed, hidden=0)
        out = encoding(torch.eye(axes, dtype=torch.float64) / 100)[:, pairs:]
        assert (100 * out.double().asin()).flatten().tolist() == pytest.approx(expected, abs=1e-4)


def test_a_seed_with_a_hidden_layer_learns_the_layer_only():
    encoding = FourierEncoding(12, 2, seed=5, features=8, hidden=6)
    assert [name for name, _ in encoding.named_parameters()] == [
        "hidden_weight",
        "hidden_bias",
        "out_weight",
        "out_bias",
    ]
    twin = FourierEncoding(12, 2, seed=5, features=8, hidden=6)
    twin.load_state_dict(encoding.state_dict())
    assert torch.equal(twin(grid(3, 4)), encoding(grid(3, 4)))


def test_near_means_near_in_every_direction():
    """The random features' inner product is a Gaussian of the distance (Rahimi and Recht)."""
    encoding = FourierEncoding(6000, 2, seed=0, hidden=0, std=0.5)
    positions = torch.tensor([[0.0, 0.0], [3.0, 4.0], [5.0, 0.0], [-4.0, 3.0], [1.2, -0.5]]) + 300
    out = encoding(positions)
    near = (out @ out[0] / 3000).tolist()
    expected = [math.exp(-((0.5 * d) ** 2) / 2) for d in (0, 5, 5, 5, 1.3)]
    assert near == pytest.approx(expected, abs=0.04)


def test_initial_weights():
    encoding = FourierEncoding(64, 2, std=0.25, features=2000, hidden=50)
    assert encoding.frequencies is not None and encoding.hidden_weight is not None
    assert encoding.frequencies.std().item() == pytest.approx(0.25, rel=0.05)
    assert encoding.hidden_weight.std().item() == pytest.approx(math.sqrt(2 / 2050), rel=0.05)
    for bias in (encoding.hidden_bias, encoding.out_bias):
        assert bias is not None and not bias.any()


def test_gradients_reach_weights_and_positions():
    encoding = FourierEncoding(8, 2)
    positions = torch.tensor([[0.5, math.nan], [math.nan, math.nan], [2.0, 1.0]])
    positions.requires_grad_()
    encoding(positions).square().sum().backward()
    for weight in encoding.parameters():
        assert weight.grad is not None
        assert weight.grad.isfinite().all() and weight.grad.any()
    assert positions.grad is not None and positions.grad.isfinite().all()
    assert positions.grad[0, 0] and positions.grad[2].all()
    assert not positions.grad[1].any() and not positions.grad[0, 1]


def test_readings():
    encoding = FourierEncoding(24, 2, seed=0, hidden=0, coordinates=Scaled((2, 3)))
    positions = join(absent(1, 2), grid(4, 6))
    plain = FourierEncoding(24, 2, seed=0, hidden=0)
    torch.testing.assert_close(encoding(positions, extent=(4, 6)), plain(positions / 2))


def test_it_is_rebuilt_from_its_spec():
    for named in ({}, {"seed": 3, "hidden": 0}, {"features": 6, "hidden": 5, "std": 0.5}):
        encoding = FourierEncoding(12, (3, 4), **named)
        twin = mmpos.build(encoding.spec())
        assert repr(twin) == repr(encoding) and twin.spec() == encoding.spec()
        twin.load_state_dict(encoding.state_dict())
        assert torch.equal(twin(grid(3, 4)), encoding(grid(3, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 5}, "features must be even.*got 5: pass features="),
        ({"features": 0}, "features must be even.*got 0"),
        ({"hidden": -1}, "hidden must be 0 or more, got -1"),
        ({"hidden": 0, "features": 6}, "6 features cannot fill dim=8"),
        ({"std": 0.0}, r"std must be above 0 and finite, got 0\.0"),
        ({"std": math.inf}, "std must be above 0 and finite, got inf"),
        ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, got -1"),
        ({"axes": 0}, "axes must be a whole number of 1 or more.*got 0"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        FourierEncoding(**{"dim": 8, **arguments})


def test_an_odd_width_takes_an_even_number_of_features():
    assert FourierEncoding(5, features=4)(sequence(3)).shape == (3, 5)
