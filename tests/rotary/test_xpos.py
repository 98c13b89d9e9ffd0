import math

import pytest
import torch

import mmpos
from mmpos import RotaryEncoding
from mmpos.coordinates import Scaled
from mmpos.frequencies import YaRN
from mmpos.positions import absent, grid, join, sequence
from mmpos.rotary import XPosEncoding


def scores(encoding, q, k, positions, k_positions=None, **named):
    queries = encoding(positions, **named)
    keys = queries if k_positions is None else encoding(k_positions, **named)
    return mmpos.rotate(q, queries) @ mmpos.rotate(k, keys.dual).mT


def formula(q, k, position, other, *, width, base=10000.0, gamma=0.4, scale_base=512.0) -> float:
    """The score of one query and key, for interleaved pairs on one axis, in plain Python."""
    total = 0.0
    for i in range(width // 2):
        angle = (position - other) * base ** (-2 * i / width)
        zeta = (2 * i / width + gamma) / (1 + gamma)
        a, b, c, d = q[2 * i], q[2 * i + 1], k[2 * i], k[2 * i + 1]
        dot = (a * c + b * d) * math.cos(angle) + (a * d - b * c) * math.sin(angle)
        total += dot * zeta ** ((position - other) / scale_base)
    return total


@pytest.mark.parametrize("center", [0.0, 250.0, -1000.5])
@pytest.mark.parametrize(("gamma", "scale_base"), [(0.4, 512.0), (0.1, 64.0), (2.0, 4096.0)])
def test_formula_whatever_the_center(center, gamma, scale_base):
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 2, 5, 16).double(), dim=-1)
    where = torch.tensor([[300.0], [12.5], [-40.0], [0.0], [310.25]], dtype=torch.float64)
    encoding = XPosEncoding(16, gamma=gamma, scale_base=scale_base, center=center)
    given = scores(encoding, q, k, where)
    for head in range(2):
        for i, position in enumerate(where.flatten().tolist()):
            for j, other in enumerate(where.flatten().tolist()):
                named = {"width": 16, "gamma": gamma, "scale_base": scale_base}
                expected = formula(
                    q[0, head, i].tolist(), k[0, head, j].tolist(), position, other, **named
                )
                assert given[0, head, i, j].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_scales_of_the_first_and_the_last_pair():
    rotation = XPosEncoding(64)(torch.tensor([[512.0]]))
    size = (rotation.cos.square() + rotation.sin.square()).sqrt()[0, 0]
    assert size[0].item() == pytest.approx(0.28571428571428575, rel=1e-6)
    assert size[-1].item() == pytest.approx(0.9776785714285714, rel=1e-6)
    keys = (rotation.dual.cos.square() + rotation.dual.sin.square()).sqrt()[0, 0]
    torch.testing.assert_close(size * keys, torch.ones(32))


def test_without_fading_it_is_rope():
    flat = XPosEncoding(16, scale_base=1e30)(sequence(300))
    plain = RotaryEncoding(16)(sequence(300))
    for rotation in (flat, flat.dual):
        torch.testing.assert_close(rotation[:2], plain[:2], rtol=0, atol=1e-7)


def test_scores_fade_towards_the_past_and_grow_towards_the_future():
    q = torch.ones(1, 1, 1, 2)
    encoding = XPosEncoding(2, base=1.0, scale_base=10.0)  # one pair; its angle grows with 1
    at = [torch.tensor([[place]]) for place in (0.0, 2 * math.pi, -2 * math.pi)]
    now, past, future = (
        scores(encoding, q, q, at[0], other).item() for other in (at[0], at[2], at[1])
    )
    assert past < now < future
    assert past * future == pytest.approx(now**2, rel=1e-5)


def test_keys_in_a_cache_stay_valid():
    q, k = torch.randn(2, 1, 3, 600, 16)
    encoding = XPosEncoding(16, center=300.0)
    whole = scores(encoding, q, k, sequence(600))
    cache = [mmpos.rotate(k[:, :, i : i + 7], encoding(sequence(7, start=i)).dual)
             for i in range(0, 595, 7)]  # fmt: skip
    step = mmpos.rotate(q[:, :, 594:595], encoding(sequence(1, start=594))) @ torch.cat(cache, 2).mT
    torch.testing.assert_close(step, whole[:, :, 594:595, :595])


