"""What of a run's settings is its encoding, what its seeds, and a hash of all the rest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]
Leaves = dict[Path, str]
"""Settings by their path, their values as JSON."""

_NETWORK = ("model", "init_args", "transformer", "init_args")
ENCODING: tuple[Path, ...] = (
    *((*_NETWORK, name) for name in ("additive", "rotary", "bias")),
    (*_NETWORK, "per_layer"),  # which of the slots have an encoding for each layer
    ("model", "init_args", "extension"),
)
"""The settings that an ablation changes."""
SEEDS: tuple[Path, ...] = (("seed_everything",), ("data", "init_args", "seed"))
"""Those that repeat a run."""
_TOLD: tuple[Path, ...] = (
    ("trainer", "logger"),
    ("trainer", "default_root_dir"),
    ("trainer", "callbacks", "*", "init_args", "dirpath"),
    ("trainer", "enable_progress_bar"),
    ("trainer", "enable_model_summary"),
    ("trainer", "log_every_n_steps"),
)
"""Those that say where and how a run is told of."""
_OPTIMIZER = {"lr", "weight_decay", "warmup", "layer_decay", "ema", "freeze"}
_OPTIMIZER |= {"gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches"}
_AMOUNT = {"max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"}
_AMOUNT |= {"limit_train_batches", "train_tokens", "train_samples"}


def fingerprint(config: Mapping[str, Any]) -> str:
    """A hash of what makes a run, but for its encoding, its seeds and where it is written.

    The order of names makes no difference, nor whether a name is absent, null or empty, nor 1 or
    1.0.

    >>> one = {"model": {"init_args": {"lr": 0.1, "extension": None}}, "seed_everything": 0}
    >>> two = {"model": {"init_args": {"extension": {"class_path": "YaRN"}, "lr": 0.1}}}
    >>> fingerprint(one) == fingerprint(two)
    True
    """
    text = json.dumps(sorted(recipe(config).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first setting that two runs may not differ in and do, and how many more there are; None
    where their fingerprints are the same.

    >>> difference({"model": {"init_args": {"lr": 0.1}}}, {"model": {"init_args": {"lr": 0.2}}})
    'the optimizer: model.init_args.lr is 0.1 and 0.2'
    """
    first, second = recipe(one), recipe(other)
    paths = differing([first, second])
    if not paths:
        return None
    values = " and ".join(leaves.get(paths[0], "null") for leaves in (first, second))
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return f"the {_part(paths[0])}: {'.'.join(paths[0])} is {values}{more}"


def recipe(config: Mapping[str, Any]) -> Leaves:
    """The settings that must be the same."""
    aside = (*ENCODING, *SEEDS, *_TOLD)
    return _kept(config, lambda path: not any(_begins(path, known) for known in aside))


def encoding(config: Mapping[str, Any]) -> Leaves:
    """The settings of the encoding."""
    return _kept(config, lambda path: any(_begins(path, known) for known in ENCODING))


def seed(config: Mapping[str, Any]) -> str:
    """The seed of the weights, and that of the data where it is another.

    >>> seed({"seed_everything": 3, "data": {"init_args": {"seed": 3}}})
    '3'
    """
    first, other = (_at(config, path) for path in SEEDS)
    return str(first) if other in (None, first) else f"{first}, data {other}"


def labels(encodings: Sequence[Leaves]) -> list[str]:
    """Encodings by their classes, with those arguments that tell them apart where classes do not.

    >>> rotary = ("model", "init_args", "transformer", "init_args", "rotary")
    >>> labels([{}, {rotary: '"mmpos.RotaryEncoding"'}])
    ['none', 'RotaryEncoding']
    """
    short = [_classes(each) for each in encodings]
    out = []
    for name, leaves in zip(short, encodings, strict=True):
        like = [each for brief, each in zip(short, encodings, strict=True) if brief == name]
        told = [f"{path[-1]}={leaves.get(path, 'null')}" for path in differing(like)]
        out.append(f"{name} ({', '.join(told)})" if told else name)
    return out


def spelt(leaves: Leaves) -> str:
    """An encoding with all that is given of it."""
    told = []
    for path, value in sorted(leaves.items()):
        place = next(known for known in ENCODING if _begins(path, known))
        inner = [name for name in path[len(place) - 1 :] if name not in ("class_path", "init_args")]
        told.append(f"{'.'.join(inner)}={value}")
    return ", ".join(told) or "none"


def differing(settings: Sequence[Leaves]) -> list[Path]:
    """The paths, in order, at which not all have the same value."""
    paths = sorted(set().union(*settings))
    return [path for path in paths if len({each.get(path) for each in settings}) > 1]


def _classes(leaves: Leaves) -> str:
    """What is in each slot, by name, in the order of the slots."""
    names = []
    for place in ENCODING:
        for path, value in sorted(leaves.items()):
            inner = path[len(place) :] if _begins(path, place) else ("init_args",)
            if "init_args" not in inner and place[-1] != "per_layer":
                names.append(json.loads(value) if value.startswith('"') else value)
    return " + ".join(str(name).rpartition(".")[2] for name in names) or "none"


def _kept(config: Mapping[str, Any], keeps: Any) -> Leaves:
    leaves = {path: _plain(value) for path, value in _leaves(config, ())}
    return {
        path: json.dumps(value, ensure_ascii=False)
        for path, value in leaves.items()
        if value is not None and keeps(path)
    }


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(number)))
    else:
        yield path, value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _begins(path: Path, known: Path) -> bool:
    return len(path) >= len(known) and all(
        wanted in ("*", name) for name, wanted in zip(path, known, strict=False)
    )


def _at(config: Any, path: Path) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _part(path: Path) -> str:
    """Which of what must be fixed a setting belongs to."""
    if _OPTIMIZER & set(path[1:]):
        return "optimizer"
    if _AMOUNT & set(path[1:]):
        return "amount of training"
    return {"model": "model", "data": "data", "trainer": "training"}.get(path[0], "command")
