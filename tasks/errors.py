"""From an exception of the parser, of building or of reading data to one line for the user."""

import argparse
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from traceback import walk_tb
from types import ModuleType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from tasks import configs
from tasks.configs import CommandError, Given

LINKED = ("classes", "image_size", "patch_size", "channels")  # the model's, given by its data
MISTAKES = (ValueError, TypeError, OSError, MisconfigurationException)


class ParseError(argparse.ArgumentError):
    """What the parser ``parser`` could not accept; the cause says why."""

    def __init__(self, message: str, parser: "Parser") -> None:
        super().__init__(None, message)
        self.parser = parser


class Parser(LightningArgumentParser):
    """A parser that raises `ParseError` where others print their usage and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raises ParseError."""
        raise ParseError(message, self) from ex

    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        """Parses ``args``; a ``null`` for a class's own setting stays null.

        jsonargparse passes it on to the class's parser as ``--name=None``, a string.
        """
        if args and len(args) == 1 and args[0].endswith("=None"):
            args = [args[0].removesuffix("None") + "null"]
        return super().parse_args(args, *rest, **kwargs)


def describe(error: ParseError, given: list[Given], command: str, others: list[str]) -> str:
    """One line for what the parser did not accept: the setting, what is wrong, the nearest name."""
    chain = list(_chain(error))
    failed = [e for e in chain if isinstance(e, ParseError)]
    messages = dict.fromkeys(str(e) for e in failed)  # argparse raises one message several times
    keys = [k for m in messages for k in re.findall(r'\AParser key "([^"]+)"', m)]
    path = ".".join(keys)
    parser, root, message = failed[-1].parser, chain[-1], str(failed[-1])
    asked = find(path, given)
    if asked and asked.path in {f"model.{name}" for name in LINKED}:
        return from_data(asked.path.removeprefix("model."), asked.value)

    for e in reversed(chain):
        if isinstance(e, AttributeError | ModuleNotFoundError) and e.name:
            return _unknown_class(e, path, given)
    if found := re.search(r"Expected a dot import path string: (\S+)", str(root)):
        return _unknown_short_name(found[1], path, given)
    if found := re.search(r"Expected '(.+)' to be a subclass of <class '(.+)'>", str(root)):
        return f"{_place(path, given, found[1])}: {found[1]} is not a {found[2]}"
    if found := re.search(r"option '([^']+)'", message, re.IGNORECASE):
        of_command: Parser | None = getattr(root, "subcommand_parser", None)
        return _unknown_key(found[1], keys, of_command or parser, given)
    if message.startswith("unrecognized arguments: "):
        return _unrecognized(message.split()[2], parser)
    if message.startswith("the following arguments are required: "):
        return _required(message.partition(": ")[2], path, command)
    if message.endswith("expected one argument"):
        return f"{_without_value(others)} needs a value"
    if path and message.startswith("Parser key"):
        return _wrong_value(path, root, parser, given)
    return f"{path}: {root}" if path else str(root)


def from_data(name: str, value: object) -> str:
    """The line for a value that the model was given where its data decides."""
    return f"model.{name} comes from the data: use --data.{name} {value}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def find(path: str, given: list[Given], value: str | None = None) -> Given | None:
    """The last setting with the leaf of ``path`` below its other levels, in their order."""
    keys = path.split(".")

    def fits(setting: Given) -> bool:
        levels = iter(setting.path.split("."))
        same_leaf = setting.path.rpartition(".")[2] == keys[-1]
        within = all(key in levels for key in keys)
        return same_leaf and within and (value is None or setting.value == value)

    return next((setting for setting in reversed(given) if fits(setting)), None)


def _place(path: str, given: list[Given], value: str | None = None) -> str:
    setting = find(path, given, value)
    if setting is None:
        return path
    return setting.path + (f" ({setting.where})" if setting.where else "")


def _unknown_class(
    error: AttributeError | ModuleNotFoundError, path: str, given: list[Given]
) -> str:
    if isinstance(error, AttributeError):
        module = error.obj
        missing = f"{getattr(module, '__name__', '')}.{error.name}"
        names = (
            [f"{module.__name__}.{name}" for name in dir(module)]
            if isinstance(module, ModuleType)
            else []
        )
        what = "no such class"
    else:
        missing, what = str(error.name), "no such module"
        names = _modules(missing.rpartition(".")[0])
    named = [s for s in given if s.value == missing or s.value.startswith(missing + ".")]
    if not named:
        asked = find(path, given)
        return f"{_place(path, given)}: importing {asked.value if asked else ''} failed: {error}"
    near = configs.nearest(missing, names)
    hint = f"; did you mean {near}{named[-1].value[len(missing) :]}?" if near else ""
    place = named[-1].path + (f" ({named[-1].where})" if named[-1].where else "")
    return f"{place}: {what}: {missing}{hint}"


def _modules(parent: str) -> list[str]:
    package = sys.modules.get(parent)
    prefix = f"{parent}." if parent else ""
    return [prefix + m.name for m in pkgutil.iter_modules(package.__path__ if package else None)]


