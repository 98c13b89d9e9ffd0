"""What a model is told of its data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule

from tasks import configs, errors
from tasks.configs import CommandError

if TYPE_CHECKING:
    from tasks.lightning_cli import Command


def from_data(command: Command, name: str) -> Callable[[LightningDataModule], Any]:
    """A link's function: from the datamodule to what the model gets as ``name``."""

    def linked(data: LightningDataModule) -> Any:
        model = command._get(command.config, "model")
        init_args = model.get("init_args", Namespace())
        asked = init_args.get(name)
        typed = configs.last(f"model.{name}", command.given) is not None
        recorded = command.recorded.linked if command.recorded else {}
        if not hasattr(type(data), name) and not hasattr(data, name):
            if name in recorded and not typed:  # of a model whose data does not give it
                return recorded[name]
            if name in init_args and not typed and _required(model.class_path, name):
                raise CommandError(
                    f"{model.class_path} needs {name}, and {type(data).__name__} has no "
                    f"attribute of this name: add one, or give --model.{name}"
                )
            return asked
        if command.subcommand == "predict" and name in recorded:
            value = recorded[name]  # what was trained on need not be at hand
        else:
            value = getattr(data, name)
        if typed and _tuples(asked) != _tuples(value):
            raise CommandError(errors.from_data(name, asked), 2)
        return value

    return linked


def _required(class_path: str, name: str) -> bool:
    parameters = inspect.signature(resolve_name(class_path)).parameters
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def _tuples(value: Any) -> Any:
    value = value.as_dict() if isinstance(value, Namespace) else value
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
