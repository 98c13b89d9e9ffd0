"""Laws of biases that look at content, for every class that the package has."""

import copy
import inspect
import pickle
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import mmpos
from mmpos.positions import absent, join

HEADS, HEAD_DIM = 3, 16
GRIDS = {1: (700,), 2: (5, 290), 3: (2, 3, 270)}
VARIANTS = runpy.run_path(str(Path(__file__).parents[1] / "variants.py"))


def concrete(base):
    found = [] if inspect.isabstract(base) else [base]
    for derived in base.__subclasses__():
        found += concrete(derived)
    return [cls for cls in found if cls.__module__.startswith("mmpos.")]


CASES = [
    pytest.param((cls, named, axes), id="-".join([cls.__name__, *map(str, named), f"{axes}d"]))
    for cls in concrete(mmpos.bias.ContentBias)
    for named in VARIANTS["ARGUMENTS"][cls.__name__]
    for axes in VARIANTS["AXES"].get(cls.__name__, GRIDS)
]


@pytest.fixture(params=CASES)
def case(request):
    cls, named, axes = request.param
    torch.manual_seed(0)
    return cls(HEADS, GRIDS[axes], **named).eval()


def cells(bias, count, seed=0):
    found = mmpos.positions.grid(*bias.axes)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    middle = len(found) // 2
    near = found[middle - 20 : middle + 20][order[order < 40]]  # offsets that have a vector
    return torch.cat((near, found[order]))[:count]


def qkv(length, batch=2, seed=1, heads=HEADS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, heads, length, HEAD_DIM, generator=generator).unbind(0)


def run(bias, positions, tensors, **visible):
    return mmpos.attend(*tensors, bias=bias(positions, positions), **visible)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_there_are_such_classes():
    assert {"ShawBias", "TransformerXLBias"} <= {case.values[0][0].__name__ for case in CASES}


def test_it_does_something(case):
    tensors = qkv(11)
    assert (run(case, cells(case, 11), tensors) - mmpos.attend(*tensors)).abs().max() > 1e-2


@pytest.mark.parametrize("shift", [1, 131, -400])
def test_shifting_all_positions_changes_nothing(case, shift):
    positions, tensors = cells(case, 11), qkv(11)
    close(run(case, positions + shift, tensors), run(case, positions, tensors))


def test_it_depends_on_every_axis(case):
    positions, tensors = cells(case, 1).expand(5, -1), qkv(5)
    for axis in range(positions.shape[-1]):
        moved = positions.clone()
        moved[2, axis] += 1
        apart = run(case, moved, tensors) - run(case, positions, tensors)
        assert apart.abs().max() > 1e-3


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("order", ["cells", "sequence"])
def test_steps_and_chunks_against_a_cache_are_rows_of_the_whole(case, window, order):
    q, k, v = qkv(13)
    positions = cells(case, 13)
    if order == "sequence":
        positions = torch.arange(13).unsqueeze(-1).expand(13, positions.shape[-1])
    whole = run(case, positions, (q, k, v), causal=True, window=window)
    for start, stop in ((0, 1), (6, 7), (12, 13), (3, 9), (9, 13), (1, 13)):
        terms = case(positions[start:stop], positions[:stop])
        step = mmpos.attend(
            q[:, :, start:stop],
            k[:, :, :stop],
            v[:, :, :stop],
            bias=terms,
            causal=True,
            window=window,
        )
        close(step, whole[:, :, start:stop])


def test_permuting_tokens_with_their_positions_permutes_the_output(case):
    tensors = qkv(11)
    positions = join(absent(2, len(case.axes)), cells(case, 9))
    order = torch.cat((torch.arange(2), 2 + torch.randperm(9)))
    out = run(case, positions, tensors)
    close(run(case, positions[order], [part[:, :, order] for part in tensors]), out[:, :, order])
    moved = run(case, positions, [part[:, :, order] for part in tensors])
    assert (moved - out[:, :, order]).abs().max() > 1e-3


def test_a_token_without_a_place_gets_nothing(case):
    axes, tensors = len(case.axes), qkv(9)
    nowhere = absent(9, axes)
    close(run(case, nowhere, tensors), mmpos.attend(*tensors))
    some = join(absent(2, axes), cells(case, 7))
    q, k, _ = tensors
    scores = case(some, some).scores(q, k, 0.25)
    scores = scores.expand(2, HEADS, 9, 9)
    assert not scores[:, :, :2].any()
    assert not scores[..., :2].any()
    assert scores[:, :, 2:, 2:].any()
    close(scores[:, :, 2:, 2:], case(some[2:], some[2:]).scores(q[:, :, 2:], k[:, :, 2:], 0.25))
    weights = torch.rand(2, HEADS, 9, 9)
    values = case(some, some).values(weights)
    if values is not None:
        own = case(some[2:], some[2:]).values(weights[:, :, 2:, 2:])
        assert not values[:, :, :2].any()
        close(values[:, :, 2:], own)