def _unknown_short_name(name: str, path: str, given: list[Given]) -> str:
    import lightning.pytorch.callbacks
    import lightning.pytorch.loggers

    import mmpos
    import tasks
    import tasks.data

    modules = (mmpos, tasks, tasks.data, lightning.pytorch.callbacks, lightning.pytorch.loggers)
    full = {n: f"{m.__name__}.{n}" for m in reversed(modules) for n in dir(m) if n[0].isupper()}
    near = full.get(configs.nearest(name, full) or "")
    hint = f"; did you mean {near}?" if near else " (classes are named with their module)"
    return f"{_place(path, given, name)}: no such class: {name}{hint}"


def _unknown_key(
    key: str, keys: list[str], parser: argparse.ArgumentParser, given: list[Given]
) -> str:
    prefix = ".".join(keys)
    place = _place(f"{prefix}.{key}".lstrip("."), given)
    names = {a.dest for a in parser._actions if not a.dest.startswith(("print_", "help", "config"))}
    names = {n for n in names if not n.endswith(".help") and n not in LINKED}
    if not names:
        section = prefix or key.partition(".")[0]
        return (
            f"{section} has settings but no class: give a whole job first, such as --config image"
        )
    near = configs.nearest(key, names)
    if near:
        return f"{place}: no such setting; did you mean {near}?"
    top = sorted({name.split(".")[0] for name in names})
    return f"{place}: no such setting (there are: {', '.join(top)})"


def _unrecognized(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}: settings are --name value"
    flag = argument.partition("=")[0]
    return f"{flag}: no such option{configs.did_you_mean(flag, parser._option_string_actions)}"


def _required(names: str, path: str, command: str) -> str:
    missing = [name.removeprefix(f"{command}.") for name in names.split(", ")]
    if path:
        return f"{path}: a value is needed for {', '.join(missing)}"
    return (
        f"no {' and no '.join(missing)} class is given: name a whole job first, such as "
        "--config image (mmpos configs lists them)"
    )


def _without_value(others: list[str]) -> str:
    for arg, following in zip(others, [*others[1:], "--"], strict=True):
        if arg.startswith("--") and "=" not in arg and following.startswith("--"):
            return arg
    return "an option"


def _wrong_value(
    path: str, root: BaseException, parser: argparse.ArgumentParser, given: list[Given]
) -> str:
    setting = find(path, given)
    if path in ("model", "data") or setting is None:
        reason = str(root).partition("\n")[0].partition(". Got value: ")[0]
        return f"{path}: {reason}"
    leaf = path.rpartition(".")[2]
    actions = [a for a in parser._actions if a.dest in (leaf, path)]
    hint = getattr(actions[0], "_typehint", None) if actions else None
    near = configs.did_you_mean(setting.value, map(str, _choices(hint)))
    return f"{_place(path, given)}: expected {_type_name(hint)}, got {setting.value!r}{near}"


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for inner in get_args(hint) for choice in _choices(inner)]


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return re.sub(r"\b(?:typing|collections\.abc)\.", "", str(hint))


def early(error: Exception, given: list[Given]) -> CommandError | None:
    """One line for an error before the first batch, or None for what is no user's mistake."""
    told = next((e for e in _chain(error) if isinstance(e, CommandError)), None)
    if told:
        return told
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        lines = [line.strip() for line in str(error).splitlines()[1:3]]
        return CommandError(
            f"the checkpoint does not fit the model: {' '.join(lines)} (leave out the settings in "
            "which they differ, or begin a new run from its weights: --model.weights)"
        )
    # jsonargparse wraps what a constructor raises in a list of all that the type might have been
    raised = (e for e in _chain(error) if not _modules_of(e)[-1].startswith("jsonargparse"))
    cause = next(raised, error)
    if not isinstance(cause, MISTAKES):
        return None
    accelerator = configs.last("trainer.accelerator", given)
    asked = accelerator.value if accelerator else "auto"
    if isinstance(cause, MisconfigurationException) and asked not in ("auto", "cpu"):
        reason = str(cause).rstrip("!. ")
        return CommandError(f"{reason}; without a GPU use --trainer.accelerator cpu")
    return data(cause) or CommandError(str(cause) or type(cause).__name__)


def _modules_of(error: BaseException) -> list[str]:
    """The modules that ``error`` came through, from the outermost to the one that raised it."""
    frames = walk_tb(error.__traceback__)
    return [frame.f_globals.get("__name__", "") for frame, _ in frames] or [""]


def data(error: BaseException) -> CommandError | None:
    """One line for bad input found while reading data, or None for any other error."""
    if not isinstance(error, ValueError | OSError):
        return None
    if not any(name.startswith("torch.utils.data") for name in _modules_of(error)):
        return None
    last = str(error).strip().splitlines()[-1]  # a worker process sends its traceback as text
    return CommandError(re.sub(r"\A\w*(?:Error|Exception): ", "", last))
