"""What is got wrong first: each is told in one line, with what was given and the way out."""

from functools import partial

import numpy as np
import pytest
import torch

import mmpos
from mmpos import frequencies, positions
from mmpos.models import Transformer

pytestmark = pytest.mark.usefixtures("unchecked")

Q = torch.randn(2, 4, 6, 8)
P = positions.sequence(6)


def attend(**named):
    return lambda: mmpos.attend(Q, Q, Q, **named)


def model(axes=1, **named):
    return lambda: Transformer(axes, dim=48, depth=2, heads=3, **named)


SHAW = mmpos.ShawBias(4, head_dim=8)
SPEC = mmpos.RotaryEncoding(16).spec()
DYNAMIC = mmpos.RotaryEncoding(16, 2, extension=frequencies.DynamicNTK(factor=2, original_length=4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (attend(bias=mmpos.ALiBi(4)), TypeError, r"got ALiBi.*call it.*bias\(positions, positions"),
        (attend(bias="alibi"), TypeError, "bias is a tensor, blocks or content terms, got str"),
        (attend(key_bias=1.0), TypeError, "key_bias must be a tensor.*got 1.0"),
        (attend(key_bias=torch.tensor(1.0)), TypeError, "key_bias must be a tensor"),
        (attend(q_index=[0, 1]), TypeError, r"q_index must be a tensor.*got \[0, 1\]"),
        (attend(mask=[[True]]), TypeError, "mask must be a tensor"),
        (attend(window=1.5), ValueError, "window must be a whole number.*1.5"),
        (attend(window=True), ValueError, "window must be a whole number.*True"),
        (attend(scale=float("nan")), ValueError, "scale must be a finite number, got nan"),
        (
            attend(key_bias=torch.full((4, 6), -torch.inf), causal=True),
            ValueError,
            "key_bias must be finite: hide keys by mask=",
        ),
        (
            attend(q_segments=torch.zeros(2, 6).long(), k_segments=torch.zeros(3, 6).long()),
            ValueError,
            r"q_segments and k_segments are for batches of \[2, 3\]",
        ),
        (
            attend(bias=SHAW(P[:3], P)),
            ValueError,
            r"the bias is for \(1, 4, 3, 6\).*\(2, 4, 6, 6\)",
        ),
        (
            attend(bias=SHAW(*[P.expand(3, -1, -1)] * 2)),
            ValueError,
            r"the bias is for \(3, 4, 6, 6\).*\(2, 4, 6, 6\)",
        ),
        (
            attend(bias=mmpos.ShawBias(8, head_dim=8)(P, P)),
            ValueError,
            r"the bias is for \(1, 8, 6, 6\).*\(2, 4, 6, 6\)",
        ),
        (attend(key_bias=torch.randn(3, 6), causal=True), ValueError, r"key_bias.*\(1, 3, 1, 6\)"),
        (lambda: mmpos.attend(Q[..., :0], Q[..., :0], Q), ValueError, "heads have no features"),
        (lambda: mmpos.ALiBi(4).key_bias(P.flip(0)), ValueError, "these go back"),
        (model(rotary="RotaryEncoding"), TypeError, "takes an encoding, its class.*'RotaryEnc"),
        (model(rotary=SPEC), TypeError, "make it by mmpos.build"),
        (model(rotary=5), TypeError, "takes an encoding, its class.*got 5"),
        (model(per_layer=["rotary"]), ValueError, "per_layer makes rotary anew.*got None"),
        (
            model(rotary=mmpos.RotaryEncoding(16), per_layer=["rotary"]),
            ValueError,
            "per_layer makes rotary anew.*got RotaryEncoding",
        ),
        (model(per_layer="additive"), ValueError, "per_layer names slots.*'additive'"),
        (
            model((3, 3), rotary=mmpos.RotaryEncoding(16, axes=1)),
            ValueError,
            "made for 1 axes, the transformer has 2",
        ),
        (lambda: model()()(torch.randn(6, 48), P), ValueError, r"\(6, 48\), expected.*48\]"),
        (lambda: model()()(torch.randn(2, 6, 40), P), ValueError, r"\(2, 6, 40\), expected.*48\]"),
        (
            lambda: mmpos.RotaryEncoding(16)([[0], [1]]),
            TypeError,
            "positions must be a tensor.*list",
        ),
        (lambda: mmpos.RotaryEncoding(16)(np.zeros((3, 1))), TypeError, "a tensor.*ndarray"),
        (lambda: positions.join([P, P]), TypeError, "parts are tensors"),
        (lambda: positions.sequence(4.5), ValueError, "whole number of tokens.*4.5"),
        (lambda: mmpos.RotaryEncoding("64"), TypeError, "head_dim as a whole.*'64'"),
        (lambda: mmpos.RotaryEncoding(64.0), TypeError, "head_dim as a whole.*64.0"),
        (lambda: mmpos.ALiBi("4"), TypeError, "heads as a whole number.*'4'"),
        (lambda: mmpos.SinusoidalEncoding(8.0), TypeError, "dim as a whole number.*8.0"),
        (lambda: mmpos.RotaryEncoding(64, 2.0), ValueError, "axes must be a whole number.*2.0"),
        (lambda: mmpos.RotaryEncoding(64, None), ValueError, "axes must be a whole number.*None"),
        (lambda: mmpos.RotaryEncoding(64, (2.5, 3)), ValueError, r"axes must be.*\(2.5, 3\)"),
        (
            lambda: mmpos.RotaryEncoding(64, temperature="warm"),
            TypeError,
            "temperature must be a LogTemperature.*'warm'",
        ),
        (
            lambda: mmpos.RotaryEncoding(64, temperature=mmpos.LogTemperature),
            TypeError,
            "temperature must be a LogTemperature",
        ),
        (
            lambda: mmpos.LogTemperature(length=8, beta=float("nan")),
            ValueError,
            "beta and offset must be finite",
        ),
        (
            lambda: frequencies.PositionInterpolation(factor="2"),
            TypeError,
            "PositionInterpolation takes factor as a number, got '2'",
        ),
        (
            lambda: mmpos.build({"class_path": "mmpos.AttentionBias"}),
            TypeError,
            "is a kind of encoding: name one",
        ),
        (
            lambda: mmpos.build({"class_path": "mmpos.ALiBi", "init_args": [4]}),
            ValueError,
            r"init_args are names with values, got \[4\]",
        ),
        (
            lambda: mmpos.build({"class_path": "mmpos.frequencies.Yarn"}),
            ValueError,
            "did you mean mmpos.frequencies.YaRN",
        ),
    ],
)
def test_one_line_says_what_was_given_and_the_way_out(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("named", [{"causal": True}, {"window": 3}, {"bias": mmpos.ALiBi(4)(P, P)}])
def test_a_negative_scale_is_the_scale_of_negative_queries(named):
    expected = mmpos.attend(-Q, Q, Q, scale=0.5, **named)
    torch.testing.assert_close(mmpos.attend(Q, Q, Q, scale=-0.5, **named), expected)


def test_a_negative_scale_with_a_bias_of_keys():
    keys, pairs = mmpos.ALiBi(4).key_bias(P), mmpos.ALiBi(4)(P, P)
    torch.testing.assert_close(
        mmpos.attend(Q, Q, Q, key_bias=keys, causal=True, scale=-0.5),
        mmpos.attend(Q, Q, Q, bias=pairs, causal=True, scale=-0.5),
    )


def test_a_class_token_merges_no_large_positions():
    far = positions.join(positions.absent(1, 1), P + 2**25)
    assert far.dtype == torch.float64 and len(far[1:].unique()) == 6


def test_no_tokens_are_a_sequence_too():
    empty, none = P[:0], Q[:, :, :0]
    keys = mmpos.ALiBi(4).key_bias(empty)
    assert mmpos.attend(none, none, none, key_bias=keys, causal=True).shape == none.shape
    fire = mmpos.FIREBias(4)
    assert fire(empty, empty).shape == (4, 0, 0) and fire(empty, P).shape == (4, 0, 6)
    longer = partial(
        mmpos.RotaryEncoding, extension=frequencies.DynamicNTK(factor=2, original_length=4)
    )
    assert model(rotary=longer)()(torch.randn(2, 0, 48), empty).shape == (2, 0, 48)


def test_the_class_of_a_content_bias_is_given_its_head_dim():
    bias = model(bias=mmpos.ShawBias)().bias
    assert bias.head_dim == 16


def test_a_tensor_is_an_extent_for_lengths_too():
    longer = model((3, 3), rotary=DYNAMIC)().eval()
    x, where = torch.randn(1, 9, 48), positions.grid(3, 3)
    given = longer(x, where, extent=torch.tensor([3, 3]))
    torch.testing.assert_close(given, longer(x, where, extent=(3, 3)))
