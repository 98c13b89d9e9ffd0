"""Shipped configs: where they lie, what they are called, and what a user meant by a name."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import yaml


class CommandError(Exception):
    """A user's mistake, told in one line; ``status`` is the command's exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


class Given(NamedTuple):
    """One setting as the user wrote it: dotted path without ``init_args``, text, and place."""

    path: str
    value: str
    where: str


def last(path: str, given: list[Given]) -> Given | None:
    """The setting ``path`` as it was given last, and so holds; None if it was not given."""
    return next((setting for setting in reversed(given) if setting.path == path), None)


def find(path: str, given: list[Given], value: str | None = None) -> Given | None:
    """The last setting with the leaf of ``path`` below its other levels, in their order; where
    ``value`` is given, of this value.
    """
    keys = path.split(".")

    def fits(setting: Given) -> bool:
        levels = iter(setting.path.split("."))
        same_leaf = setting.path.rpartition(".")[2] == keys[-1]
        within = all(key in levels for key in keys)
        return same_leaf and within and value in (None, setting.value)

    return next((setting for setting in reversed(given) if fits(setting)), None)


def place_of(path: str, given: list[Given], value: str | None = None) -> str:
    """``path`` with the place where it was given."""
    setting = find(path, given, value)
    return place(setting) if setting else path


def check_sections(given: list[Given]) -> None:
    """Raises CommandError where trainer, model or data is neither settings nor a name."""
    for setting in given:
        if setting.path in ("trainer", "model", "data") and setting.value:
            with suppress(yaml.YAMLError):
                if not isinstance(yaml.safe_load(setting.value), dict | str):
                    raise CommandError(
                        f"{place(setting)}: expected settings, got {setting.value}", 2
                    )


def place(setting: Given) -> str:
    """A setting's path and, where it was not typed, its file and line."""
    return setting.path + (f" ({setting.where})" if setting.where else "")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``name`` was most likely meant to be, whatever its case."""
    lower = {candidate.lower(): candidate for candidate in names}
    found = get_close_matches(name.lower(), lower, 1, 0.6)
    return lower[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``; did you mean …?``, or nothing if no name is near."""
    found = nearest(name, names)
    return f"; did you mean {found}?" if found else ""


def folder() -> Path:
    """The folder of the shipped configs: inside an installed wheel, else beside the sources."""
    package = Path(str(files("mmpos")))
    packed = package / "_configs"
    return packed if packed.is_dir() else package.parent / "configs"


def shipped() -> dict[str, Path]:
    """Name → file of every shipped config; a name is the path below `folder` without ``.yaml``."""
    root = folder()
    paths = sorted(root.rglob("*.yaml"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def table() -> str:
    """Every shipped config with the first comment line of its file; whole jobs first, then what is
    laid over them, by folder.
    """
    lines = {name: _first_comment(path) for name, path in shipped().items()}
    width = max(map(len, lines), default=0)
    groups: dict[str, list[str]] = {}
    for name, line in lines.items():
        groups.setdefault(name.rpartition("/")[0], []).append(f"  {name:{width}}  {line}".rstrip())
    out = ["jobs (mmpos fit --config NAME)", *groups.pop("", [])]
    for folder, members in groups.items():
        out += ["", f"{folder}, laid over a job (mmpos fit --config JOB --config NAME)", *members]
    return "\n".join(out)


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.strip("# \n") for line in lines if line.strip("# \n")), "")


def resolve(name: str) -> str:
    """A config file's path: ``name`` itself where such a file exists, else a shipped config.

    Raises: CommandError with the nearest names if it is neither.
    """
    known = shipped()
    if name.lstrip().startswith("{") or Path(name).is_file():
        return name
    if name.removesuffix(".yaml") in known:
        return str(known[name.removesuffix(".yaml")])
    leaves = {key.rpartition("/")[2]: key for key in known}
    close = nearest(name, known) or leaves.get(nearest(name, leaves) or "")
    hint = f"; did you mean {close}?" if close else ""
    raise CommandError(
        f"--config {name}: no such file or shipped config{hint} (mmpos configs lists them)", 2
    )


def split(args: list[str]) -> tuple[list[str], list[str]]:
    """Separates the config files, resolved and in order, from the other arguments."""
    configs: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if arg.startswith("-c") and not equals and len(arg) > 2:
            flag, equals, value = "-c", "=", arg[2:]
        if flag in ("-c", "--config"):
            name = value if equals else next(rest, None)
            if not name:
                raise CommandError(f"{flag} needs a file or a name (mmpos configs lists them)", 2)
            configs.append(resolve(name))
        else:
            others.append(arg)
    return configs, others


def read(path: str) -> list[Given]:
    """The settings of a config file, for messages about them.

    Raises: CommandError for YAML that cannot be read, with file and line.
    """
    inline = path.lstrip().startswith("{")
    try:
        text = path if inline else Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else path
        reason = ", ".join(filter(None, (error.context, error.problem)))
        raise CommandError(f"{place}: not YAML: {reason}", 2) from error
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise CommandError(f"{path}: cannot be read as YAML: {error}", 2) from error
    if not isinstance(root, yaml.MappingNode):
        raise CommandError(f"{path}: expected settings such as `trainer: …`, found none", 2)
    return list(_walk(root, "", "--config" if inline else path))


def settings(text: str, where: str) -> list[Given]:
    """The settings of YAML that no user wrote, for messages about them."""
    root = yaml.compose(text, yaml.SafeLoader) if text else None
    return [given._replace(where=where) for given in _walk(root, "", "")] if root else []


def _walk(node: yaml.Node, path: str, file: str) -> Iterator[Given]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk(item, path, file)
    if not isinstance(node, yaml.MappingNode):
        return
    named = {key.value: f"{file}:{key.start_mark.line + 1}" for key, _ in node.value}
    for key, where in named.items():
        if "class_path" in named and key not in ("class_path", "init_args", "dict_kwargs"):
            raise CommandError(
                f"{path}.{key} ({where}): beside class_path there is only init_args", 2
            )
    for key, value in node.value:
        inner = path
        if key.value == "init_args" and not isinstance(value, yaml.MappingNode):
            raise CommandError(
                f"{path}.init_args ({named[key.value]}): expected settings, got {_text(value)}", 2
            )
        if key.value not in ("class_path", "init_args", "dict_kwargs"):
            inner = f"{path}.{key.value}".lstrip(".")
        text = "" if isinstance(value, yaml.MappingNode) else _text(value)
        yield Given(inner, text, named[key.value])
        yield from _walk(value, inner, file)


def _text(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "null" if node.tag.endswith(":null") else node.value
    return f"[{', '.join(_text(item) for item in node.value if isinstance(item, yaml.ScalarNode))}]"


def typed(args: list[str]) -> list[Given]:
    """The settings among command line arguments, in order."""
    found: list[Given] = []
    for index, arg in enumerate(args):
        if arg.startswith("--"):
            flag, equals, value = arg.partition("=")
            if not equals and index + 1 < len(args):
                value = args[index + 1]
            names = flag.removeprefix("--").removesuffix("+").split(".")
            path = ".".join(n for n in names if n not in ("class_path", "init_args", "help"))
            found.append(Given(path, value, ""))
    return found
