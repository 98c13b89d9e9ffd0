import math

import pytest
import torch
from torch import nn

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Transformer
from tasks.optim import WarmupCosine, adamw, parameter_groups


def network() -> Classifier:
    encoder = Transformer(
        (2, 3), size="nano", depth=1, additive=mmpos.LearnedEncoding, registers=2, class_token=True
    )
    return Classifier(PatchEmbedding(64, (4, 4), 1), encoder, {"what": 3})


def test_positions_prefix_tokens_norms_and_biases_are_not_decayed() -> None:
    module = network()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    decayed, kept = (
        {names[id(parameter)] for parameter in group["params"]}
        for group in parameter_groups(module, 0.1)
    )
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert {"transformer.additive.table", "transformer.prefix", "transformer.norm.weight"} <= kept
    assert "transformer.layers.0.attention.qkv.bias" in kept
    assert {"transformer.layers.0.attention.qkv.weight", "tokens.project.weight"} <= decayed


def test_decay_really_moves_the_decayed_only() -> None:
    module = network()
    table = module.transformer.additive.table.detach().clone()
    weight = module.transformer.layers[0].attention.qkv.weight.detach().clone()
    optimizer = adamw(module, lr=0.1, weight_decay=0.5)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(module.transformer.additive.table, table, rtol=0, atol=0)
    torch.testing.assert_close(
        module.transformer.layers[0].attention.qkv.weight, weight * (1 - 0.1 * 0.5)
    )


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5])
def test_schedule_is_linear_then_cosine_by_step(warmup: float) -> None:
    steps, lr = 40, 0.3
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
    schedule = WarmupCosine(optimizer, steps, warmup)
    rates = [optimizer.param_groups[0]["lr"]]
    for step in range(1, steps + 1):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    rising = int(warmup * steps)
    for step, rate in enumerate(rates):
        if step < rising:
            wanted = lr / rising + step * (lr - lr / rising) / rising
        else:
            wanted = lr / 2 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
        assert rate == pytest.approx(wanted, abs=1e-9), step
    assert max(rates) == pytest.approx(lr) and rates[-1] == pytest.approx(0, abs=1e-9)


def test_warmup_outside_its_range_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"fraction of all steps.* got 500"):
        WarmupCosine(optimizer, 10, 500)


def test_the_state_of_a_schedule_is_its_step() -> None:
    """Restored into one of another rate and length, it goes on there at the same step."""
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate) for rate in (0.1, 0.4))
    old, new = WarmupCosine(first, 10, 0.0), WarmupCosine(second, 20, 0.0)
    old.step_update(10)
    assert first.param_groups[0]["lr"] == pytest.approx(0)
    new.load_state_dict(old.state_dict())
    assert second.param_groups[0]["lr"] == pytest.approx(0.4 / 2)
