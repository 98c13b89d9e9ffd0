import math

import pytest
import torch
from timm.models.swin_transformer_v2 import WindowAttention
from timm.models.swin_transformer_v2_cr import WindowMultiHeadAttention
from torchvision.models.swin_transformer import ShiftedWindowAttentionV2

import mmpos
from mmpos.bias import LogCPB, log_cpb
from mmpos.coordinates import Scaled
from mmpos.positions import absent, grid, join, sequence

SHARES = {0: 0.0, 0.25: 0.5283208335737187, 0.5: 0.7739760316291208, 1: 1.0566416671474375}
SHARES |= {-1: -1.0566416671474375, 1.5: 1.2334799060470307}
"""Offset as a share of the window, and what the layers see; computed apart from this package."""


def from_mlp(bias: LogCPB, mlp: torch.nn.Sequential) -> LogCPB:
    """With the weights of a peer's layers, which are drawn anew so that none is 0."""
    first, last = (layer for layer in mlp.modules() if isinstance(layer, torch.nn.Linear))
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    state = {"weight_in": first.weight, "bias_in": first.bias, "weight_out": last.weight}
    if last.bias is not None:
        state["bias_out"] = last.bias
    bias.load_state_dict(state)
    return bias


@pytest.mark.peer("torchvision")
@pytest.mark.parametrize("window", [[8, 8], [4, 6]])
def test_it_is_torchvisions_swin_v2(window):
    peer = ShiftedWindowAttentionV2(28, window, [0, 0], num_heads=7)
    bias = from_mlp(LogCPB(7, window), peer.cpb_mlp)
    peer.define_relative_position_bias_table()
    out = bias(grid(*window), grid(*window))
    torch.testing.assert_close(out, peer.get_relative_position_bias()[0], rtol=0, atol=1e-5)


@pytest.mark.peer("timm")
@pytest.mark.parametrize(("window", "trained"), [((8, 8), None), ((12, 9), (8, 6)), ((4, 1), None)])
def test_it_is_timms_swin_v2_with_the_window_of_pretraining_kept(window, trained):
    peer = WindowAttention(48, window, 12, pretrained_window_size=trained or (0, 0))
    bias = from_mlp(LogCPB(12, window, window=trained), peer.cpb_mlp)
    table = 16 * peer.cpb_mlp(peer.relative_coords_table).view(-1, 12).sigmoid()
    expected = table[peer.relative_position_index.flatten()].T.reshape(12, *[math.prod(window)] * 2)
    out = bias(grid(*window), grid(*window))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    if trained is not None:
        other = LogCPB(12, window)
        other.load_state_dict(bias.state_dict())
        assert not torch.allclose(other(grid(*window), grid(*window)), out, atol=1e-2)
        small = LogCPB(12, trained)
        small.load_state_dict(bias.state_dict())
        inside = grid(*trained)
        assert torch.equal(small(inside, inside), bias(inside, inside))


