"""Recurrence in place of attention: causal, each document by itself, without positions."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from mmpos.models import Transformer
from mmpos.positions import packed, sequence
from tasks import LanguageModel
from tasks.recurrent import Mamba2, Recurrent


class Sums(nn.Module):
    """The simplest causal mixer: everything up to each token."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.cumsum(-2)


@pytest.fixture(params=[Sums, Mamba2])
def network(request) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent((16,), size="nano", depth=2, mixer=request.param).eval()


def test_documents_of_a_row_are_mixed_by_themselves(network):
    x = torch.randn(3, 80, 64)
    first = packed([10, 50, 20])[1]
    segments = torch.stack((first, torch.zeros(80, dtype=torch.long), packed([79, 1])[1]))
    with torch.no_grad():
        whole = network(x, sequence(80), segments=segments)
        for row, begin, end in ((0, 0, 10), (0, 10, 60), (0, 60, 80), (1, 0, 80), (2, 79, 80)):
            alone = network(x[row : row + 1, begin:end], sequence(end - begin))
            torch.testing.assert_close(whole[row, begin:end], alone[0], atol=1e-5, rtol=1e-5)


def test_what_comes_later_changes_nothing_before_it(network):
    x = torch.randn(2, 80, 64, requires_grad=True)
    (network(x, sequence(80))[0, 30] @ torch.randn(64)).backward()
    assert (x.grad[0, :31].abs().sum(-1) > 0).all()
    assert not x.grad[0, 31:].any()
    assert not x.grad[1].any()


def test_order_is_known_without_positions(network):
    x = torch.randn(1, 20, 64)
    with torch.no_grad():
        at = network(x, sequence(20))
        assert torch.equal(at, network(x, 7 + sequence(20)))
        assert not torch.allclose(at[0, -1], network(x.flip(1), sequence(20))[0, -1], atol=1e-2)


def test_mamba_has_about_as_many_parameters_as_attention():
    ours, theirs = (
        sum(p.numel() for p in made.parameters())
        for made in (Recurrent((16,), size="nano"), Transformer((16,), size="nano"))
    )
    assert 0.9 < ours / theirs < 1.1


def test_mamba_begins_with_its_steps_and_decays():
    """Steps Δ log-uniform from 0.001 to 0.1, decays 1 … heads (arXiv:2405.21060's code)."""
    torch.manual_seed(0)
    mixers = [Mamba2(512).mixer for _ in range(20)]
    steps = torch.cat([softplus(mixer.dt_bias.detach()) for mixer in mixers])
    assert (steps >= 0.001 * (1 - 1e-4)).all() and (steps <= 0.1 * (1 + 1e-4)).all()
    share = ((steps.log() - math.log(0.001)) / math.log(100)).histc(4, 0, 1) / len(steps)
    assert ((share - 1 / 4).abs() < 0.06).all()
    for mixer in mixers:
        assert (mixer.time_step_min, mixer.time_step_max) == (0.001, 0.1)
        torch.testing.assert_close(mixer.A_log.detach().exp(), 1.0 + torch.arange(32))
        assert (mixer.D == 1).all()


def test_a_language_model_of_it_goes_on_with_a_prompt_as_full_passes_do(network):
    task = LanguageModel(9, 16, lambda axes: network)
    with torch.no_grad():
        task.network.tokens.weight.mul_(20)
    prompt = torch.randint(9, (2, 5))
    whole = task.generate(prompt, 8, temperature=0)
    for count in range(5, 13):
        logits = task.eval()(whole[:, :count])
        assert torch.equal(logits[:, -1].argmax(-1), whole[:, count])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"axes": (4, 4)}, "goes along one axis"),
        ({"axes": 2}, "goes along one axis"),
        ({"causal": False}, "is causal"),
        ({"dim": 24}, "head_dim=16 must divide expand · dim = 24"),
    ],
)
def test_what_it_cannot_be_is_refused(options, line):
    with pytest.raises(ValueError, match=line):
        Recurrent(**{"axes": 1} | options)


def test_a_mask_or_cache_is_refused(network):
    for name in ("mask", "cache"):
        with pytest.raises(ValueError, match=f"takes no {name}"):
            network(torch.zeros(1, 4, 64), sequence(4), **{name: torch.ones(1, 4).bool()})


def test_without_the_library_the_way_to_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'mmpos\[recurrent\]'"):
        Mamba2(64)
