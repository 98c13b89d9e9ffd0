"""Laws of encodings taken alone, for every class that the package has."""

from itertools import product

import pytest
import torch

import mmpos
from mmpos.positions import absent, join


def scores(encoding, positions, q, k):
    rotation = encoding(positions)
    return mmpos.rotate(q, rotation) @ mmpos.rotate(k, rotation.dual).mT


@pytest.mark.parametrize("shift", [1, 2, "half"])
def test_shifting_all_positions_changes_no_bias(bias_case, shift):
    if not bias_case.encoding.relative:
        pytest.skip("not a function of differences alone, as published")
    positions = bias_case.cells(11, part=2)
    by = torch.tensor([size // 2 if shift == "half" else 0 for size in bias_case.grid])
    by[-1] += 0 if shift == "half" else shift
    bias = bias_case.encoding
    torch.testing.assert_close(
        bias(positions + by, positions + by), bias(positions, positions), rtol=0, atol=0
    )


@pytest.mark.parametrize("shift", [1, 131, -400, 0.5, -0.75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shifting_all_positions_changes_no_rotary_score(rotary_case, shift, dtype):
    if not rotary_case.encoding.relative:
        pytest.skip("no rotation, as published")
    positions = rotary_case.cells(11).to(dtype)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 3, 11, 16), dim=-1)
    before, after = (
        scores(rotary_case.encoding, where, q, k) for where in (positions, positions + shift)
    )
    torch.testing.assert_close(after, before, rtol=0, atol=2e-4 if dtype == torch.float32 else 1e-6)


def test_scores_depend_on_every_axis(encoding_case, values):
    here = encoding_case.cells(1, part=2)
    for axis in range(len(encoding_case.grid)):
        there = here.clone()
        there[0, axis] += 1
        both, same = (torch.cat((here, other)) for other in (there, here))
        first, second = values(encoding_case, both), values(encoding_case, same)
        assert any((a - b).abs().max() > 1e-3 for a, b in zip(first, second, strict=True))


def test_axes_are_not_interchangeable(rotary_case):
    if len(rotary_case.grid) == 1:
        pytest.skip("one axis")
    if type(rotary_case.encoding) is not mmpos.RotaryEncoding:
        pytest.skip("pairs of its own for each axis, in order, are those of axial RoPE")
    positions = torch.eye(len(rotary_case.grid), dtype=torch.long) * 2
    sines = rotary_case.encoding(positions).sin[0]
    turned = [set(row.nonzero().flatten().tolist()) for row in sines]
    assert all(not a & b for i, a in enumerate(turned) for b in turned[:i])
    assert set.union(*turned) == set(range(sines.shape[-1]))
    assert turned == sorted(turned, key=min), "the first axis turns the first pairs"


def test_rotation_keeps_the_norm(rotary_case):
    if isinstance(rotary_case.encoding, mmpos.XPosEncoding) or not rotary_case.encoding.relative:
        pytest.skip("no rotation, as published")
    x = torch.randn(2, 3, 11, 16)
    turned = mmpos.rotate(x, rotary_case.encoding(rotary_case.cells(11)))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned, x)


def test_features_beyond_the_rotary_width_pass_bit_for_bit(rotary_case):
    wide = torch.randn(2, 3, 11, 27)
    rotation = rotary_case.encoding(rotary_case.cells(11))
    start = rotation.start
    end = start + 2 * rotation.cos.shape[-1]
    alone = rotation._replace(start=0)
    for dtype in (torch.float32, torch.bfloat16):
        x = wide.to(dtype)
        turned = mmpos.rotate(x, rotation)
        assert torch.equal(turned[..., :start], x[..., :start])
        assert torch.equal(turned[..., end:], x[..., end:])
        assert torch.equal(turned[..., start:end], mmpos.rotate(x[..., start:end], alone))


def test_dense_bias_is_the_score_mod(bias_case):
    bias, queries, keys = bias_case.encoding, bias_case.cells(5, 3), bias_case.cells(11, 4)
    keys = join(absent(1, len(bias_case.grid)), keys)
    dense = bias(queries, keys)
    add_bias = bias.score_mod(queries, keys)
    for head, query, key in product(range(3), range(5), range(12)):
        index = [torch.tensor(i) for i in (0, head, query, key)]
        one = add_bias(torch.tensor(0.25), *index)
        learned = any(weight.requires_grad for weight in bias.parameters())
        close = {"rtol": 1e-6, "atol": 1e-6} if learned else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, dense[head, query, key] + 0.25, **close)


