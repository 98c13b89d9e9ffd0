"""Laws of a whole attention layer, with every encoding in its place and with none."""

import pytest
import torch

import mmpos
from mmpos.positions import absent, join


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_one_step_against_a_cache_is_a_row_of_the_whole(layer, window):
    x, positions = layer.tokens(2, 13), layer.case.cells(13)
    q, k, v = layer.project(x, positions)
    whole = layer(x, positions, causal=True, window=window)
    for now in (0, 1, 6, 12):
        q, k_now, v_now = layer.project(x[:, now : now + 1], positions[now : now + 1])
        keys, values = (
            torch.cat((old[:, :, :now], new), 2) for old, new in ((k, k_now), (v, v_now))
        )
        step = layer.attend(
            q,
            keys,
            values,
            positions[now : now + 1],
            positions[: now + 1],
            causal=True,
            window=window,
        )
        close(step, whole[:, :, now : now + 1])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("chunks", [(13,), (5, 1, 7), (1, 12), (4, 4, 4, 1)])
def test_chunked_prefill_is_the_whole(layer, chunks, window):
    x, positions = layer.tokens(2, 13), layer.case.cells(13)
    whole = layer(x, positions, causal=True, window=window)
    keys, values, out, start = [], [], [], 0
    for chunk in chunks:
        end = start + chunk
        q, k, v = layer.project(x[:, start:end], positions[start:end])
        keys.append(k)
        values.append(v)
        k, v = torch.cat(keys, 2), torch.cat(values, 2)
        out.append(
            layer.attend(q, k, v, positions[start:end], positions[:end], causal=True, window=window)
        )
        start = end
    close(torch.cat(out, 2), whole)


def test_a_cache_with_evicted_keys_keeps_their_places(layer):
    x, positions = layer.tokens(1, 13), layer.case.cells(13)
    kept = torch.tensor([0, 1, 8, 9, 10, 11, 12])
    q, k, v = layer.project(x, positions)
    pairs = torch.zeros(1, 1, 13, 13, dtype=torch.bool)
    pairs[..., kept] = True
    whole = layer(x, positions, causal=True, window=9, mask=pairs)
    for new in (1, 2, 3):
        step = layer.attend(
            q[:, :, -new:],
            k[:, :, kept],
            v[:, :, kept],
            positions[-new:],
            positions[kept],
            causal=True,
            window=9,
            k_index=kept,
        )
        close(step, whole[:, :, -new:])


