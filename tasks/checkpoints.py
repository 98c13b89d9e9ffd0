"""What a checkpoint recorded about its run: read as the lowest layer of settings, and compared."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tasks.checkpoint_io import check
from tasks.configs import CommandError
from tasks.shards import check_shards, is_sharded, rest

SPECIAL = ("last", "best", "hpc", "registry")  # Lightning finds the file itself


class Recorded(NamedTuple):
    """Settings of a checkpoint: ``settings`` as a config file would give them, by ``model``,
    ``data``, ``trainer`` and ``seed_everything``; ``text``, the same as YAML; ``linked``, the
    values that its model had from its data.
    """

    settings: dict[str, Any]
    text: str
    linked: dict[str, Any]


def is_file(path: str) -> bool:
    """Whether ``path`` should be a file, or a folder of shards, here: not a name that Lightning
    resolves, nor remote.
    """
    special = path.partition(":")[0] in SPECIAL or "://" in path
    return path not in ("", "null") and not special


def recorded(path: str, linked_names: tuple[str, ...], *, trainer: bool) -> Recorded:
    """Reads what the command stored in the checkpoint ``path``: the hyper-parameters of model and
    data and, if ``trainer``, its settings and the seed too.

    ``model.weights`` is left out: a checkpoint has its own weights.

    Raises: CommandError for a file that is missing, damaged, or no Lightning checkpoint.
    """
    content = _load(path)
    try:
        return _settings(content, linked_names, trainer=trainer)
    except (TypeError, ValueError, AttributeError, yaml.YAMLError):  # no command has written it
        return Recorded({}, "", {})


def _settings(content: Mapping, linked_names: tuple[str, ...], *, trainer: bool) -> Recorded:
    settings: dict[str, Any] = {}
    linked: dict[str, Any] = {}
    for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        values = dict(content.get(key) or {})
        class_path = values.pop("_class_path", None)
        values.pop("_instantiator", None)
        if section == "model":
            linked = {name: values.pop(name) for name in linked_names if name in values}
            values.pop("weights", None)
        if class_path:
            settings[section] = {"class_path": class_path, "init_args": values}
    if trainer and content.get("mmpos_trainer"):
        settings["trainer"] = dict(content["mmpos_trainer"])
    if trainer:
        settings |= content.get("mmpos_command", {})
    return Recorded(settings, yaml.safe_dump(settings) if settings else "", linked)


def architecture(path: str) -> str:
    """The class and network of the task that the weights in ``path`` are of, as YAML.

    Empty for weights without hyper-parameters of the command; what is wrong with the file is told
    where the weights are loaded.
    """
    try:
        if is_sharded(path):
            content = rest(Path(path))
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        settings = dict(content["hyper_parameters"])
        names = ("transformer", "backbone", "tokens", "frames_to_tokens", "layout")
        names += ("extension", "ticks", "pool", "tied")
        parts = {name: settings[name] for name in names if name in settings}
        of_data = content.get("datamodule_hyper_parameters", {})
        if settings.get("patch_size") is not None and "patch_size" not in of_data:
            parts["patch_size"] = settings["patch_size"]
        model = {"class_path": settings["_class_path"], "init_args": parts}
        return yaml.safe_dump({"model": model})
    except Exception:  # of a file of something else, torch raises anything
        return ""


def _load(path: str) -> Mapping[str, Any]:
    if is_sharded(path):
        return _rest(path)
    if Path(path).is_dir():
        raise CommandError(f"--ckpt_path {path}: a folder, expected a checkpoint file")
    if not Path(path).is_file():
        raise CommandError(f"--ckpt_path {path}: no such file")
    try:
        check(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file of something else, torch raises anything
        if isinstance(error, UnpicklingError) and zipfile.is_zipfile(path):
            raise CommandError(
                f"--ckpt_path {path}: holds Python objects, expected a checkpoint of tensors and "
                "plain settings (if you trust it, give the whole job and --weights_only false)"
            ) from error
        raise CommandError(f"--ckpt_path {path}: not a checkpoint, or a damaged one") from error
    if not isinstance(content, Mapping) or "pytorch-lightning_version" not in content:
        raise CommandError(
            f"--ckpt_path {path}: not a checkpoint of a run; "
            f"to begin with its weights use --model.weights {path}"
        )
    return content


def _rest(path: str) -> Mapping[str, Any]:
    try:
        check_shards(path)
        return rest(Path(path))
    except ValueError as error:
        raise CommandError(f"--ckpt_path {path}: {error}") from error


def fault(path: str) -> str:
    """What is wrong with a checkpoint, "" for one that is whole."""
    try:
        content = _load(path)
    except CommandError as error:
        return str(error).removeprefix("--ckpt_path ")
    if "optimizer_states" not in content and not is_sharded(path):
        return f"{path}: holds weights alone (save_weights_only)"
    return ""


def best(trainer: Trainer) -> str:
    """Path of the best checkpoint of a fit: of the first callback that monitors something, else of
    the first; "" if there is none.
    """
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    callbacks.sort(key=lambda callback: callback.monitor is None)
    paths = [path for c in callbacks[:1] for path in (c.best_model_path, c.last_model_path)]
    return next((path for path in paths if path and Path(path).exists()), "")


def newest(trainer: Trainer) -> str:
    """Path of the checkpoint that a fit saved last; "" if there is none."""
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    paths = [path for c in callbacks for path in (c.best_model_path, c.last_model_path)]
    return max((p for p in paths if p and Path(p).exists()), key=os.path.getmtime, default="")


def differences(old: Any, new: Any, path: str = "model") -> Iterator[str]:
    """A line for each setting in which ``new`` departs from what a checkpoint recorded."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if old.get("class_path") == new.get("class_path"):
            yield from _by_key(old, new, path)
        else:
            yield f"{path}: checkpoint {_short(old)}, now {_short(new)} (what you gave wins)"
    elif _plain(old) != _plain(new):
        yield f"{path}: checkpoint {_short(old)}, now {_short(new)} (what you gave wins)"


def _by_key(old: Mapping, new: Mapping, path: str) -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        inner = path if key in ("init_args", "dict_kwargs") else f"{path}.{key}"
        if key in old and key in new:
            yield from differences(old[key], new[key], inner)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        inner = ", ".join(f"{k}={_short(v)}" for k, v in (value.get("init_args") or {}).items())
        return f"{value['class_path'].rpartition('.')[2]}({inner})"
    return "null" if value is None else str(value)
