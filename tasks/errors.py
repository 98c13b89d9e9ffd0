"""From an exception of the parser to one line for the user."""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from tasks import configs, imports
from tasks.configs import CommandError, Given

# the model's, given by its data
LINKED = (
    *("classes", "multilabel", "image_size", "patch_size", "channels", "bins", "frames", "step"),
    *("vocabulary", "context"),
)


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
    causes = list(chain(error))
    failed = [e for e in causes if isinstance(e, ParseError)]
    messages = dict.fromkeys(str(e) for e in failed)  # argparse raises one message several times
    keys = [k for m in messages for k in re.findall(r'\AParser key "([^"]+)"', m)]
    path = ".".join(keys)
    parser, root, message = failed[-1].parser, causes[-1], str(failed[-1])
    asked = configs.find(path, given)
    own = path.endswith("patch_size") and _has_patches(given)
    if asked and not own and asked.path in {f"model.{name}" for name in LINKED}:
        return from_data(asked.path.removeprefix("model."), asked.value)

    for e in reversed(causes):
        if line := imports.describe(e, path, given):
            return line
    if found := re.search(r"Expected a dot import path string: (\S+)", str(root)):
        return imports.unknown_short_name(found[1], path, given)
    if found := re.search(r"Expected '(.+)' to be a subclass of <class '(.+)'>", str(root)):
        return f"{configs.place_of(path, given, found[1])}: {found[1]} is not a {found[2]}"
    if found := re.search(r"option '([^']+)'", message, re.IGNORECASE):
        of_command: Parser | None = getattr(root, "subcommand_parser", None)
        return _unknown_key(found[1], keys, of_command or parser, given)
    if message.startswith("unrecognized arguments: "):
        return _unrecognized(message.split()[2], parser)
    if message.startswith("the following arguments are required: "):
        return _required(message.partition(": ")[2], path, command, given)
    if message.endswith("expected one argument"):
        return f"{_without_value(others)} needs a value"
    if path and message.startswith("Parser key"):
        return _wrong_value(path, root, parser, given)
    return f"{path}: {root}" if path else str(root)


def _has_patches(given: list[Given]) -> bool:
    """Whether the patch size of the task that was given is its own, not its data's."""
    tasks = [each.value for each in given if each.path == "model" and each.value]
    return bool(tasks) and tasks[-1] in (
        *("tasks.VideoClassification", "tasks.MultimodalClassification"),
        *("VideoClassification", "MultimodalClassification"),
    )


def from_data(name: str, value: object) -> str:
    """The line for a value that the model was given where its data decides."""
    if name == "bins":
        return f"model.bins comes from the data: use --data.features.bins {value}"
    if name == "frames":
        return (
            f"model.frames comes from the data: use --data.frames {value} for video, or "
            "--data.seconds and --data.features.hop for sound"
        )
    if name == "step":
        return "model.step comes from the data: use --data.fps"
    if name.endswith("_size") or name == "context":
        return f"model.{name} comes from the data: use --data.{name} {value}"
    return f"model.{name} comes from the data, by its source: leave it out"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it came of, the last first."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _unknown_key(
    key: str, keys: list[str], parser: argparse.ArgumentParser, given: list[Given]
) -> str:
    prefix = ".".join(keys)
    place = configs.place_of(f"{prefix}.{key}".lstrip("."), given)
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


def _required(names: str, path: str, command: str, given: list[Given]) -> str:
    missing = [name.removeprefix(f"{command}.") for name in names.split(", ")]
    if path:
        return f"{path}: a value is needed for {', '.join(missing)}"
    asked = configs.last("ckpt_path", given)
    by = f" ({asked.value} records none)" if asked and asked.value != "null" else ""
    return (
        f"no {' and no '.join(sorted(missing))} class is given{by}: name a whole job first, "
        "such as --config image (mmpos configs lists them)"
    )


def _without_value(others: list[str]) -> str:
    for arg, following in zip(others, [*others[1:], "--"], strict=True):
        if arg.startswith("--") and "=" not in arg and following.startswith("--"):
            return arg
    return "an option"


def _wrong_value(
    path: str, root: BaseException, parser: argparse.ArgumentParser, given: list[Given]
) -> str:
    got = re.search(r"Got value: (.*)", str(root))  # of several layers, the one with this value
    setting = (got and configs.find(path, given, got[1])) or configs.find(path, given)
    if path in ("model", "data") or setting is None:
        reason = str(root).partition("\n")[0].partition(". Got value: ")[0]
        return f"{path}: {reason}"
    leaf = path.rpartition(".")[2]
    actions = [a for a in parser._actions if a.dest in (leaf, path)]
    hint = getattr(actions[0], "_typehint", None) if actions else None
    if line := imports.of_another_kind(setting.value, hint, path, given):
        return line
    near = configs.did_you_mean(setting.value, map(str, _choices(hint)))
    return f"{configs.place(setting)}: expected {_type_name(hint)}, got {setting.value!r}{near}"


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for inner in get_args(hint) for choice in _choices(inner)]


def _type_name(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(hint)))
    if kinds := list(dict.fromkeys(imports.made(hint))):
        several = "a list of " if get_origin(hint) is list else ""
        return several + " or ".join(kinds)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    return re.sub(r"\b(?:typing|collections\.abc)\.", "", str(hint))


def refuse_nulls(settings: Namespace, parser: LightningArgumentParser, given: list[Given]) -> None:
    """Raises CommandError for a given null that the type of its setting excludes.

    jsonargparse takes it for a setting that is not given.
    """
    for action in parser._actions:
        value = settings.get(action.dest)
        _refuse_null(value, action.dest, getattr(action, "_typehint", Any), given)
        _refuse_nulls_in(value, action.dest, given)


def _refuse_nulls_in(node: Any, path: str, given: list[Given]) -> None:
    for item in node if isinstance(node, list) else []:
        _refuse_nulls_in(item, path, given)
    if not isinstance(node, Namespace) or "class_path" not in node:
        return
    hints: dict[str, Any] = {}
    with suppress(Exception):  # names that exist for type checkers only
        made = resolve_name(node.class_path)
        hints = get_type_hints(made.__init__ if isinstance(made, type) else made)
    for name, value in vars(node.get("init_args", Namespace())).items():
        _refuse_null(value, f"{path}.{name}", hints.get(name, Any), given)
        _refuse_nulls_in(value, f"{path}.{name}", given)


def _refuse_null(value: Any, path: str, hint: Any, given: list[Given]) -> None:
    setting = configs.find(path, given) if value is None else None
    if setting and hint is not Any and NoneType not in get_args(hint):
        line = f"{configs.place(setting)}: expected {_type_name(hint)}, got null"
        raise CommandError(line, 2)
