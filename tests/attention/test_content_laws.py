"""Laws of biases that look at content, for every class that the package has."""

import copy

import pytest
import torch

import mmpos
from mmpos.positions import absent, join

HEADS, HEAD_DIM = 3, 16


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_there_are_such_classes(concrete):
    names = {cls.__name__ for cls in concrete(mmpos.bias.ContentBias)}
    assert {"ShawBias", "TransformerXLBias"} <= names


def test_it_does_something(content):
    tensors = content.qkv(11)
    assert (content.run(content.cells(11), tensors) - mmpos.attend(*tensors)).abs().max() > 1e-2


@pytest.mark.parametrize("shift", [1, 131, -400])
def test_shifting_all_positions_changes_nothing(content, shift):
    positions, tensors = content.cells(11), content.qkv(11)
    close(content.run(positions + shift, tensors), content.run(positions, tensors))


def test_it_depends_on_every_axis(content):
    positions, tensors = content.cells(1).expand(5, -1), content.qkv(5)
    for axis in range(positions.shape[-1]):
        moved = positions.clone()
        moved[2, axis] += 1
        apart = content.run(moved, tensors) - content.run(positions, tensors)
        assert apart.abs().max() > 1e-3


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("order", ["cells", "sequence"])
def test_steps_and_chunks_against_a_cache_are_rows_of_the_whole(content, window, order):
    q, k, v = content.qkv(13)
    positions = content.cells(13)
    if order == "sequence":
        positions = torch.arange(13).unsqueeze(-1).expand(13, positions.shape[-1])
    whole = content.run(positions, (q, k, v), causal=True, window=window)
    for start, stop in ((0, 1), (6, 7), (12, 13), (3, 9), (9, 13), (1, 13)):
        terms = content.bias(positions[start:stop], positions[:stop])
        step = mmpos.attend(
            q[:, :, start:stop],
            k[:, :, :stop],
            v[:, :, :stop],
            bias=terms,
            causal=True,
            window=window,
        )
        close(step, whole[:, :, start:stop])


def test_permuting_tokens_with_their_positions_permutes_the_output(content):
    tensors = content.qkv(11)
    positions = join(absent(2, len(content.bias.axes)), content.cells(9))
    order = torch.cat((torch.arange(2), 2 + torch.randperm(9)))
    out = content.run(positions, tensors)
    close(content.run(positions[order], [part[:, :, order] for part in tensors]), out[:, :, order])
    moved = content.run(positions, [part[:, :, order] for part in tensors])
    assert (moved - out[:, :, order]).abs().max() > 1e-3


def test_a_token_without_a_place_gets_nothing(content):
    axes, tensors = len(content.bias.axes), content.qkv(9)
    nowhere = absent(9, axes)
    close(content.run(nowhere, tensors), mmpos.attend(*tensors))
    some = join(absent(2, axes), content.cells(7))
    q, k, _ = tensors
    scores = content.bias(some, some).scores(q, k, 0.25)
    scores = scores.expand(2, HEADS, 9, 9)
    assert not scores[:, :, :2].any()
    assert not scores[..., :2].any()
    assert scores[:, :, 2:, 2:].any()
    alone = content.bias(some[2:], some[2:])
    close(scores[:, :, 2:, 2:], alone.scores(q[:, :, 2:], k[:, :, 2:], 0.25))
    weights = torch.rand(2, HEADS, 9, 9)
    values = content.bias(some, some).values(weights)
    if values is not None:
        own = alone.values(weights[:, :, 2:, 2:])
        assert not values[:, :, :2].any()
        close(values[:, :, 2:], own)


def test_an_axis_that_one_token_lacks_does_not_count(content):
    if len(content.bias.axes) == 1:
        pytest.skip("one axis")
    positions, tensors = content.cells(7).float(), content.qkv(7)
    positions[:3, 0] = torch.nan
    moved = positions.clone()
    moved[3:, 0] += 2
    before, after = content.run(positions, tensors), content.run(moved, tensors)
    close(after, before)
    moved[3, 0] += 1
    assert (content.run(moved, tensors) - before).abs().max() > 1e-4


def test_masked_keys_have_weight_exactly_zero(content):
    q, k, v = content.qkv(11)
    positions = content.cells(11)
    mask = torch.rand(2, 1, 11, 11) < 0.6
    mask[..., 4] = False
    mask[0, 0, 2] = False
    out = content.run(positions, (q, k, v), causal=True, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, 4], v[:, :, 4] = 1e3, -1e3
    assert torch.equal(content.run(positions, (q, k, v), causal=True, mask=mask), out)
    assert not out[0, :, 2].any()
    deep = -3e4 * q.abs()  # scores far below those of keys whose features are 0
    k = torch.where(torch.arange(11).view(11, 1) == 4, 0.0, k.abs() + 1)
    out = content.run(positions, (deep, k, v), causal=True, mask=mask)
    v = v.clone()
    v[:, :, 4] = 1e3
    assert torch.equal(content.run(positions, (deep, k, v), causal=True, mask=mask), out)


