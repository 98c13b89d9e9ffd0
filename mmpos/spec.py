"""An encoding as plain data, and back.

The data are those that a configuration file holds: ``class_path`` and ``init_args``. Learned
numbers are not among them; they are the encoding's ``state_dict()``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Spec = dict[str, Any]


class Specified:
    """Something made from a few plain arguments, each of which it keeps under its own name.

    Raises: TypeError for a number, a word or a truth value where another of these is expected.
    """

    def __new__(cls, *args: Any, **kwargs: Any):
        known = _parameters(cls)
        names = [name for name, each in known.items() if each.kind is not each.KEYWORD_ONLY]
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            hint = _hints(cls).get(name, Any)
            if name != "axes" and not _fits(value, hint):  # `axis_count` says what axes are
                raise TypeError(f"{cls.__name__} takes {name} as {_named(hint)}, got {value!r}")
        return super().__new__(cls)

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
        for name, parameter in _parameters(type(self)).items():
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
    known = list(_parameters(cls))
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"{spec['class_path']} has no argument {name!r}: {hint}")
    try:
        inspect.signature(cls.__init__).bind(None, **arguments)
    except TypeError as missing:
        raise ValueError(f"{spec['class_path']}: {missing}") from None
    return cls(**{name: _rebuilt(value) for name, value in arguments.items()})


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The arguments of a class that have names."""
    found = list(inspect.signature(cls.__init__).parameters.values())[1:]
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name: each for each in found if each.kind not in unnamed}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's arguments; none where its annotations name what is not there."""
    try:
        return get_type_hints(cls.__init__)
    except (NameError, TypeError, AttributeError):
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a type; what is not plain is left to the class itself."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) or value in parts
    if kind in (list, tuple, Sequence):
        if isinstance(value, str | int | float | None):
            return False
        several = kind is not tuple or parts[1:] == (...,)
        if not isinstance(value, list | tuple) or not parts or not several:
            return True
        return all(_fits(each, parts[0]) for each in value)
    if hint is bool:
        return not isinstance(value, str | int | float) or isinstance(value, bool)
    if hint is int:
        return not isinstance(value, str | float | bool | list | tuple | None)
    if hint is float:
        return not isinstance(value, str | bool | list | tuple | None)
    if hint is NoneType:
        return value is None
    if hint is str:
        return not isinstance(value, bool | int | float | None)
    return True


def _named(hint: Any) -> str:
    """A type as it is written."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_named(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(part) for part in get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}
    if get_origin(hint) in (list, tuple, Sequence):
        item = get_args(hint)[0]
        parts = get_args(item) if get_origin(item) in (Union, UnionType) else (item,)
        each = [f"{name[2:]}s" if name.startswith("a ") else name for name in map(_named, parts)]
        return f"a list of {' and '.join(each)}"
    return names.get(hint) or getattr(hint, "__name__", str(hint))


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
