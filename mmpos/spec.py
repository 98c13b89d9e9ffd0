"""An encoding as plain data, and back.

The data are those that a configuration file holds: ``class_path`` and ``init_args``. Learned
numbers are not among them; they are the encoding's ``state_dict()``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

Spec = dict[str, Any]


class Specified:
    """Something made from a few plain arguments, each of which it keeps under its own name."""

    @property
    def neutral(self) -> bool:
        """Whether it is what None stands for in the place of such a thing."""
        return False

    def spec(self) -> Spec:
        """``class_path`` and ``init_args``: JSON data from which `mmpos.build` makes the like.

        Arguments that have their default value are left out.

        >>> mmpos.RotaryEncoding(64, axes=2).spec()
        {'class_path': 'mmpos.RotaryEncoding', 'init_args': {'head_dim': 64, 'axes': 2}}
        """
        arguments = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            default = parameter.default
            same = default is None and isinstance(value, Specified) and value.neutral
            if default is parameter.empty or not (same or value == default):
                arguments[name] = _plain(value)
        return {"class_path": _public_path(type(self)), "init_args": arguments}


def build(spec: Mapping[str, Any]) -> Any:
    """Make what ``spec`` describes, and what its arguments describe.

    Only classes that have a `spec` are made, so that data from elsewhere cannot call anything else.

    >>> mmpos.build(mmpos.ALiBi(8).spec())
    ALiBi(heads=8, axes=1, distance=euclidean)

    Raises: ValueError for other keys, a class that is not there, or arguments that it does not
    take; TypeError for a class that has no spec.
    """
    if not isinstance(spec, Mapping) or set(spec) - {"init_args"} != {"class_path"}:
        raise ValueError(f"a spec has class_path and init_args, got {spec!r}")
    cls = _find(str(spec["class_path"]))
    arguments = spec.get("init_args") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"init_args are names with values, got {arguments!r}")
    if inspect.isabstract(cls):
        raise TypeError(f"{spec['class_path']} is a kind of encoding: name one of that kind")
    known = list(inspect.signature(cls).parameters)
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"{spec['class_path']} has no argument {name!r}: {hint}")
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as missing:
        raise ValueError(f"{spec['class_path']}: {missing}") from None
    return cls(**{name: _rebuilt(value) for name, value in arguments.items()})


def _find(path: str) -> type:
    module, _, name = path.rpartition(".")
    try:
        found = importlib.import_module(module)
        cls = getattr(found, name)
    except (ImportError, AttributeError, ValueError):
        within = module if module in ("mmpos.frequencies", "mmpos.coordinates") else "mmpos"
        known = importlib.import_module(within)
        names = {own.lower(): own for own in getattr(known, "__all__", dir(known))}
        near = difflib.get_close_matches(name.lower(), list(names), 1)
        hint = f", did you mean {within}.{names[near[0]]}?" if near else ""
        raise ValueError(f"there is no class {path!r}{hint}") from None
    if not (isinstance(cls, type) and issubclass(cls, Specified)):
        raise TypeError(f"{path} is not an encoding or a part of one: it has no spec")
    return cls


def _public_path(cls: type) -> str:
    """The shortest path under which the class is importable."""
    parts = cls.__module__.split(".")
    for depth in range(1, len(parts)):
        short = ".".join(parts[:depth])
        if getattr(importlib.import_module(short), cls.__name__, None) is cls:
            return f"{short}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, Specified):
        return value.spec()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is no plain data, and has no spec")


def _rebuilt(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value)
    if isinstance(value, tuple | list):
        return tuple(_rebuilt(item) for item in value)
    return value