def test_a_bias_has_no_batch_unless_the_positions_have(bias_case):
    bias, positions = bias_case.encoding, bias_case.cells(7)
    rows = torch.stack((positions, bias_case.cells(7, 5)))
    batch = bias(rows, rows)
    assert bias(positions, positions).shape == (3, 7, 7)
    assert batch.shape == (2, 3, 7, 7)
    torch.testing.assert_close(batch[1], bias(rows[1], rows[1]), rtol=0, atol=0)
    torch.testing.assert_close(
        bias(positions[:2], rows)[1], bias(positions[:2], rows[1]), rtol=0, atol=0
    )


def test_each_row_of_a_batch_has_its_own_positions(encoding_case, values):
    rows = torch.stack([encoding_case.cells(7, seed) for seed in range(3)])
    for whole, *parts in zip(
        values(encoding_case, rows), *(values(encoding_case, row) for row in rows), strict=True
    ):
        torch.testing.assert_close(whole, torch.stack(parts), rtol=0, atol=0)


def test_integers_and_floats_of_one_value_are_one_position(encoding_case, values):
    positions = encoding_case.cells(11)
    for dtype in (torch.int32, torch.float32, torch.float64):
        again = values(encoding_case, positions.to(dtype))
        for a, b in zip(again, values(encoding_case, positions), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_fractional_position_is_read_or_refused_but_not_rounded(encoding_case, values):
    positions = encoding_case.cells(11, part=2).float()
    half = positions + torch.linspace(0.25, 0.75, 11).unsqueeze(-1)
    try:
        between = values(encoding_case, half)
    except ValueError as refused:
        assert "whole position" in str(refused)
        return
    for rounded in (positions, positions + 1):
        assert any(
            (a - b).abs().max() > 1e-4
            for a, b in zip(between, values(encoding_case, rounded), strict=True)
        )


def test_positions_above_256_stay_apart(encoding_case, values):
    last = encoding_case.grid[-1]
    tail = torch.zeros(last - 256, len(encoding_case.grid), dtype=torch.long)
    tail[:, -1] = torch.arange(256, last)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(TypeError, match=f"{dtype}.*not exact.*int32, int64, float32"):
            values(encoding_case, tail.to(dtype))
    for one, two in zip(range(len(tail) - 1), range(1, len(tail)), strict=True):
        pair = values(encoding_case, tail[[one, two]])
        same = values(encoding_case, tail[[one, one]])
        assert any(not torch.equal(a, b) for a, b in zip(pair, same, strict=True))


def test_a_token_without_a_place_gets_nothing(encoding_case, values):
    axes = len(encoding_case.grid)
    placed = encoding_case.cells(6)
    with_prefix = values(encoding_case, join(absent(2, axes), placed))
    alone = values(encoding_case, placed)
    if encoding_case.base is mmpos.AttentionBias:
        (whole,), (rest,) = with_prefix, alone
        assert not whole[:, :2].any()
        assert not whole[..., :2].any()
        assert torch.equal(whole[:, 2:, 2:], rest)
    else:
        blank = [1.0, 0.0] if encoding_case.base is mmpos.RotaryEncoding else [0.0]
        blank = blank * (len(alone) // len(blank))
        for whole, rest, value in zip(with_prefix, alone, blank, strict=True):
            assert (whole[..., :2, :] == value).all()
            assert torch.equal(whole[..., 2:, :], rest)


def test_wrong_number_of_axes_is_refused(encoding_case, values):
    axes = len(encoding_case.grid)
    with pytest.raises(ValueError, match=rf"\(5, {axes + 1}\).*length, {axes}\].*{axes} axes"):
        values(encoding_case, torch.zeros(5, axes + 1))


@pytest.mark.usefixtures("unchecked")
def test_a_score_mod_is_for_positions_that_all_samples_share(bias_case):
    positions = bias_case.cells(5)
    for queries, keys in ((positions[None], positions), (positions, positions[None])):
        with pytest.raises(ValueError, match="all samples share, got shape"):
            bias_case.encoding.score_mod(queries, keys)