def test_a_later_token_changes_no_earlier_output(content):
    q, k, v = content.qkv(11)
    positions = content.cells(11)
    before = content.run(positions, (q, k, v), causal=True)
    positions = torch.cat((positions[:7], content.cells(4, 9)))
    q, k, v = (torch.cat((part[:, :, :7], part[:, :, 7:] + 3), 2) for part in (q, k, v))
    after = content.run(positions, (q, k, v), causal=True)
    close(after[:, :, :7], before[:, :, :7])
    assert not torch.equal(after[:, :, 7:], before[:, :, 7:])


def test_blind_rows_are_zero_and_leave_finite_gradients(content):
    tensors = [part.clone().requires_grad_() for part in content.qkv(7)]
    positions = join(absent(1, len(content.bias.axes)), content.cells(6))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = mask[1] = False
    out = content.run(positions, tensors, causal=True, mask=mask)
    assert not out[0, :, :3].any()
    assert not out[1].any()
    assert out[0, :, 3:].any()
    out.square().sum().backward()
    for part in (*tensors, *content.bias.parameters()):
        assert part.grad is not None
        assert part.grad.isfinite().all()
    assert not tensors[0].grad[1].any()


def test_packed_documents_are_the_separate_ones(content):
    lengths = (3, 1, 7)
    places = [content.cells(length, seed) for seed, length in enumerate(lengths)]
    parts = [content.qkv(length, seed=seed) for seed, length in enumerate(lengths)]
    segments = torch.repeat_interleave(torch.tensor([4, 0, 9]), torch.tensor(lengths))
    packed = content.run(
        torch.cat(places),
        [torch.cat(part, 2) for part in zip(*parts, strict=True)],
        q_segments=segments,
        k_segments=segments,
    )
    separate = [content.run(*part) for part in zip(places, parts, strict=True)]
    close(packed, torch.cat(separate, 2))


def test_each_row_of_a_batch_has_its_own_positions(content):
    rows = torch.stack([content.cells(7, seed) for seed in range(2)])
    q, k, v = content.qkv(7)
    whole = content.run(rows, (q, k, v))
    for i in range(2):
        close(content.run(rows[i], (q[i : i + 1], k[i : i + 1], v[i : i + 1])), whole[i : i + 1])
    mixed = mmpos.attend(q, k, v, bias=content.bias(rows[0], rows))
    one = mmpos.attend(q[1:], k[1:], v[1:], bias=content.bias(rows[0], rows[1]))
    close(mixed[1:], one)


def test_heads_that_share_keys(content):
    q, (_, k, v) = content.qkv(7)[0], content.qkv(7, heads=1)
    whole = content.run(content.cells(7), (q, k, v))
    close(whole, content.run(content.cells(7), (q, k.expand(q.shape), v.expand(q.shape))))


def test_prepared_once_is_the_same_as_given_each_time(content):
    positions, tensors = content.cells(7), content.qkv(7)
    mask = torch.rand(2, 7) < 0.8
    terms = content.bias(positions, positions)
    once = mmpos.attention.prepare(7, 7, bias=terms, causal=True, mask=mask)
    for scale in (None, 0.7):
        direct = mmpos.attend(*tensors, bias=terms, causal=True, mask=mask, scale=scale)
        assert torch.equal(mmpos.attend(*tensors, prepared=once, scale=scale), direct)


def test_a_key_bias_is_added(content, softmax_attention):
    positions, (q, k, v) = content.cells(7), content.qkv(7)
    terms, keys = content.bias(positions, positions), torch.randn(HEADS, 7)
    out = mmpos.attend(q, k, v, bias=terms, key_bias=keys, causal=True)
    scores = (q @ k.mT) * HEAD_DIM**-0.5 + terms.scores(q, k, HEAD_DIM**-0.5) + keys[:, None]
    weights = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1)
    more = terms.values(weights)
    close(out, weights @ v + (0 if more is None else more))


def test_gradients_reach_everything_learned(content):
    positions, tensors = content.cells(11), content.qkv(11)
    content.run(positions, tensors).square().sum().backward()
    for part in content.bias.parameters():
        assert part.grad is not None
        assert part.grad.any()


def test_gradients_are_right(content):
    small = copy.deepcopy(content.bias).double()
    positions = join(absent(1, len(content.bias.axes)), content.cells(4))
    mask = torch.ones(1, 5, dtype=torch.bool)
    mask[:, 3] = False
    inputs = [part[:1].double().requires_grad_() for part in content.qkv(5)]

    def call(*given):
        return content.run(positions, given[:3], mask=mask, bias=small)

    assert torch.autograd.gradcheck(call, (*inputs, *small.parameters()), atol=1e-6, fast_mode=True)
