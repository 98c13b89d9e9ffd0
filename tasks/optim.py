"""What is trained, at which rate: optimizer groups, frozen parts, the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, cast

from timm.models._manipulate import group_with_matcher
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mmpos.additive import AdditiveEncoding, TableEncoding
from mmpos.bias import AttentionBias, ContentBias, RelativePositionBias
from mmpos.interop.timm import Backbone
from mmpos.models import Transformer
from mmpos.rotary import RotaryEncoding
from tasks.configs import did_you_mean

POSITIONS = (AdditiveEncoding, RotaryEncoding, AttentionBias, ContentBias)
"""What encodings are."""


def parameter_groups(
    module: nn.Module, weight_decay: float, layer_decay: float | None = None
) -> list[dict]:
    """The trainable parameters of ``module`` by layer, and of each with weight decay or without.

    Positions (tables, directions, slopes of any encoding), class and register tokens, norms,
    biases and what the outermost ``no_weight_decay()`` names are not decayed: decay would pull a
    table towards "no position".

    With ``layer_decay``, a group of layer l of L has ``lr_scale = layer_decay ** (L - l)`` (BEiT,
    arXiv:2106.08254): the stem is layer 0, the heads are L. Layers are those of the
    outermost ``group_matcher``, as in timm, whose schedulers apply ``lr_scale``; torch's do not.

    Returns: groups of ``params``, their ``param_names``, ``weight_decay`` and ``lr_scale``.
    Raises: ValueError for layers that cannot be told apart.
    """
    layers = _layers(module) if layer_decay is not None else {}
    last = max(layers.values(), default=0)
    free = _not_decayed(module)
    groups: dict[tuple[int, bool], dict] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layer = layers.get(name, last)
            kept = parameter.ndim < 2 or name in free
            group = groups.setdefault(
                (layer, kept),
                {
                    "params": [],
                    "param_names": [],
                    "weight_decay": 0.0 if kept else weight_decay,
                    "lr_scale": (layer_decay or 1.0) ** (last - layer),
                },
            )
            group["params"].append(parameter)
            group["param_names"].append(name)
    return [groups[key] for key in sorted(groups)]


def _not_decayed(module: nn.Module) -> set[str]:
    """Names of parameters of two dimensions or more that are not decayed."""
    free: set[Tensor] = set()
    for part in module.modules():
        if isinstance(part, POSITIONS):
            free.update(part.parameters())
        if isinstance(part, Transformer) and part.prefix is not None:
            free.add(part.prefix)
    lead, part = _outermost(module, "no_weight_decay")
    patterns = [lead + name for name in part.no_weight_decay()] if part else []  # type: ignore[operator]
    return {
        name
        for name, parameter in module.named_parameters()
        if parameter in free or any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _layers(module: nn.Module) -> dict[str, int]:
    """The layer of each parameter; what lies outside the part with layers is last, as heads are."""
    lead, part = _outermost(module, "group_matcher")
    if part is None:
        raise ValueError(
            "layer_decay needs a network that tells its layers by group_matcher(coarse), as timm's "
            "do, and this one has none"
        )
    names = [name for name, _ in module.named_parameters()]
    inside = [name.removeprefix(lead) for name in names if name.startswith(lead)]
    matcher = part.group_matcher(coarse=False)  # type: ignore[operator]
    named = ((name, None) for name in [*inside, "heads"])
    layers = cast("dict[str, int]", group_with_matcher(named, matcher, reverse=True))
    last = max(layers.values())
    if last == 0 or layers["heads"] != last:
        raise ValueError(
            f"layer_decay needs two layers or more, the heads last: group_matcher of "
            f"{type(part).__name__} gives {last + 1}, with heads in layer {layers['heads']}"
        )
    return {n: layers[n.removeprefix(lead)] if n.startswith(lead) else last for n in names}


def _outermost(module: nn.Module, method: str) -> tuple[str, nn.Module | None]:
    """The first part that has the method, and what its parameters' names begin with."""
    parts = ((name, part) for name, part in module.named_modules() if hasattr(part, method))
    name, part = next(parts, ("", None))
    return f"{name}.".lstrip("."), part


