"""Decoding with a cache gives what one pass over all tokens gives."""

from functools import partial

import pytest
import torch
from torch import nn

import mmpos
from mmpos.attention import KVCache, LayerCache
from mmpos.bias import ShawBias, TransformerXLBias
from mmpos.frequencies import DynamicNTK, LongRoPE, YaRN
from mmpos.models import Transformer
from mmpos.positions import chosen, padded, sequence
from mmpos.rotary import rerotate

CHUNKS = [5, 1, 1, 4, 1]
L = sum(CHUNKS)
DYNAMIC = DynamicNTK(factor=2.0, original_length=8)
LONG = LongRoPE(
    short_factor=[1.0] * 8,
    long_factor=[1.0 + 0.5 * i for i in range(8)],
    original_length=8,
    factor=4.0,
)


def model(axes=1, **options) -> Transformer:
    torch.manual_seed(0)
    options = {"dim": 48, "depth": 3, "heads": 3, "causal": True, **options}
    made = Transformer(axes, **options).eval()
    for parameter in made.parameters():  # attention that looks
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return made


def tokens(batch=2, length=L) -> torch.Tensor:
    return torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(1))


def decoded(made, x, positions, cache, **rows) -> torch.Tensor:
    """By chunks; ``rows`` are cut like the tokens."""
    out, begin = [], 0
    for chunk in CHUNKS:
        cut = slice(begin, begin + chunk)
        named = {name: value[:, cut] for name, value in rows.items()}
        out.append(made(x[:, cut], positions[..., cut, :], cache=cache, **named))
        begin += chunk
    assert cache.tokens == L
    return torch.cat(out, 1)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotated", [True, False])
def test_every_encoding_decodes_as_it_encodes(case, rotated):
    slots = {
        None: {},
        mmpos.AdditiveEncoding: {"additive": case.encoding},
        mmpos.RotaryEncoding: {"rotary": case.encoding},
        mmpos.AttentionBias: {"bias": case.encoding},
    }[case.base]
    made = model(case.grid, **slots)
    positions = case.cells(L).sort(0).values
    with torch.no_grad():
        close(
            decoded(made, tokens(), positions, KVCache(rotated=rotated)), made(tokens(), positions)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": mmpos.RotaryEncoding, "kv_heads": 1},
        {
            "rotary": [mmpos.RotaryEncoding, nn.Identity, mmpos.RotaryEncoding],
            "window": [3, None, 4],
        },
        {"rotary": partial(mmpos.MixedRotaryEncoding, heads=3), "per_layer": ["rotary"]},
        {"bias": partial(ShawBias, head_dim=16)},
        {"bias": partial(TransformerXLBias, head_dim=16)},
        {"rotary": partial(mmpos.RotaryEncoding, extension=YaRN(factor=4, original_length=64))},
        {"rotary": partial(mmpos.RotaryEncoding, temperature=mmpos.LogTemperature(length=3))},
    ],
)
def test_every_kind_of_layer_decodes_as_it_encodes(options):
    made = model(**options)
    positions = sequence(L)
    with torch.no_grad():
        for rotated in (True, False):
            cache = KVCache(rotated=rotated)
            close(decoded(made, tokens(), positions, cache), made(tokens(), positions))
            assert cache.layer(0).keys.shape == (2, options.get("kv_heads", 3), L, 16)


@pytest.mark.parametrize("extension", [DYNAMIC, LONG], ids=["dynamic", "long"])
def test_across_the_trained_length_by_either_way(extension):
    made = model(rotary=partial(mmpos.RotaryEncoding, extension=extension))
    x, positions = tokens(), sequence(L)
    with torch.no_grad():
        frozen = decoded(made, x, positions, KVCache(length=L))
        close(frozen, made(x, positions))
        close(decoded(made, x, positions, KVCache(length=4)), made(x, positions, length=4))
        assert not torch.allclose(frozen, made(x, positions, length=4), atol=1e-3)
        cache, begin = KVCache(rotated=False), 0
        for chunk in CHUNKS:
            out = made(x[:, begin : begin + chunk], positions[begin : begin + chunk], cache=cache)
            begin += chunk
            # keys and values of deeper layers are those of the lengths at which they were made
            if begin == CHUNKS[0]:
                close(out, made(x[:, :begin], positions[:begin]))
        single = model(rotary=partial(mmpos.RotaryEncoding, extension=extension), depth=1)
        cache = KVCache(rotated=False)
        single(x[:, :-1], positions[:-1], cache=cache)
        close(single(x[:, -1:], positions[-1:], cache=cache)[:, 0], single(x, positions)[:, -1])
        with pytest.raises(ValueError, match=r"pass KVCache\(length=…\) for all calls, or"):
            made(x, positions, cache=KVCache())
        first = KVCache()
        made(x[:, :3], positions[:3], cache=first, length=16)
        assert first.length == 16
        with pytest.raises(ValueError, match=r"length is 16 from its first call on, got 32"):
            made(x[:, 3:], positions[3:], cache=first, length=32)