def test_decoding_a_left_padded_batch_is_decoding_each_row_alone(layer):
    """Rows of 3 and 7 tokens, and two steps more: each row goes on from its own last position."""
    rows = [layer.tokens(1, length + 2, seed) for seed, length in enumerate((3, 7))]
    places = [layer.case.cells(length + 2, seed) for seed, length in enumerate((3, 7))]
    x, positions = torch.randn(2, 9, layer.width), layer.case.cells(9).repeat(2, 1, 1)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    for row, (own, place) in enumerate(zip(rows, places, strict=True)):
        x[row, -own.shape[1] :], positions[row, -own.shape[1] :] = own, place
        mask[row, -own.shape[1] :] = True
    q, k, v = layer.project(x, positions)
    for end in (8, 9):
        step = layer.attend(
            q[:, :, end - 1 : end],
            k[:, :, :end],
            v[:, :, :end],
            positions[:, end - 1 : end],
            positions[:, :end],
            causal=True,
            mask=mask[:, :end],
        )
        for row, (own, place) in enumerate(zip(rows, places, strict=True)):
            alone = layer(own, place, causal=True)[:, :, end - 10 :][:, :, :1]
            close(step[row : row + 1], alone)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_the_separate_ones(layer, causal):
    lengths = (3, 1, 7)
    documents = [layer.case.cells(length, seed) for seed, length in enumerate(lengths)]
    x = [layer.tokens(1, length, seed) for seed, length in enumerate(lengths)]
    segments = torch.repeat_interleave(torch.tensor([4, 0, 9]), torch.tensor(lengths))
    packed = layer(
        torch.cat(x, 1),
        torch.cat(documents),
        causal=causal,
        q_segments=segments,
        k_segments=segments,
    )
    separate = [layer(*parts, causal=causal) for parts in zip(x, documents, strict=True)]
    close(packed, torch.cat(separate, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding_changes_no_real_token(layer, causal):
    lengths, longest = (3, 7, 5), 7
    real = [layer.case.cells(length, seed) for seed, length in enumerate(lengths)]
    rows = [layer.tokens(1, length, seed) for seed, length in enumerate(lengths)]
    x, positions = torch.randn(3, longest, layer.width), layer.case.cells(longest).repeat(3, 1, 1)
    mask = torch.zeros(3, longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        x[row, longest - length :], positions[row, longest - length :] = rows[row], real[row]
        mask[row, longest - length :] = True
    padded = layer(x, positions, causal=causal, mask=mask)
    assert padded.isfinite().all()
    for row, length in enumerate(lengths):
        alone = layer(rows[row], real[row], causal=causal)
        close(padded[row : row + 1, :, longest - length :], alone)


def test_permuting_tokens_with_their_positions_permutes_the_output(layer):
    x, positions = layer.tokens(2, 11), join(absent(2, len(layer.case.grid)), layer.case.cells(9))
    order = torch.cat((torch.arange(2), 2 + torch.randperm(9)))
    out = layer(x, positions)
    close(layer(x[:, order], positions[order]), out[:, :, order])
    moved = layer(x[:, order], positions)
    if layer.case.encoding is None:
        close(moved, out[:, :, order])
    else:
        assert (moved - out[:, :, order]).abs().max() > 1e-3


def ragged(layer, longest=11):
    """Rows of 6 and 11 tokens, each at places of its own, the shorter one padded on the left."""
    positions = torch.stack([layer.case.cells(longest, seed) for seed in (5, 6)])
    mask = torch.ones(2, longest, dtype=torch.bool)
    mask[0, : longest - 6] = False
    return layer.tokens(2, longest), positions, mask


def test_permuting_the_tokens_of_each_row_permutes_its_outputs(layer):
    x, positions, mask = ragged(layer)
    order = torch.stack([torch.randperm(11), torch.randperm(11)])
    rows = torch.arange(2)[:, None]
    out = layer(x, positions, mask=mask)
    moved = layer(x[rows, order], positions[rows, order], mask=mask[rows, order])
    close(moved, torch.stack([own[:, to] for own, to in zip(out, order, strict=True)]))


def test_a_shard_of_ragged_rows_is_the_same_rows_of_the_whole(layer):
    x, positions, mask = ragged(layer)
    q, k, v = layer.project(x, positions)
    whole = layer(x, positions, causal=True, mask=mask)
    some, order = torch.tensor([0, 4, 7, 10]), torch.randperm(11)
    shard = layer.attend(
        q[:, :, some],
        k[:, :, order],
        v[:, :, order],
        positions[:, some],
        positions[:, order],
        causal=True,
        mask=mask[:, order],
        q_index=some,
        k_index=order,
    )
    close(shard, whole[:, :, some])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "rows", [range(1, 13, 2), range(8, 13), (0, 5, 3, 12), (4,), range(12, -1, -1)]
)
def test_a_shard_of_the_queries_is_the_same_rows_of_the_whole(layer, rows, window):
    x, positions = layer.tokens(2, 13), layer.case.cells(13)
    q, k, v = layer.project(x, positions)
    whole = layer(x, positions, causal=True, window=window)
    rows = torch.tensor(list(rows))
    order = torch.randperm(13)
    shard = layer.attend(
        q[:, :, rows],
        k[:, :, order],
        v[:, :, order],
        positions[rows],
        positions[order],
        causal=True,
        window=window,
        q_index=rows,
        k_index=order,
    )
    close(shard, whole[:, :, rows])


def test_masked_keys_have_weight_exactly_zero(layer):
    x, positions = 30 * layer.tokens(2, 11), layer.case.cells(11)
    q, k, _ = layer.project(x, positions)
    eye = torch.eye(11).expand(2, 3, 11, 11)
    mask = torch.rand(2, 1, 11, 11) < 0.6
    mask[:, :, 4] = False
    weights = layer.attend(q, k, eye, positions, positions, causal=True, mask=mask)
    hidden = ~(mask & torch.ones(11, 11, dtype=torch.bool).tril()).expand_as(weights)
    assert not weights[hidden].any()
    totals = weights.sum(-1)
    assert not totals[:, :, 4].any()
    seen = (~hidden).any(-1)
    close(totals, seen.float())


def test_a_later_token_changes_no_earlier_output(layer):
    x, positions = layer.tokens(2, 11), layer.case.cells(11)
    before = layer(x, positions, causal=True)
    other, moved = x.clone(), positions.clone()
    other[:, 7:], moved[7:] = 1e3, layer.case.cells(4, seed=9)
    after = layer(other, moved, causal=True)
    assert torch.equal(before[:, :, :7], after[:, :, :7])
    assert not torch.equal(before[:, :, 7:], after[:, :, 7:])


def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(layer):
    x, positions = layer.tokens(2, 11).requires_grad_(), layer.case.cells(11)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :3] = False
    mask[1] = False
    out = layer(x, positions, causal=True, mask=mask)
    assert not out[0, :, :3].any()
    assert not out[1].any()
    assert out[0, :, 3:].any()
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()
    if layer.case.encoding is not None:
        gradients = [weight.grad for weight in layer.case.encoding.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_positions_need_no_layer_of_their_own(case):
    """A transformer computes each encoding once, and gives every layer the same value."""
    if case.encoding is None:
        return
    calls = []
    case.encoding.register_forward_hook(lambda *_: calls.append(1))
    slot = {
        mmpos.AdditiveEncoding: "additive",
        mmpos.RotaryEncoding: "rotary",
        mmpos.AttentionBias: "bias",
    }[case.base]
    model = mmpos.models.Transformer(case.grid, dim=48, depth=3, heads=3, **{slot: case.encoding})
    model(torch.randn(1, 5, 48), case.cells(5))
    assert len(calls) == 1