@pytest.mark.peer("timm")
@pytest.mark.parametrize("window", [(7, 7), (3, 5)])
def test_it_is_timms_swin_v2_cr(window):
    peer = WindowMultiHeadAttention(42, 14, window).eval()
    bias = from_mlp(LogCPB(14, window, form="cr", hidden=384), peer.meta_mlp)
    out = bias(grid(*window), grid(*window))
    expected = peer._relative_positional_encodings()[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


def test_offsets_are_seen_on_a_logarithmic_scale():
    bias = LogCPB(1, (9,), hidden=2)
    bias.load_state_dict(
        {
            "weight_in": torch.tensor([[1.0], [-1.0]]),
            "bias_in": torch.zeros(2),
            "weight_out": torch.tensor([[1.0, -1.0]]),
        }
    )
    seen = torch.tensor(list(SHARES.values()), dtype=torch.float64)
    queries = torch.tensor([[8 * share] for share in SHARES])
    out = bias(queries, sequence(1))[0, :, 0]
    torch.testing.assert_close(out.double(), 16 * seen.sigmoid(), rtol=1e-6, atol=0)


def by_formula(bias: LogCPB, window, query, key) -> torch.Tensor:
    x = []
    for size, q, k in zip(window, query, key, strict=True):
        offset = 0.0 if math.isnan(q - k) else q - k
        if bias.form == "cr":
            x.append(math.copysign(math.log(1 + abs(offset)), offset))
        else:
            share = math.log2(1 + 8 * abs(offset) / max(size - 1, 1)) / 3
            x.append(math.copysign(share, offset))
    inner = bias.weight_in.double() @ torch.tensor(x).double() + bias.bias_in.double()
    out = bias.weight_out.double() @ inner.relu()
    return 16 * out.sigmoid() if bias.bias_out is None else out + bias.bias_out.double()


@pytest.mark.parametrize("form", ["swin", "cr"])
@pytest.mark.parametrize("window", [(300,), (5, 1), (2, 3, 70)])
def test_it_is_the_formula_for_any_offset(form, window):
    named = {"window": window} if form == "swin" else {}
    bias = LogCPB(5, len(window), form=form, hidden=11, std=0.7, **named)
    torch.nn.init.normal_(bias.bias_in)
    if bias.bias_out is not None:
        torch.nn.init.normal_(bias.bias_out)
    queries = torch.randn(6, len(window)) * 400
    keys = torch.cat((torch.randn(5, len(window)) * 3, queries[:1]))
    queries[1, 0] = math.nan
    queries[2], keys[1] = math.nan, math.nan
    expected = torch.stack(
        [
            torch.stack(
                [
                    torch.zeros(5).double()
                    if all(math.isnan(a - b) for a, b in zip(q, k, strict=True))
                    else by_formula(bias, window, q, k)
                    for k in keys.tolist()
                ]
            )
            for q in queries.tolist()
        ]
    ).permute(2, 0, 1)
    torch.testing.assert_close(bias(queries, keys).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_hidden_layer_is_formed_for_offsets_not_for_pairs(monkeypatch):
    bias, places = LogCPB(3, (12, 9)), join(absent(1, 2), grid(12, 9))
    sizes, formed = [], bias.of_offsets
    monkeypatch.setattr(
        LogCPB, "of_offsets", lambda self, axes: (sizes.append(axes[0].shape), formed(axes))[1]
    )
    bias(places, places)
    bias.score_mod(places, places)
    bias.blocks(places, places).form(0, 50)
    assert sizes[:2] == [(23 * 17,), (23 * 17,)] and sizes[2] < (23 * 17,)


def test_pairs_off_a_grid_are_formed_a_few_at_a_time(monkeypatch):
    bias, places = LogCPB(3, (5, 5), hidden=16, std=0.5), torch.randn(40, 2)
    whole = bias(places, places)
    whole.square().sum().backward()
    expected = [weight.grad.clone() for weight in bias.parameters()]
    bias.zero_grad()
    monkeypatch.setattr(log_cpb, "_AT_ONCE", 16 * 40 * 7)
    parts = bias(places, places)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    parts.square().sum().backward()
    for weight, gradient in zip(bias.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-4)


def test_the_score_mod_off_a_grid_is_the_dense_bias():
    bias, places = LogCPB(2, (5, 5), std=0.5), torch.randn(4, 2)
    index = [torch.tensor(at) for at in (0, 1, 2, 3)]
    assert (
        bias.score_mod(places, places)(torch.tensor(0.0), *index) == bias(places, places)[1, 2, 3]
    )


def test_readings_make_a_grid_of_another_size_look_alike():
    bias = LogCPB(3, (4, 6), coordinates=Scaled())
    plain = LogCPB(3, (4, 6))
    plain.load_state_dict(bias.state_dict())
    out = bias(grid(8, 18), grid(8, 18), extent=(8, 18))
    places = grid(8, 18) * torch.tensor([1 / 2, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(out, plain(places, places), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "arguments", "error", "message"),
    [
        (2, {}, TypeError, "scaled by the window: make the bias with a grid .*or pass window"),
        (2, {"window": (4,)}, ValueError, r"window must have 2 sizes of 1 or more, got \(4,\)"),
        ((4, 4), {"window": (4, 0)}, ValueError, r"window must have 2 sizes.*got \(4, 0\)"),
        (2, {"form": "cr", "window": (4, 4)}, ValueError, "does not scale offsets.*drop it"),
        ((4, 4), {"form": "v2"}, ValueError, "form must be one of.*'swin', 'cr'.*got 'v2'"),
        ((4, 4), {"hidden": 0}, ValueError, "hidden must be 1 or more, got 0"),
    ],
)
def test_bad_arguments(unchecked, axes, arguments, error, message):
    with pytest.raises(error, match=message):
        LogCPB(3, axes, **arguments)


def test_it_is_rebuilt_from_its_spec():
    for bias in (LogCPB(3, (4, 6), window=[2, 3], hidden=5), LogCPB(3, 2, form="cr")):
        assert repr(mmpos.build(bias.spec())) == repr(bias)