def test_each_row_has_a_frozen_length_of_its_own():
    made = model(rotary=partial(mmpos.RotaryEncoding, extension=DYNAMIC))
    x, positions, lengths = tokens(), sequence(L), torch.tensor([8, 64])
    with torch.no_grad():
        out = decoded(made, x, positions, KVCache(length=lengths))
        for row, length in enumerate(lengths.tolist()):
            close(out[row], made(x[row : row + 1], positions, length=length)[0])


def test_rows_of_other_lengths_continue_at_their_own_places():
    made = model(rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi, additive=mmpos.SinusoidalEncoding)
    real = [3, 7]
    mask = torch.arange(7) >= torch.tensor([[7 - n] for n in real])
    x = tokens(2, 10)
    cache = KVCache()
    with torch.no_grad():
        made(x[:, :7], padded(mask), mask=mask, cache=cache)
        assert torch.equal(torch.as_tensor(cache.seen), torch.tensor(real))
        for step in range(7, 10):
            out = made(x[:, step : step + 1], sequence(1, start=cache.seen), cache=cache)
        for row, count in enumerate(real):
            own = x[row : row + 1, 7 - count :]
            close(out[row, 0], made(own, sequence(count + 3))[0, -1])


def test_rows_of_other_lengths_decode_as_they_do_alone(case):
    slot = {
        None: {},
        mmpos.AdditiveEncoding: {"additive": case.encoding},
        mmpos.RotaryEncoding: {"rotary": case.encoding},
        mmpos.AttentionBias: {"bias": case.encoding},
    }[case.base]
    made, real = model(case.grid, **slot), [3, 7]
    x, cache = tokens(2, 9), KVCache()
    places = torch.stack([case.cells(9, seed) for seed in (1, 2)])
    mask = torch.arange(9) >= torch.tensor([[7 - n] for n in real])
    with torch.no_grad():
        for begin, end in ((0, 7), (7, 8), (8, 9)):
            cut = slice(begin, end)
            out = made(x[:, cut], places[:, cut], mask=mask[:, cut], cache=cache)
        for row, count in enumerate(real):
            own = slice(7 - count, 9)
            close(out[row, -1], made(x[row : row + 1, own], places[row, own])[0, -1])


def test_documents_stay_apart():
    made = model(rotary=mmpos.RotaryEncoding)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2], [0] * 12])
    x = tokens()
    with torch.no_grad():
        whole = made(x, sequence(L), segments=segments)
        close(decoded(made, x, sequence(L), KVCache(), segments=segments), whole)
    cache = KVCache()
    made(x[:, :3], sequence(3), segments=segments[:, :3], cache=cache)
    with pytest.raises(ValueError, match="with segments got tokens without them"):
        made(x[:, 3:4], sequence(1, start=3), cache=cache)
    assert cache.tokens == 3 == cache.layer(0).keys.shape[-2]


@pytest.mark.parametrize("index", [torch.tensor([0, 3, 4, 6]), torch.tensor([[0, 1], [5, 6]])])
def test_evicted_tokens_are_as_if_they_were_hidden(index):
    made = model(rotary=mmpos.RotaryEncoding, bias=mmpos.ALiBi, depth=1)
    x, cache = tokens(2, 8), KVCache()
    with torch.no_grad():
        made(x[:, :7], sequence(7), cache=cache)
        cache.keep(index)
        assert torch.equal(torch.as_tensor(cache.seen).expand(2), torch.tensor([7, 7]))
        out = made(x[:, 7:], sequence(1, start=7), cache=cache)
        rows = index.expand(2, -1)
        visible = torch.zeros(2, 8, dtype=torch.bool).scatter(1, rows, True)
        visible[:, -1] = True
        close(out[:, 0], made(x, sequence(8), mask=visible)[:, -1])
    with pytest.raises(ValueError, match="tokens have indices 0 to"):
        cache.keep(torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="the cache is empty"):
        KVCache().keep(index)


