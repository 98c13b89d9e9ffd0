"""Layer-wise rates: which layer a parameter is of, and what its rate is then."""

import math
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import mmpos
from mmpos.models import Classifier, PatchEmbedding, Transformer
from mmpos.models.classifier import BackboneClassifier
from tasks.optim import WarmupCosine, adamw, parameter_groups, regroup


def classifier(**options) -> Classifier:
    options = {"size": "nano", "depth": 3, "class_token": True} | options
    encoder = Transformer((2, 3), **options)
    return Classifier(PatchEmbedding(64, (4, 4), 1), encoder, {"what": 3, "where": 2})


def told(groups: list[dict]) -> dict[int, tuple[float, float]]:
    """Scale and decay of each parameter."""
    return {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}


def scales(module: nn.Module, layer_decay: float) -> dict[str, float]:
    groups = parameter_groups(module, 0.1, layer_decay)
    return {name: g["lr_scale"] for g in groups for name in g["param_names"]}


class Wrapped(nn.Module):
    """A timm model without its head, as a backbone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dim = model, model.num_features

    def forward(self, images):
        return self.model(images)

    def group_matcher(self, coarse=False):
        inner = self.model.group_matcher(coarse)
        assert isinstance(inner, dict)
        return {key: self._inside(spec) for key, spec in inner.items()}

    def _inside(self, spec):
        if isinstance(spec, str):
            return rf"^model\.(?:{spec.replace('^', '')})"
        return [(self._inside(expression), place) for expression, place in spec]

    def no_weight_decay(self):
        return {f"model.{name}" for name in self.model.no_weight_decay()}


SMALL = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 3},
    "beit_base_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2},
    "xcit_nano_12_p16_224": {"depth": 2},  # names what is not decayed by a pattern
    "swin_tiny_patch4_window7_224": {"depths": (1, 2), "num_heads": (1, 2), "embed_dim": 12},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (4, 4, 8, 8)},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_model_of_timm_is_grouped_as_timm_groups_it(name: str) -> None:
    model = timm.create_model(name, num_classes=5, **SMALL[name])
    free = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    wanted = param_groups_layer_decay(
        model, 0.05, no_weight_decay_list=free, layer_decay=0.7, weight_decay_exclude_1d=True
    )
    found = told(parameter_groups(model, 0.05, 0.7))
    assert found == {key: pytest.approx(pair) for key, pair in told(wanted).items()}
    assert len({scale for scale, _ in found.values()}) > 2


def test_a_backbone_without_its_head_keeps_its_rates() -> None:
    name = "vit_tiny_patch16_224"
    whole = timm.create_model(name, num_classes=5, **SMALL[name])
    backbone = Wrapped(timm.create_model(name, num_classes=0, **SMALL[name]))
    network = BackboneClassifier(backbone, {"what": 5, "where": 2})
    groups = parameter_groups(network, 0.05, 0.7)
    found = {n: told(groups)[id(p)] for n, p in network.named_parameters()}
    wanted = told(
        param_groups_layer_decay(
            whole, 0.05, no_weight_decay_list=whole.no_weight_decay(), layer_decay=0.7
        )
    )
    for inner, parameter in whole.named_parameters():
        names = (
            [f"heads.{q}.{inner.split('.')[1]}" for q in ("what", "where")]
            if inner.startswith("head.")
            else [f"backbone.model.{inner}"]
        )
        for own in names:
            assert found.pop(own) == pytest.approx(wanted[id(parameter)]), own
    assert not found


def test_layers_of_our_transformer() -> None:
    """lr · decay^(depth + 1) for the stem, decay^(depth − i) for block i, lr for norm and heads."""
    rates = scales(
        classifier(additive=mmpos.LearnedEncoding, bias=partial(mmpos.T5Bias, buckets=4)), 0.5
    )
    for name, scale in rates.items():
        parts = name.split(".")
        if parts[1] == "layers":
            wanted = 0.5 ** (3 - int(parts[2]))
        elif parts[0] == "heads" or parts[:2] == ["transformer", "norm"]:
            wanted = 1.0
        else:
            wanted = 0.5**4
        assert scale == wanted, name
    assert {"transformer.prefix", "transformer.additive.table", "tokens.project.bias"} <= set(rates)
    assert any(name.startswith("transformer.bias") for name in rates)


def test_an_encoding_of_one_layer_learns_as_that_layer() -> None:
    slow = nn.Identity
    rotary = [mmpos.MixedRotaryEncoding, slow, mmpos.MixedRotaryEncoding]
    rates = scales(classifier(rotary=rotary, bias=mmpos.KerpleBias, per_layer=["bias"]), 0.5)
    found = {name.rpartition(".")[0]: s for name, s in rates.items() if "rotary" in name}
    assert found == {"transformer.rotary.0": 0.5**3, "transformer.rotary.1": 0.5}
    found = {name.rpartition(".")[0]: s for name, s in rates.items() if "bias." in name}
    found = {name: s for name, s in found.items() if name.startswith("transformer.bias")}
    assert found == {f"transformer.bias.{i}": 0.5 ** (3 - i) for i in range(3)}
    shared = [mmpos.MixedRotaryEncoding, slow]  # layers 0 and 2 have one
    rates = scales(classifier(depth=4, rotary=shared), 0.5)
    assert {s for name, s in rates.items() if "rotary" in name} == {0.5**5}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_layers_change_nothing_of_what_is_decayed(layer_decay: float | None) -> None:
    module = classifier(additive=mmpos.LearnedEncoding, bias=partial(mmpos.T5Bias, buckets=4))
    groups = parameter_groups(module, 0.1, layer_decay)
    decays = {n: g["weight_decay"] for g in groups for n in g["param_names"]}
    assert set(decays) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        place = name.split(".")[1] in ("additive", "bias", "prefix")
        assert decays[name] == (0.0 if place or parameter.ndim < 2 else 0.1), name


@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_every_rate_is_its_share_of_the_schedule(warmup: float) -> None:
    steps, lr, rising = 20, 0.3, int(warmup * 20)
    optimizer = adamw(classifier(), lr, 0.1, 0.5)
    schedule = WarmupCosine(optimizer, steps, warmup)
    assert {g["lr_scale"] for g in optimizer.param_groups} == {1.0, 0.5, 0.25, 0.125, 0.0625}
    for step in range(steps + 1):
        if step:
            schedule.step_update(step)
        if step < rising:
            rate = lr / rising + step * (lr - lr / rising) / rising
        else:
            rate = lr / 2 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(rate * group["lr_scale"], abs=1e-9), step


def test_the_rate_really_moves_the_weights() -> None:
    module = classifier()
    optimizer = adamw(module, 0.1, 0.0, 0.5)
    WarmupCosine(optimizer, 10, 0.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # Adam's first step is the rate itself
    for name, scale in scales(module, 0.5).items():
        moved = (before[name] - module.get_parameter(name)).mean().item()
        assert moved == pytest.approx(0.1 * scale, rel=1e-3), name


def test_without_layers_there_is_no_decay_of_rates() -> None:
    with pytest.raises(ValueError, match=r"tells its layers by group_matcher\(coarse\)"):
        parameter_groups(nn.Linear(2, 2), 0.1, 0.5)
    model = Wrapped(timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=1))
    model.group_matcher = lambda coarse=False: {"stem": "^absent"}
    with pytest.raises(ValueError, match=r"two layers or more, the heads last: .* gives 1"):
        parameter_groups(model, 0.1, 0.5)


def test_stored_moments_follow_their_names() -> None:
    module = classifier()
    optimizer = adamw(module, 0.1, 0.1)
    for index, parameter in enumerate(module.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + index)
    optimizer.step()
    wanted = {n: optimizer.state[p]["exp_avg"].clone() for n, p in module.named_parameters()}
    state = optimizer.state_dict()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith("tokens"))
    again = adamw(module, 0.2, 0.3, 0.5)
    regroup(state, again.param_groups)
    again.load_state_dict(state)
    told = [(g["weight_decay"], g["lr_scale"]) for g in again.param_groups]
    assert told == [
        (g["weight_decay"], g["lr_scale"]) for g in adamw(module, 1, 0.3, 0.5).param_groups
    ]
    for name, parameter in module.named_parameters():
        if name.startswith("tokens"):
            assert parameter not in again.state
        else:
            assert torch.equal(again.state[parameter]["exp_avg"], wanted[name]), name
    module.requires_grad_(True)
    back = adamw(module, 0.2, 0.3)
    state = again.state_dict()
    regroup(state, back.param_groups)
    back.load_state_dict(state)
    assert module.tokens.project.weight not in back.state
    back.step()


def test_the_state_of_another_optimizer_is_left_alone() -> None:
    module = classifier()
    other = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    state = other.state_dict()
    regroup(state, parameter_groups(module, 0.1, 0.5))
    assert state == other.state_dict()