def freeze(network: nn.Module, parts: Sequence[str]) -> list[nn.Module]:
    """Take all parameters below ``parts`` out of training; returns the modules frozen whole.

    A part is a parameter's name or its beginning, up to a dot: ``layers.1`` is not ``layers.10``.
    Raises: ValueError for a part that is not there, or if nothing is left to train.
    """
    if isinstance(parts, str) or not all(parts):
        raise ValueError(f"freeze is a list of names such as ['tokens'], got {parts!r}")
    if not parts:
        return []
    named = dict(network.named_parameters(remove_duplicate=False))
    known = {path for name in named for path in accumulate(name.split("."), "{}.{}".format)}
    for part in parts:
        if part not in known:
            near = did_you_mean(part, known) or "; the parts are " + ", ".join(
                name for name, _ in network.named_children()
            )
            raise ValueError(f"nothing to freeze is called {part!r}{near}")
    below = tuple(f"{part}." for part in parts)
    frozen = {parameter for name, parameter in named.items() if f"{name}.".startswith(below)}
    if not any(p.requires_grad and p not in frozen for p in named.values()):
        raise ValueError(f"freeze={list(parts)} leaves nothing to train")
    for parameter in frozen:
        parameter.requires_grad_(False)
    owned = ((module, set(module.parameters())) for module in network.modules())
    return [module for module, own in owned if own and own <= frozen]


def adamw(
    module: nn.Module, lr: float, weight_decay: float, layer_decay: float | None = None
) -> Optimizer:
    """AdamW over `parameter_groups`."""
    return AdamW(parameter_groups(module, weight_decay, layer_decay), lr=lr)


def regroup(state: dict, groups: Sequence[dict]) -> None:
    """Bring the stored ``state`` of an `adamw` to the groups of another, by parameters' names.

    What has become trainable begins without moments; what is frozen now loses them. The state of
    any other optimizer is left as it is.
    """
    if not _is_ours(state):
        return
    old = state["param_groups"]
    moments = {name: state["state"].get(index) for name, index in _indices(state)}
    state["param_groups"], count = [], 0
    for group in groups:
        told = {key: value for key, value in group.items() if key != "params"}
        indices = list(range(count, count + len(group["params"])))
        state["param_groups"].append({**old[0], **told, "params": indices})
        count += len(indices)
    state["state"] = {
        index: moments[name] for name, index in _indices(state) if moments.get(name) is not None
    }


def _is_ours(state: dict) -> bool:
    return all("param_names" in g and "lr_scale" in g for g in state["param_groups"])


def _indices(state: dict) -> list[tuple[str, int]]:
    groups = state["param_groups"]
    return [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]


def resize_moments(module: nn.Module, state: dict, weights: Mapping[str, Tensor]) -> None:
    """Take the moments of tables in a stored ``state`` of an `adamw` to the grids of ``module``.

    First moments go the way of the tables themselves, second ones bilinearly. Those of a timm
    backbone come from the image size that is stored with its ``weights``.
    """
    if not _is_ours(state):
        return
    indices = dict(_indices(state))
    for path, part in module.named_modules():
        if isinstance(part, Backbone):
            size = part.stored_size(weights, f"{path}.".lstrip("."))
            for table, take in (part.resized_from(size) if size is not None else {}).items():
                moments = state["state"].get(indices.get(f"{path}.{table}".lstrip(".")), {})
                for name, moment in moments.items():
                    if isinstance(moment, Tensor) and moment.ndim:
                        moments[name] = take(moment, positive=name.endswith("_sq"))
        if not isinstance(part, TableEncoding | RelativePositionBias):
            continue
        # no weight of a bilinear filter is negative, so second moments stay above 0
        second = replace(part.resampling, mode="bilinear", cubic=None)
        for table in part.tables:
            moments = state["state"].get(indices.get(f"{path}.{table}".lstrip(".")), {})
            for name, moment in moments.items():
                if isinstance(moment, Tensor) and part.fits(moment, table):
                    how = second if name.endswith("_sq") else None
                    moments[name] = part.resized(moment, table, how)


class WarmupCosine(CosineLRScheduler):
    """A linear warm-up over a fraction of all steps, then a cosine to zero, by optimizer step.

    The rate is a closed form of the step, and the step is all the state there is: a resumed run
    continues exactly, and one that is resumed with another rate or length obeys these.
    Raises: ValueError for a fraction outside [0, 1).
    """

    def __init__(self, optimizer: Optimizer, steps: int, warmup: float) -> None:
        if not 0 <= warmup < 1:
            raise ValueError(
                f"warmup is a fraction of all steps, at least 0 and below 1, got {warmup}"
            )
        rising = int(warmup * steps)
        lr = optimizer.param_groups[0]["lr"]
        self.updates = 0
        super().__init__(
            optimizer,
            t_initial=max(1, steps - rising),
            warmup_t=rising,
            warmup_prefix=True,
            warmup_lr_init=lr / max(1, rising),
            t_in_epochs=False,
        )

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Set the rate for the step after ``num_updates``."""
        self.updates = num_updates
        super().step_update(num_updates, metric)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_update(state_dict["updates"])