def test_beams_go_on_from_the_rows_that_are_chosen():
    made = model(rotary=mmpos.RotaryEncoding)
    mask = torch.tensor([[False, True, True], [True, True, True]])
    x, rows = tokens(2, 3), torch.tensor([1, 1, 0])
    cache, other = KVCache(), KVCache()
    with torch.no_grad():
        made(x, padded(mask), mask=mask, cache=cache)
        cache.select(rows)
        made(x[rows], padded(mask[rows]), mask=mask[rows], cache=other)
        after, new = sequence(1, start=cache.seen), tokens(3, 1)
        close(made(new, after, cache=cache), made(new, after, cache=other))
    assert cache.seen.tolist() == [4, 4, 3]


def test_keys_are_turned_anew():
    k = torch.randn(2, 3, 9, 16)
    where, shifted = sequence(9), sequence(9, start=-4)
    longer = partial(mmpos.RotaryEncoding, extension=YaRN(factor=4, original_length=8))
    mixed = mmpos.MixedRotaryEncoding(16, 1, heads=3)
    for made in (mmpos.RotaryEncoding(16), mmpos.XPosEncoding(16), mixed):
        old = made(where)
        for new in (made(shifted), longer(16)(where)):
            again = rerotate(mmpos.rotate(k, old.dual), old, new)
            torch.testing.assert_close(again, mmpos.rotate(k, new.dual), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no rotation, and what it does cannot be undone"):
        place = mmpos.positions.grid(1, 3, 3)
        other = mmpos.VJEPA2Encoding(16, 3)(place)
        rerotate(k, other, other)


@torch.no_grad()
def test_memory_is_moved_seldom_and_holds_what_was_put():
    layer, parts, moves = LayerCache(), [], 0
    for step in range(200):
        new = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1, 5)
        parts.append(new)
        before = layer.keys.data_ptr() if step else None
        keys, values = layer.append(*new)
        moves += keys.data_ptr() != before
    assert moves <= 9
    assert torch.equal(keys, torch.cat([k for k, _ in parts], -2))
    assert torch.equal(values, torch.cat([v for _, v in parts], -2))


def test_gradients_flow_through_a_cache():
    made = model(rotary=mmpos.RotaryEncoding)
    x = tokens()
    gradients = []
    for way in (lambda: made(x, sequence(L)), lambda: decoded(made, x, sequence(L), KVCache())):
        made.zero_grad()
        way().square().sum().backward()
        gradients.append([each.grad for each in made.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"causal": False}, {"class_token": True}])
def test_models_that_cannot_have_one(options):
    made = model(**options)
    with pytest.raises(ValueError, match="causal transformers without class and register tokens"):
        made(tokens(), sequence(L), cache=KVCache())


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    made = model((8,), additive=mmpos.LearnedEncoding, rotary=mmpos.RotaryEncoding)
    cache = KVCache()
    made(tokens(2, 8)[:, :6], sequence(6), cache=cache)
    with pytest.raises(ValueError, match="is no cell of the table"):
        made(tokens(2, 3), sequence(3, start=6), cache=cache)
    with pytest.raises(ValueError, match="holds 2 rows, and 1 were given"):
        made(tokens(1, 1), sequence(1, start=6), cache=cache, length=16)
    assert cache.length is None
    assert cache.tokens == 6 == cache.layer(0).keys.shape[-2]
    assert torch.equal(chosen(cache.positions, torch.arange(6)), sequence(6))


@torch.no_grad()
def test_rows_that_are_chosen_take_their_lengths_along():
    made = model(rotary=partial(mmpos.RotaryEncoding, extension=DYNAMIC))
    x, lengths = tokens(), torch.tensor([5, 40])
    for rows in (torch.tensor([1, 0]), torch.tensor([1])):
        cache = KVCache(length=lengths)
        made(x[:, :9], sequence(9), cache=cache)
        cache.select(rows)
        out = made(x[rows, 9:10], sequence(1, start=9), cache=cache)
        close(out[:, 0], made(x[rows, :10], sequence(10), length=lengths[rows])[:, -1])


@torch.no_grad()
def test_a_window_counts_real_tokens():
    made = model(rotary=mmpos.RotaryEncoding, window=4)
    x, cache = tokens(2, 12), KVCache()
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    made(x[:, :9], padded(mask), mask=mask, cache=cache)
    for step in (9, 10):
        out = made(x[:, step : step + 1], sequence(1, start=cache.seen), cache=cache)
    own = torch.cat((x[:1, :5], x[:1, 9:11]), 1)
    close(out[0, 0], made(own, sequence(7))[0, -1])
    close(out[1, 0], made(x[1:, :11], sequence(11))[0, -1])