def test_an_axis_that_one_token_lacks_does_not_count(case):
    if len(case.axes) == 1:
        pytest.skip("one axis")
    positions, tensors = cells(case, 7).float(), qkv(7)
    positions[:3, 0] = torch.nan
    moved = positions.clone()
    moved[3:, 0] += 2
    before, after = run(case, positions, tensors), run(case, moved, tensors)
    close(after, before)
    moved[3, 0] += 1
    assert (run(case, moved, tensors) - before).abs().max() > 1e-4


def test_masked_keys_have_weight_exactly_zero(case):
    q, k, v = qkv(11)
    positions = cells(case, 11)
    mask = torch.rand(2, 1, 11, 11) < 0.6
    mask[..., 4] = False
    mask[0, 0, 2] = False
    out = run(case, positions, (q, k, v), causal=True, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, 4], v[:, :, 4] = 1e3, -1e3
    assert torch.equal(run(case, positions, (q, k, v), causal=True, mask=mask), out)
    assert not out[0, :, 2].any()
    deep = -3e4 * q.abs()  # scores far below those of keys whose features are 0
    k = torch.where(torch.arange(11).view(11, 1) == 4, 0.0, k.abs() + 1)
    out = run(case, positions, (deep, k, v), causal=True, mask=mask)
    v = v.clone()
    v[:, :, 4] = 1e3
    assert torch.equal(run(case, positions, (deep, k, v), causal=True, mask=mask), out)


def test_a_later_token_changes_no_earlier_output(case):
    q, k, v = qkv(11)
    positions = cells(case, 11)
    before = run(case, positions, (q, k, v), causal=True)
    positions = torch.cat((positions[:7], cells(case, 4, 9)))
    q, k, v = (torch.cat((part[:, :, :7], part[:, :, 7:] + 3), 2) for part in (q, k, v))
    after = run(case, positions, (q, k, v), causal=True)
    close(after[:, :, :7], before[:, :, :7])
    assert not torch.equal(after[:, :, 7:], before[:, :, 7:])


def test_blind_rows_are_zero_and_leave_finite_gradients(case):
    tensors = [part.clone().requires_grad_() for part in qkv(7)]
    positions = join(absent(1, len(case.axes)), cells(case, 6))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = mask[1] = False
    out = run(case, positions, tensors, causal=True, mask=mask)
    assert not out[0, :, :3].any()
    assert not out[1].any()
    assert out[0, :, 3:].any()
    out.square().sum().backward()
    for part in (*tensors, *case.parameters()):
        assert part.grad is not None
        assert part.grad.isfinite().all()
    assert not tensors[0].grad[1].any()


def test_packed_documents_are_the_separate_ones(case):
    lengths = (3, 1, 7)
    places = [cells(case, length, seed) for seed, length in enumerate(lengths)]
    parts = [qkv(length, seed=seed) for seed, length in enumerate(lengths)]
    segments = torch.repeat_interleave(torch.tensor([4, 0, 9]), torch.tensor(lengths))
    packed = run(
        case,
        torch.cat(places),
        [torch.cat(part, 2) for part in zip(*parts, strict=True)],
        q_segments=segments,
        k_segments=segments,
    )
    separate = [run(case, *part) for part in zip(places, parts, strict=True)]
    close(packed, torch.cat(separate, 2))


def test_each_row_of_a_batch_has_its_own_positions(case):
    rows = torch.stack([cells(case, 7, seed) for seed in range(2)])
    q, k, v = qkv(7)
    whole = run(case, rows, (q, k, v))
    for i in range(2):
        close(run(case, rows[i], (q[i : i + 1], k[i : i + 1], v[i : i + 1])), whole[i : i + 1])
    mixed = mmpos.attend(q, k, v, bias=case(rows[0], rows))
    one = mmpos.attend(q[1:], k[1:], v[1:], bias=case(rows[0], rows[1]))
    close(mixed[1:], one)


def test_heads_that_share_keys(case):
    q, (_, k, v) = qkv(7)[0], qkv(7, heads=1)
    whole = run(case, cells(case, 7), (q, k, v))
    close(whole, run(case, cells(case, 7), (q, k.expand(q.shape), v.expand(q.shape))))


