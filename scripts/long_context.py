"""Put a model to the test at long contexts: what the interface takes, and what works.

    python scripts/long_context.py runs/needles/version_0/checkpoints/last.ckpt --lengths 64 128 256
    python scripts/long_context.py FOLDER --lengths 512 1024 2048 --limit server=4096
    python scripts/long_context.py package.module:function --vocabulary 21 --claimed 64 …
    python scripts/long_context.py --report runs/long_context/* --output runs/long_context
    python scripts/long_context.py MODEL --rerun runs/long_context/NAME

A model is a checkpoint of ``mmpos fit`` (records of symbols if it was trained by ``needles``, else
English), a folder of a causal model of transformers with its ``tokenizer.json`` (English), or a
function from tokens ``[B, L]`` to logits (records of symbols). Lengths are tokens of its own.

Writes a folder with rows A1 to A12, the cells of task × length × depth, every failed sample, costs,
perplexity and settings, and ``report.md`` and ``report.html``, which ``--report`` makes again from
folders alone; several are compared, ``NAME-SEED`` as seeds of NAME. ``--rerun`` asks the failed
samples of a folder again, as they are. The exit status is 0 only where no row fails and what is
claimed holds, and of samples that are asked again where all are right.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mmpos.evaluation import (
    CallableSubject,
    Limits,
    Needles,
    NetworkSubject,
    Subject,
    SymbolNeedles,
    TextNeedles,
    TransformersSubject,
    accept,
    rerun,
)
from mmpos.evaluation.report import report
from mmpos.evaluation.symbols import END
from tasks import LanguageModel

Made = tuple[Subject, Needles, int]
"""What is tested, what it is asked, and the length that it was trained at."""


def of_checkpoint(path: Path, longest: int) -> Made:
    """A language model of this package.

    Raises: ValueError for a file that is no checkpoint of one.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        context = int(stored["hyper_parameters"]["context"])
        data = dict(stored["datamodule_hyper_parameters"])
        kind = str(data.get("_class_path"))
    except (OSError, EOFError, KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint of a language model") from error
    symbols = kind == "tasks.data.Needles"
    room = longest + (SymbolNeedles.new_tokens if symbols else 64)
    task = LanguageModel.load_from_checkpoint(
        path, map_location="cpu", weights_only=True, context=max(context, room)
    ).eval()
    if symbols:
        trained = int(data["length"])
        network = NetworkSubject(task.network, trained, name=str(path), end=END)
        return network, SymbolNeedles(), trained
    if task.vocabulary != 256:
        raise ValueError(
            f"{path} has {task.vocabulary} tokens, of {kind}: the script asks "
            "models of bytes and of records; others by mmpos.evaluation.accept"
        )
    needles = TextNeedles(_bytes, _text)
    return NetworkSubject(task.network, context, name=str(path)), needles, context


def of_folder(folder: Path) -> Made:
    """A causal model of transformers and its tokenizer.

    Raises: ValueError for a folder without either.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, by which lengths are counted")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no causal model: {' '.join(str(error).split())}") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # which is what a damaged file raises
        raise ValueError(f"{path} is no tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    subject = TransformersSubject(model, name=str(folder))
    needles = TextNeedles(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(list(ids)),
    )
    return subject, needles, subject.claimed


def of_function(name: str, vocabulary: int | None, claimed: int | None) -> Made:
    """A function ``module:name`` from tokens to logits.

    Raises: ValueError where it is not there, or its vocabulary and length are not given.
    """
    module, _, attribute = name.partition(":")
    sys.path.append(str(Path.cwd()))
    try:
        call: Callable[[Tensor], Tensor] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"there is no {name}: {error}") from None
    if vocabulary is None or claimed is None:
        raise ValueError(f"{name} is a function: give --vocabulary and --claimed")
    subject = CallableSubject(call, vocabulary, claimed, name=name, end=END)
    return subject, SymbolNeedles(), claimed


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def _text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def limits_of(given: Sequence[str]) -> Limits | None:
    """Limits by name: ``server=4096``."""
    if not given:
        return None
    pairs = [each.partition("=") for each in given]
    if not all(number.isdigit() for _, _, number in pairs):
        raise ValueError(f"a limit is a name and tokens, server=4096, got {' '.join(given)}")
    try:
        return Limits(**{name: int(number) for name, _, number in pairs})
    except TypeError:
        raise ValueError(
            "limits are of server, tokenizer, gateway, batcher and cache, got "
            f"{', '.join(name for name, _, _ in pairs)}"
        ) from None


def name_of(model: str) -> str:
    """The folder of a model's results: ``needles_rope-0`` of ``runs/needles_rope/seed0/…``."""
    parts = [part for part in Path(model).parts if part not in ("checkpoints", "runs", "/")]
    if Path(model).suffix == ".ckpt" and len(parts) > 2:
        version = parts[-2].removeprefix("version_").removeprefix("seed")
        kind = "" if Path(model).stem == "last" else f"_{Path(model).stem}"
        return f"{parts[-3]}{kind}-{version}"
    return Path(model).resolve().name.replace(":", ".")


def made(options: argparse.Namespace) -> Made:
    """What the options ask for."""
    path, longest = Path(options.model), max(options.lengths)
    if path.is_dir():
        return of_folder(path)
    if path.is_file():
        return of_checkpoint(path, longest)
    if ":" in options.model:
        return of_function(options.model, options.vocabulary, options.claimed)
    raise ValueError(f"{options.model} is no checkpoint, no folder and no module:function")


def test(options: argparse.Namespace, console: Console) -> int:
    """Run all rows and write the folder and its report."""
    subject, needles, trained = made(options)
    output = options.output or Path("runs") / "long_context" / name_of(options.model)
    found = accept(
        subject,
        needles,
        options.lengths,
        folder=output,
        trained=min(trained, max(options.lengths)),
        depths=options.depths,
        samples=options.samples,
        seed=options.seed,
        threshold=options.threshold,
        before=options.before,
        limits=limits_of(options.limit),
        repeats=options.repeats,
        train=options.repeats > 0,
    )
    report(output)
    table = Table("row", "status", "evidence")
    for name, row in found.rows.items():
        table.add_row(name, row.status, row.evidence)
    console.print(table)
    held = found.range
    console.print(f"claimed {held.claimed}, accepted {held.accepted}, works up to {held.effective}")
    console.print(f"{output / 'report.html'}")
    return 0 if found.accepted and found.rows["A12"].status == "PASS" else 1


def again(options: argparse.Namespace, console: Console) -> int:
    """Ask failed samples again."""
    subject, needles, _ = made(options)
    outcomes = rerun(options.rerun, subject, needles)
    right = [each for each in outcomes if each.verdict.exact]
    same = sum(each.verdict.output == each.before for each in outcomes)
    console.print(
        f"of {len(outcomes)} failed samples {len(right)} are right now; {same} answers are the same"
    )
    return 0 if len(right) == len(outcomes) else 1


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known.add_argument("model", nargs="?", help="a checkpoint, a folder, or module:function")
    known.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256])
    known.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    known.add_argument("--samples", type=int, default=100, help="of each cell")
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--threshold", type=float, default=0.8)
    known.add_argument("--repeats", type=int, default=5, help="of each cost; 0 measures none")
    known.add_argument("--before", type=Path, help="results to hold short contexts against")
    known.add_argument("--limit", nargs="+", default=[], metavar="PLACE=TOKENS")
    known.add_argument("--vocabulary", type=int, help="of a function")
    known.add_argument("--claimed", type=int, help="the length that a function is made for")
    known.add_argument("--output", type=Path)
    known.add_argument("--report", type=Path, nargs="+", help="make reports again from folders")
    known.add_argument("--rerun", type=Path, help="ask the failed samples of a folder again")
    return known


def main() -> int:
    options, console = parser().parse_args(), Console()
    logging.getLogger("mmpos").setLevel(logging.ERROR)  # a table that grows says so
    try:
        if options.report:
            folders = [each for each in options.report if not each.is_file()]  # of earlier reports
            several = len(folders) > 1
            report(*folders, output=options.output or (Path("runs") if several else None))
            return 0
        if options.model is None:
            raise ValueError("give a model, or --report with folders of results")
        return again(options, console) if options.rerun else test(options, console)
    except (OSError, ValueError) as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