@torch.no_grad()
def test_a_window_does_not_close_up_over_evicted_tokens():
    made = model(rotary=mmpos.RotaryEncoding, window=4, depth=1)
    x, cache, kept = tokens(2, 12), KVCache(), torch.tensor([0, 1, 8, 10])
    made(x[:, :11], sequence(11), cache=cache)
    cache.keep(kept)
    out = made(x[:, 11:], sequence(1, start=11), cache=cache)
    visible = torch.zeros(2, 12, dtype=torch.bool)
    visible[:, kept] = visible[:, -1] = True
    close(out[:, 0], made(x, sequence(12), mask=visible)[:, -1])


@pytest.mark.usefixtures("unchecked")
def test_rows_of_another_number_leave_the_cache_as_it_was():
    made = model(rotary=mmpos.RotaryEncoding)
    x, cache = tokens(), KVCache()
    with torch.no_grad():
        made(x[:, :9], sequence(9), cache=cache)
        with pytest.raises(ValueError, match="holds 2 rows, and 1 were given"):
            made(x[:1, 9:10], sequence(1, start=9), cache=cache)
        with pytest.raises(ValueError, match="holds 2 rows, and 3 were given"):
            cache.keep(torch.zeros(3, 1, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"by their indices, got torch.bool"):
            cache.keep(torch.ones(9, dtype=torch.bool))
        out = made(x[:, 9:10], sequence(1, start=9), cache=cache)
        close(out[:, 0], made(x[:, :10], sequence(10))[:, -1])


@torch.no_grad()
def test_segments_that_rows_share_are_kept_and_chosen():
    made = model(rotary=mmpos.RotaryEncoding)
    x, segments = tokens(3), torch.arange(L) // 5
    cache, whole = KVCache(), made(tokens(3), sequence(L), segments=segments)
    made(x[:, :9], sequence(9), segments=segments[:9], cache=cache)
    cache.keep(torch.arange(9).expand(3, -1))
    cache.select(torch.tensor([2, 0]))
    out = made(x[[2, 0], 9:], sequence(3, start=9), segments=segments[9:], cache=cache)
    close(out, whole[[2, 0], 9:])


def test_what_learns_beside_the_keys_learns_through_a_cache():
    made = model(bias=mmpos.T5Bias)
    made.requires_grad_(False)
    made.bias.requires_grad_(True)
    gradients = []
    for way in (
        lambda: made(tokens(), sequence(L)),
        lambda: decoded(made, tokens(), sequence(L), KVCache()),
    ):
        made.bias.table.grad = None
        way().square().sum().backward()
        gradients.append(made.bias.table.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


def test_a_cache_goes_from_inference_mode_to_no_grad_and_between_dtypes():
    made = model(rotary=mmpos.RotaryEncoding)
    x, cache = tokens(), KVCache()
    with torch.inference_mode():
        made(x[:, :9], sequence(9), cache=cache)
    with torch.no_grad():
        out = made(x[:, 9:10], sequence(1, start=9), cache=cache)
        close(out[:, 0], made(x[:, :10], sequence(10))[:, -1])
        low = KVCache()
        with torch.autocast("cpu", torch.bfloat16):
            made(x[:, :9], sequence(9), cache=low)
        out = made(x[:, 9:10], sequence(1, start=9), cache=low)
        torch.testing.assert_close(
            out[:, 0], made(x[:, :10], sequence(10))[:, -1], rtol=0.1, atol=0.1
        )


@torch.no_grad()
def test_extensions_take_the_real_length_of_each_row():
    made = model(rotary=partial(mmpos.RotaryEncoding, extension=DYNAMIC))
    x = tokens(2, 16)
    mask = torch.arange(16) < torch.tensor([[9], [16]])
    out = made(x, padded(mask), mask=mask)
    close(out[0, :9], made(x[:1, :9], sequence(9))[0])
    close(out[1], made(x[1:], sequence(16))[0])
    with pytest.raises(ValueError, match="packed in a row has lengths of its own"):
        made(x, sequence(16), segments=torch.zeros(2, 16, dtype=torch.int64))


def test_keys_are_turned_anew_far_from_the_center():
    xpos, k = mmpos.XPosEncoding(16), torch.randn(1, 3, 4, 16)
    far, near = xpos(sequence(4, start=20000)), xpos(sequence(4))
    again = rerotate(mmpos.rotate(k, far.dual), far, near)
    torch.testing.assert_close(again, mmpos.rotate(k, near.dual), rtol=1e-4, atol=1e-4)
