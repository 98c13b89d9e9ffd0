"""One line for a class that a setting names and that cannot be imported."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import ModuleType
from typing import Any, get_args, get_origin

from tasks import configs, summary
from tasks.configs import Given

ROOTS = ("mmpos", "tasks", "lightning", "torch", "timm")


def describe(error: BaseException, path: str, given: list[Given]) -> str | None:
    """The line for an error of importing what ``path`` names; None for any other error."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        parent = error.obj.__name__
        # classes last: `nearest` ignores case, and takes the last of equal names
        names = sorted(dir(error.obj), key=lambda name: name[0].isupper())
        line = _unknown(f"{parent}.{error.name}", "class", [f"{parent}.{n}" for n in names], given)
    elif isinstance(error, ModuleNotFoundError) and error.name:
        names = _modules(error.name.rpartition(".")[0])
        line = _unknown(error.name, "module", names, given)
    else:
        line = None
    return line or _failed(error, path, given)


def of_another_kind(value: str, hint: Any, path: str, given: list[Given]) -> str | None:
    """The line for a dotted name where ``hint`` wants a class, or what makes one, of some kinds.

    jsonargparse says no more of a place that takes several types than what these are.
    """
    kinds = list(dict.fromkeys(made(hint)))
    module, _, name = value.rpartition(".")
    if not kinds or not module or not value.replace(".", "").isidentifier():
        return None
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return describe(error, path, given)
    what = "a class" if isinstance(found, type) else type(found).__name__
    return (
        f"{configs.place_of(path, given, value)}: {value} is {what} of another kind than "
        f"{' or '.join(kinds)}"
    )


def made(hint: Any) -> Iterator[str]:
    """The names of the classes of what callables in a type give."""
    if get_origin(hint) is Callable:
        result = get_args(hint)[-1]
        for kind in get_args(result) or (result,):
            if isinstance(kind, type) and kind.__module__.startswith("mmpos."):
                yield kind.__name__
    else:
        for inner in get_args(hint):
            yield from made(inner)


def _unknown(missing: str, kind: str, names: list[str], given: list[Given]) -> str | None:
    named = [s for s in given if s.value == missing or s.value.startswith(missing + ".")]
    if not named:
        return None
    near = configs.nearest(missing, names)
    hint = f"; did you mean {near}{named[-1].value[len(missing) :]}?" if near else ""
    return f"{configs.place(named[-1])}: no such {kind}: {missing}{hint}"


def _failed(error: BaseException, path: str, given: list[Given]) -> str | None:
    """The line for what a module raised while jsonargparse's `import_object` imported it."""
    frames = list(walk_tb(error.__traceback__))
    names = [f.f_locals["name"] for f, _ in frames if f.f_code.co_name == "import_object"]
    if not names:
        return None
    last, line = frames[-1]
    file, reason = last.f_code.co_filename, f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        file, line, reason = error.filename or file, error.lineno, f"SyntaxError: {error.msg}"
    elif last.f_globals.get("__name__", "").startswith("jsonargparse"):
        return None
    named = next((s for s in reversed(given) if s.value == names[-1]), None)
    place = configs.place(named) if named else path
    return f"{place}: importing {names[-1]} failed: {reason} ({summary.relative(file)}:{line})"


def _modules(parent: str) -> list[str]:
    package = sys.modules.get(parent)
    if package:
        return [f"{parent}.{m.name}" for m in pkgutil.iter_modules(package.__path__)]
    return [*ROOTS, *(m.name for m in pkgutil.iter_modules([os.getcwd()]))]


def unknown_short_name(name: str, path: str, given: list[Given]) -> str:
    """The line for a class that is named without its module, and is none of Lightning's."""
    import lightning.pytorch.callbacks
    import lightning.pytorch.loggers

    import mmpos
    import tasks
    import tasks.data

    modules = (mmpos, tasks, tasks.data, lightning.pytorch.callbacks, lightning.pytorch.loggers)
    full = {n: f"{m.__name__}.{n}" for m in reversed(modules) for n in dir(m) if n[0].isupper()}
    near = full.get(configs.nearest(name, full) or "")
    hint = f"; did you mean {near}?" if near else " (classes are named with their module)"
    return f"{configs.place_of(path, given, name)}: no such class: {name}{hint}"