def test_prepared_once_is_the_same_as_given_each_time(case):
    positions, tensors = cells(case, 7), qkv(7)
    mask = torch.rand(2, 7) < 0.8
    terms = case(positions, positions)
    once = mmpos.attention.prepare(7, 7, bias=terms, causal=True, mask=mask)
    for scale in (None, 0.7):
        direct = mmpos.attend(*tensors, bias=terms, causal=True, mask=mask, scale=scale)
        assert torch.equal(mmpos.attend(*tensors, prepared=once, scale=scale), direct)


def test_a_key_bias_is_added(case, softmax_attention):
    positions, (q, k, v) = cells(case, 7), qkv(7)
    terms, keys = case(positions, positions), torch.randn(HEADS, 7)
    out = mmpos.attend(q, k, v, bias=terms, key_bias=keys, causal=True)
    scores = (q @ k.mT) * HEAD_DIM**-0.5 + terms.scores(q, k, HEAD_DIM**-0.5) + keys[:, None]
    weights = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf).softmax(-1)
    more = terms.values(weights)
    close(out, weights @ v + (0 if more is None else more))


def test_gradients_reach_everything_learned(case):
    positions, tensors = cells(case, 11), qkv(11)
    run(case, positions, tensors).square().sum().backward()
    for part in case.parameters():
        assert part.grad is not None
        assert part.grad.any()


def test_gradients_are_right(case):
    small = copy.deepcopy(case).double()
    positions = join(absent(1, len(case.axes)), cells(case, 4))
    mask = torch.ones(1, 5, dtype=torch.bool)
    mask[:, 3] = False
    inputs = [part[:1].double().requires_grad_() for part in qkv(5)]

    def call(*given):
        return run(small, positions, given[:3], mask=mask)

    assert torch.autograd.gradcheck(call, (*inputs, *small.parameters()), atol=1e-6, fast_mode=True)


# the same call gives the same answer


def test_other_calls_and_copies(case):
    positions, tensors = cells(case, 11), qkv(11)
    expected = run(case, positions, tensors)
    for length in (1, 40, 3):
        run(case, cells(case, length, length), qkv(length))
    rebuilt = mmpos.build(case.spec())
    rebuilt.load_state_dict(case.state_dict())
    for twin in (case, copy.deepcopy(case), pickle.loads(pickle.dumps(case)), rebuilt.eval()):
        assert torch.equal(run(twin, positions, tensors), expected)
        assert repr(twin) == repr(case)
    assert not list(case.buffers())


def test_half_precision_rounds_what_is_learned_and_the_output(case):
    positions, tensors = cells(case, 11) + 300, qkv(11)
    for dtype in (torch.bfloat16, torch.float16):
        cast = copy.deepcopy(case).to(dtype)
        lower = [part.to(dtype) for part in tensors]
        out = run(cast, positions, lower)
        assert out.dtype == dtype
        wide = copy.deepcopy(cast).float()
        expected = run(wide, positions, [part.float() for part in lower])
        torch.testing.assert_close(out, expected.to(dtype))


def test_autocast_rounds_q_k_and_v_alone(case):
    positions, tensors = cells(case, 11) + 300, qkv(11)
    expected = run(case, positions, [part.bfloat16() for part in tensors])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(case, positions, tensors), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_default_dtype(case, dtype):
    positions, tensors = cells(case, 11), qkv(11)
    expected = run(case, positions, tensors)
    torch.set_default_dtype(dtype)
    try:
        again = run(case, positions, tensors)
        assert all(part.dtype == dtype for part in mmpos.build(case.spec()).parameters())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(again, expected)


def test_meta_device_then_materialised(case):
    bare = copy.deepcopy(case).to("meta").to_empty(device="cpu")
    for part in bare.parameters():
        nn.init.constant_(part, torch.nan)
    torch.manual_seed(0)
    bare.reset_parameters()
    for part, own in zip(bare.parameters(), case.parameters(), strict=True):
        assert torch.equal(part, own)


def test_inference_mode_then_training(case):
    positions, tensors = cells(case, 11), qkv(11)
    with torch.inference_mode():
        expected = run(case, positions, tensors)
    case.train()
    out = run(case, positions, tensors)
    torch.testing.assert_close(out, expected)
    out.sum().backward()


def test_wrong_positions_are_refused(case, unchecked):
    axes = len(case.axes)
    with pytest.raises(ValueError, match=rf"\(5, {axes + 1}\).*{axes} axes"):
        case(torch.zeros(5, axes + 1), torch.zeros(5, axes + 1))
    half = torch.zeros(5, axes, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="not exact"):
        case(half, half)
