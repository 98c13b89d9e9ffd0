"""Biases that are formed by blocks of queries: what is learned in them, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

import mmpos
from mmpos.attention import prepare
from mmpos.bias import BiasBlocks

Q, K, HEADS = 5, 9, 6


@pytest.fixture
def qkv():
    return torch.randn(2, HEADS, Q, 8), torch.randn(2, HEADS, K, 8), torch.randn(2, HEADS, K, 4)


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


class Net(nn.Module):
    """A bias that is computed from learned numbers by a small network."""

    def __init__(self, length=Q):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, HEADS))
        self.behind = torch.arange(K - length, K).unsqueeze(-1) - torch.arange(K)

    @property
    def dtype(self):
        return self.mlp[0].weight.dtype

    def forward(self):
        return self.mlp(self.behind.unsqueeze(-1).to(self.dtype)).movedim(-1, 0)

    def blocks(self):
        def form(start, stop):
            return self.mlp(self.behind[start:stop].unsqueeze(-1).to(self.dtype)).movedim(-1, 0)

        return BiasBlocks(form, tuple(self.parameters()))

    def offsets(self):
        """The network is run once, and blocks are read from what it gave, which is no leaf."""
        table = self.mlp(torch.arange(1 - K, K).unsqueeze(-1).to(self.dtype)).t()
        return BiasBlocks(lambda start, stop: table[:, self.behind[start:stop] + K - 1], (table,))

    def exposed(self):
        """The same, but the parameters that are named lie before what blocks have in common."""
        table = self.mlp(torch.arange(1 - K, K).unsqueeze(-1).to(self.dtype)).t()
        return BiasBlocks(
            lambda start, stop: table[:, self.behind[start:stop] + K - 1],
            tuple(self.parameters()),
        )


@pytest.mark.parametrize("kind", ["__call__", "blocks", "offsets", "exposed"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_network_in_the_bias_that_layers_share(
    qkv, softmax_attention, small_blocks, kind, layers
):
    net = Net().double()
    q, k = (part.double() for part in qkv[:2])
    v = torch.randn(2, HEADS, K, 8).double()
    results = []
    for own in (True, False):
        net.zero_grad()
        bias = getattr(net, kind if own else "__call__")()
        once = prepare(Q, K, bias=bias, causal=True) if own else None
        x = q
        for _ in range(layers):
            if own:
                x = x + mmpos.attend(x, k, v, prepared=once)
            else:
                lower = torch.ones(Q, K).tril(K - Q).bool()
                x = x + softmax_attention(x, k, v, bias=bias, visible=lower)
        x.square().sum().backward()
        results.append([x.detach(), *(part.grad.clone() for part in net.parameters())])
    close(results[0], results[1], 1e-12)


def test_a_part_of_the_parameters_may_be_frozen(qkv):
    net = Net()
    net.mlp[0].weight.requires_grad_(False)
    mmpos.attend(*qkv, bias=net.blocks()).sum().backward()
    assert net.mlp[0].weight.grad is None
    assert all(part.grad is not None for part in list(net.parameters())[1:])


def test_what_blocks_form_is_smaller_than_the_bias(largest, monkeypatch):
    monkeypatch.setattr("mmpos.attention.gradients._FORMED", 1 << 15)
    monkeypatch.setattr("mmpos.attention.gradients._SCORES", 1 << 13)
    batch, heads, length = 3, 2, 512
    leaves = torch.randn(3, batch, heads, length, 8, requires_grad=True).unbind(0)
    table = torch.randn(heads, 2 * length, requires_grad=True)

    def form(start, stop):
        behind = torch.arange(start, stop).unsqueeze(-1) - torch.arange(length)
        return table[:, behind + length]

    segments = torch.arange(batch * length).view(batch, length) // 100
    with largest:
        mmpos.attend(
            *leaves,
            bias=BiasBlocks(form, (table,)),
            causal=True,
            q_segments=segments,
            k_segments=segments,
        ).sum().backward()
    assert largest.numbers < heads * length**2 // 2


def test_blocks_that_forget_a_parameter(unchecked, qkv):
    one, two = torch.randn(HEADS, Q, K).requires_grad_(), torch.ones(()).requires_grad_()
    for given in ((one,), ()):
        forgetful = BiasBlocks(lambda start, stop: two * one[:, start:stop], given)
        out = mmpos.attend(qkv[0].requires_grad_(), *qkv[1:], bias=forgetful)
        if given:
            with pytest.raises(RuntimeError, match=r"of shape \(\) that is not among.*BiasBlocks"):
                out.sum().backward()


def test_parameters_that_were_replaced_for_the_forward_pass_only(qkv):
    net = Net()
    other = {name: part.detach().clone().requires_grad_() for name, part in net.named_parameters()}
    call = torch.func.functional_call
    module = nn.Module()
    module.net = net
    module.forward = lambda: mmpos.attend(*qkv, bias=net.blocks())
    out = call(module, {f"net.{name}": part for name, part in other.items()}, ())
    with pytest.raises(RuntimeError, match="functional_call"):
        out.sum().backward()


def test_parameters_that_changed_before_the_backward_pass(qkv):
    net = Net()
    out = mmpos.attend(*qkv, bias=net.blocks())
    with torch.no_grad():
        net.mlp[2].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    "shape", [(HEADS, 1, K - 1), (4, Q, K), (3, HEADS, Q, K), (1, 2, HEADS, Q, K)]
)
def test_blocks_of_another_shape(unchecked, qkv, shape):
    bias = torch.zeros(shape, requires_grad=True)
    with pytest.raises(ValueError, match=r"queries 0 to 5 has shape .*\(2, 6, 5, 9\)"):
        mmpos.attend(*qkv, bias=BiasBlocks(lambda *_: bias, (bias,)))


def test_a_model_is_copied_and_trained_on(qkv):
    net = Net()
    mmpos.attend(*qkv, bias=net.blocks()).sum().backward()
    twin = copy.deepcopy(net)
    twin.zero_grad()
    mmpos.attend(*qkv, bias=twin.blocks()).sum().backward()
    close([part.grad for part in twin.parameters()], [part.grad for part in net.parameters()], 0)
