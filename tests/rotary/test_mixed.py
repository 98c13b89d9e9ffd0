import math

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import nn

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Scaled
from mmpos.frequencies import DynamicNTK, Proportional, YaRN
from mmpos.positions import absent, grid, join
from mmpos.rotary import MixedRotaryEncoding, MRoPE


def directions(encoding) -> torch.Tensor:
    return encoding.directions.detach()


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(("heads", "of"), [(1, 5), (3, 3), (14, 14)])
def test_formula(heads, of, layout):
    encoding = MixedRotaryEncoding(16, 2, heads=heads, layout=layout)
    positions = torch.tensor([[300.0, -7.5], [0.25, 411.0], [math.nan, 3.0], [math.nan] * 2])
    x = torch.randn(2, of, 4, 16)
    expected = x.double().clone()
    for head in range(of):
        for token, (row, column) in enumerate(torch.nan_to_num(positions).tolist()):
            for pair in range(8):
                away = directions(encoding)[head % heads, :, pair].tolist()
                speed = 10 ** (-(pair % 4) / 4)
                angle = speed * (row * away[0] + column * away[1])
                a, b = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + 8)
                one, two = x[:, head, token, a].double(), x[:, head, token, b].double()
                expected[:, head, token, a] = one * math.cos(angle) - two * math.sin(angle)
                expected[:, head, token, b] = one * math.sin(angle) + two * math.cos(angle)
    out = mmpos.rotate(x.double(), encoding(positions))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_two_axes_begin_as_published():
    """One angle for each head: the first half of the pairs along it, the second across."""
    rows, columns = directions(MixedRotaryEncoding(64, 2, heads=400)).unbind(1)
    angle = torch.atan2(columns[:, 0], rows[:, 0])
    torch.testing.assert_close(rows[:, :16], angle.cos()[:, None].expand(-1, 16))
    torch.testing.assert_close(columns[:, :16], angle.sin()[:, None].expand(-1, 16))
    across = angle + math.pi / 2
    torch.testing.assert_close(rows[:, 16:], across.cos()[:, None].expand(-1, 16))
    torch.testing.assert_close(columns[:, 16:], across.sin()[:, None].expand(-1, 16))
    share = torch.histc(angle, 4, -math.pi, math.pi) / 400
    assert (share - 0.25).abs().max() < 0.08


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_groups_of_a_head_begin_at_right_angles(axes):
    encoding = MixedRotaryEncoding(32, axes, heads=50)
    first = [encoding.pair_axes.index(axis) for axis in range(axes)]
    basis = directions(encoding)[:, :, first].double().mT
    torch.testing.assert_close(
        basis @ basis.mT, torch.eye(axes, dtype=torch.float64).expand(50, -1, -1), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(torch.linalg.det(basis), torch.ones(50).double())
    within = directions(encoding)[:, :, [first[axis] for axis in encoding.pair_axes]]
    assert torch.equal(directions(encoding), within)
    mean = basis.mean(0).abs().max()
    assert mean == 1 if axes == 1 else mean < 0.4


@pytest.mark.parametrize(
    "options",
    [
        {"axes": 1},
        {"axes": 2, "base": 100},
        {"axes": 3, "base": [10.0, 100.0, 1000.0], "split": (1, 3, 2), "order": (2, 0, 1)},
        {"axes": (4, 300), "rotary_dim": 12, "trailing": True, "layout": "half"},
        {"axes": (4, 300), "coordinates": Scaled(offset=0.5)},
        {"axes": 2, "extension": [YaRN(factor=4, original_length=99), Proportional(fraction=0.5)]},
        {"axes": 2, "extension": [None, DynamicNTK(factor=2, original_length=64)]},
        {"axes": 2, "temperature": mmpos.LogTemperature(length=64)},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_axial_turns_as_the_axial_one_bit_for_bit(options, dtype):
    axial = RotaryEncoding(16, **options)
    axes = len(axial.pairs)
    mixed = MixedRotaryEncoding.from_axial(axial, heads=3).to(dtype)
    assert directions(mixed).dtype == dtype
    positions = join(absent(2, axes), torch.rand(11, axes) * 1000 - 300)
    if isinstance(options["axes"], int):
        args, length = (positions,), torch.tensor([50, 300])
    else:
        args, length = (positions, (8, 200)), None
    for a, b in zip(mixed(*args, length=length)[:2], axial(*args, length=length)[:2], strict=True):
        assert torch.equal(a, b.expand_as(a))
    x = torch.randn(2, 3, 13, 16)
    rotations = [encoding(*args, length=length) for encoding in (mixed, axial)]
    for which in (rotations, [rotation.dual for rotation in rotations]):
        ours, theirs = (mmpos.rotate(x, rotation) for rotation in which)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    direct = MixedRotaryEncoding(16, **{"base": 10000.0, **options}, heads=3, init="axial")
    assert torch.equal(directions(direct).to(dtype), directions(mixed))
    assert mmpos.build(axial.spec()).spec() == axial.spec()


@pytest.mark.peer("timm")
@pytest.mark.parametrize("sizes", [(3, 30), (14, 14), (20, 2)])
@pytest.mark.parametrize("heads", [3, 4])
def test_timm(sizes, heads):
    theirs = RotaryEmbeddingMixed(64 * heads, depth=2, num_heads=heads)
    embed = theirs.get_embed(list(sizes))
    x = torch.nn.functional.normalize(torch.randn(2, heads, math.prod(sizes), 64), dim=-1)
    for layer in range(2):
        mixed = MixedRotaryEncoding(64, 2, heads=heads)
        mixed.take_frequencies(theirs.freqs[:, layer].transpose(0, 1))
        rotation = mixed(grid(*sizes).flip(-1))
        out = mmpos.rotate(x, rotation)
        torch.testing.assert_close(out, apply_rot_embed_cat(x, embed[layer]), rtol=0, atol=1e-5)


def test_frequencies_that_are_taken_over_are_those_it_has():
    mixed = MixedRotaryEncoding(16, 2, heads=3, extension=[Proportional(fraction=0.5), None])
    given = torch.randn(3, 2, 8)
    mixed.take_frequencies(given)
    table = mixed.frequencies(torch.float32, torch.device("cpu"))
    moving = [0, 1, 4, 5, 6, 7]
    torch.testing.assert_close(table[..., moving], given[..., moving])
    assert not table[..., [2, 3]].any()


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_directions_learn_also_beside_tokens_without_a_place(axes):
    encoding = MixedRotaryEncoding(16, axes, heads=3)
    positions = join(absent(2, axes), torch.rand(5, axes) * 300)
    positions[3, 0] = math.nan
    x = torch.randn(1, 3, 7, 16)
    mmpos.rotate(x, encoding(positions))[..., ::2].sum().backward()
    gradient = encoding.directions.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert (gradient != 0).all()
    before = directions(encoding).clone()
    torch.optim.SGD(encoding.parameters(), 1e-3).step()
    assert not torch.equal(directions(encoding), before)


def test_gradients_are_those_of_differences():
    encoding = MixedRotaryEncoding(8, 2, heads=2).double()
    positions = torch.rand(3, 2, dtype=torch.float64) * 3

    def loss(weight):
        named = {"directions": weight}
        rotation = torch.func.functional_call(encoding, named, (positions,))
        return (rotation.cos.double() * 2 + rotation.sin.double().square()).sum()

    assert torch.autograd.gradcheck(
        loss, directions(encoding).requires_grad_(), eps=1e-3, atol=1e-3
    )


def test_weights_of_the_constructor_and_of_the_reset_are_alike():
    torch.manual_seed(5)
    encoding = MixedRotaryEncoding(16, 3, heads=2)
    with torch.device("meta"):
        bare = MixedRotaryEncoding(16, 3, heads=2)
    assert bare.directions.is_meta
    bare = bare.to_empty(device="cpu")
    nn.init.constant_(bare.directions, math.nan)
    torch.manual_seed(5)
    bare.reset_parameters()
    assert torch.equal(directions(bare), directions(encoding))
    assert not torch.equal(directions(MixedRotaryEncoding(16, 3, heads=2)), directions(bare))


def test_layers_have_directions_of_their_own_by_one_encoding_each():
    one, other = MixedRotaryEncoding(16, 2), MixedRotaryEncoding(16, 2)
    assert not torch.equal(directions(one), directions(other))
    assert mmpos.build(one.spec()).directions.shape == one.directions.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0}, "heads must be 1 or more, got 0"),
        ({"init": "normal"}, "init must be one of .*'random', 'axial'.*got 'normal'"),
        ({"rotary_dim": 7}, "even number of features.*got 7: pass rotary_dim=6"),
        ({"axes": 9}, r"8 pairs \(16 features\) cannot be divided among 9 axes"),
        ({"base": -1.0}, "base must be above 0 and finite, got -1.0"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        MixedRotaryEncoding(16, **arguments)


def test_what_is_not_axial(unchecked):
    with pytest.raises(TypeError, match="expected a RotaryEncoding, got MRoPE"):
        MixedRotaryEncoding.from_axial(MRoPE(16))


def test_frequencies_of_another_shape(unchecked):
    with pytest.raises(ValueError, match=r"of shape \(3, 2, 8\), got \(2, 3, 8\)"):
        MixedRotaryEncoding(16, 2, heads=3).take_frequencies(torch.zeros(2, 3, 8))
