"""One encoding for all layers, one for each, or a pattern."""

import functools

import pytest
import torch
from torch import nn

import mmpos
from mmpos.attention import prepare
from mmpos.models import Transformer
from mmpos.positions import grid, sequence

LOCAL = functools.partial(mmpos.RotaryEncoding, base=100)


def make(axes=1, depth=4, **arguments) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(axes, dim=48, depth=depth, heads=3, **arguments)
    for weight in model.layers.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.15)
    return model.eval()


def by_hand(model, x, positions, rotations, biases, windows):
    """Each layer with its own rotation, bias and window, written out."""
    for layer, turn, bias, window in zip(model.layers, rotations, biases, windows, strict=True):
        added = None if bias is None else bias(positions, positions)
        length = x.shape[-2]
        ready = prepare(length, length, bias=added, causal=model.causal, window=window)
        x = layer(x, None if turn is None else turn(positions), ready)
    return model.norm(x)


@pytest.fixture
def tokens():
    return torch.randn(2, 13, 48), sequence(13, start=290)


def test_some_layers_rotate_and_some_do_not(tokens):
    model = make(rotary=[mmpos.RotaryEncoding, nn.Identity], causal=True)
    rope = mmpos.RotaryEncoding(16)
    expected = by_hand(model, *tokens, [rope, None, rope, None], [None] * 4, [None] * 4)
    torch.testing.assert_close(model(*tokens), expected)
    everywhere = make(rotary=mmpos.RotaryEncoding, causal=True)(*tokens)
    assert (everywhere - expected).abs().max() > 1e-2


def test_local_layers_have_their_own_base_and_window(tokens):
    model = make(rotary=[LOCAL, mmpos.RotaryEncoding], window=[4, None], causal=True)
    near, far = mmpos.RotaryEncoding(16, base=100), mmpos.RotaryEncoding(16)
    expected = by_hand(model, *tokens, [near, far] * 2, [None] * 4, [4, None] * 2)
    torch.testing.assert_close(model(*tokens), expected)
    unlimited = by_hand(model, *tokens, [near, far] * 2, [None] * 4, [None] * 4)
    assert (unlimited - expected).abs().max() > 1e-3


def test_biases_take_turns(tokens):
    bias = mmpos.ALiBi(3)
    model = make(bias=[nn.Identity, nn.Identity(), nn.Identity, bias], rotary=mmpos.RotaryEncoding)
    expected = by_hand(
        model, *tokens, [mmpos.RotaryEncoding(16)] * 4, [None, None, None, bias], [None] * 4
    )
    torch.testing.assert_close(model(*tokens), expected)


def test_an_encoding_is_made_once_for_each_place_or_each_layer():
    made = []

    def count(*given):
        made.append(mmpos.RotaryEncoding(*given))
        return made[-1]

    assert make(rotary=count).rotary is made[0] and len(made) == 1
    made.clear()
    model = make(rotary=[count, nn.Identity])
    assert list(model.rotary) == made and len(made) == 1
    made.clear()
    model = make(rotary=count, per_layer=["rotary"])
    assert list(model.rotary) == made and len(made) == 4
    assert model.rotary_of == [0, 1, 2, 3]
    shared = mmpos.RotaryEncoding(16)
    model = make(rotary=[shared, nn.Identity, shared, count])
    assert model.rotary_of == [0, None, 0, 1]


def test_each_encoding_is_computed_once_in_a_forward_pass(tokens):
    calls = []
    rope, bias = mmpos.RotaryEncoding(16), mmpos.ALiBi(3)
    for module in (rope, bias):
        module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    make(rotary=[rope, nn.Identity], bias=bias, window=[None, 3])(*tokens)
    assert calls == ["RotaryEncoding", "ALiBi"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary": [LOCAL, LOCAL, nn.Identity]}, "rotary is a pattern of 3 layers.*depth of 4"),
        ({"rotary": []}, "rotary is a pattern of 0 layers.*depth of 4"),
        ({"bias": [mmpos.ALiBi] * 8}, "bias is a pattern of 8 layers.*depth of 4"),
        ({"window": [3, None, None]}, "window is a pattern of 3"),
        ({"per_layer": ["additive"]}, "per_layer.*'rotary' and 'bias', got 'additive'"),
        ({"window": 4, "class_token": True}, "window would hide class and register tokens"),
    ],
)
def test_refusals(arguments, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_a_pattern_takes_the_right_kind_only():
    with pytest.raises(TypeError, match="takes a kind of RotaryEncoding, got ALiBi"):
        make(rotary=[nn.Identity, mmpos.ALiBi])
    with pytest.raises(ValueError, match="head_dim=8, the transformer needs 16"):
        make(rotary=[mmpos.RotaryEncoding(8), nn.Identity])


def test_a_window_alone_lets_tokens_see_their_neighbours():
    model = make(2, rotary=mmpos.RotaryEncoding, window=3, depth=1)
    x, positions = torch.randn(1, 24, 48), grid(4, 6)
    changed = x.clone()
    changed[:, 10] = torch.randn(48)
    moved = (model(x, positions) - model(changed, positions)).abs().amax((0, 2)) > 1e-6
    assert moved.nonzero().flatten().tolist() == [8, 9, 10, 11, 12]