@pytest.mark.parametrize("shift", [131.0, -400.5])
def test_axes_fade_each_for_itself(shift):
    encoding = XPosEncoding(24, 3, base=50.0, center=(1.0, 2.0, 300.0), scale_base=256.0)
    positions = grid(2, 3, 4).double() * 17
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 3, 24, 24), dim=-1)
    before = scores(encoding, q, k, positions)
    torch.testing.assert_close(scores(encoding, q, k, positions + shift), before, rtol=0, atol=1e-5)
    moved = XPosEncoding(24, 3, base=50.0, scale_base=256.0)
    torch.testing.assert_close(scores(moved, q, k, positions), before, rtol=0, atol=1e-5)
    one = XPosEncoding(8, base=50.0, scale_base=256.0)
    parts = sum(
        scores(one, q[..., part], k[..., part], positions[:, axis : axis + 1])
        for axis in range(3)
        for part in [slice(8 * axis, 8 * axis + 8)]
    )
    torch.testing.assert_close(parts, before, rtol=0, atol=1e-5)


def test_a_token_without_a_place_is_neither_turned_nor_scaled():
    rotation = XPosEncoding(16, 2, center=40.0)(
        join(absent(1, 2), torch.tensor([[math.nan, 500.0]]), grid(2, 3))
    )
    x = torch.randn(1, 3, 8, 16)
    for one in (rotation, rotation.dual):
        out = mmpos.rotate(x, one)
        assert torch.equal(out[:, :, 0], x[:, :, 0])
        assert torch.equal(out[:, :, 1, :8], x[:, :, 1, :8])
        assert not torch.allclose(out[:, :, 1, 8:], x[:, :, 1, 8:])


@pytest.mark.parametrize(
    ("dtype", "last"), [(torch.float16, 4532), (torch.float32, 36260), (torch.bfloat16, 36100)]
)
def test_where_queries_and_keys_overflow(dtype, last):
    x, here = torch.ones(1, 1, 1, 64, dtype=dtype), torch.zeros(1, 1)
    for far in (last, last + 200):
        after, before = (XPosEncoding(64, center=center)(here) for center in (-far, far))
        for rotation in (after.dual, before):
            assert mmpos.rotate(x, rotation).isfinite().all() == (far == last)


def test_options_of_rope_apply():
    positions = grid(3, 300).float()
    encoding = XPosEncoding(
        32,
        (3, 300),
        split=(4, 8),
        trailing=True,
        order=(1, 0),
        layout="half",
        coordinates=Scaled(),
        extension=[None, YaRN(factor=2, original_length=64)],
    )
    plain = RotaryEncoding(
        32,
        (3, 300),
        split=(4, 8),
        trailing=True,
        order=(1, 0),
        layout="half",
        coordinates=Scaled(),
        extension=[None, YaRN(factor=2, original_length=64)],
    )
    args = positions, (6, 600)
    ours, theirs = encoding(*args), plain(*args)
    assert ours.start == theirs.start == 8
    torch.testing.assert_close(ours.sin / ours.cos, theirs.sin / theirs.cos, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.cos * ours.dual.cos, theirs.cos.square())
    assert mmpos.build(encoding.spec()).spec() == encoding.spec()


@pytest.mark.peer("x-transformers")
@pytest.mark.parametrize("length", [64, 400])
def test_x_transformers(length):
    peer = pytest.importorskip("x_transformers.x_transformers")
    theirs = peer.RotaryEmbedding(64, use_xpos=True)
    turn, scale = theirs(torch.arange(length))
    ours = XPosEncoding(64, center=float(length // 2))(sequence(length))
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 3, length, 64), dim=-1)
    expected = (
        peer.apply_rotary_pos_emb(q, turn, scale),
        peer.apply_rotary_pos_emb(k, turn, scale**-1.0),
    )
    torch.testing.assert_close(mmpos.rotate(q, ours), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(mmpos.rotate(k, ours.dual), expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_base": 0.0}, "scale_base and gamma must be above 0, got scale_base=0.0"),
        ({"gamma": -0.4}, "must be above 0, got scale_base=512.0 and gamma=-0.4"),
        ({"axes": 3, "center": (1.0, 2.0)}, "center has 2 entries, the encoding has 3 axes"),
        ({"rotary_dim": 5}, "even number of features.*got 5: pass rotary_dim=4"),
    ],
)
def test_bad_arguments(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        XPosEncoding(16, **options)
