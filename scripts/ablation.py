"""Compare runs that differ in their encoding alone, by the protocol of six steps.

    python scripts/ablation.py runs/compare/*/version_0
    python scripts/ablation.py runs/compare/*/version_0 --results runs/long_context/*

A run is a folder of ``mmpos fit``: of its ``config.yaml`` a hash of everything but the encoding and
the seeds is taken, and runs whose hashes differ are refused; ``metrics.csv`` has the test at the
trained length, ``environment.json`` versions and device, a checkpoint the number of parameters.
Results of ``scripts/long_context.py`` belong to the run that they lie in, or that their settings
name a file of; else they are given as ``RUN=FOLDER``.

Writes ``ablation.md`` and ``ablation.html``: the six steps with what is missing, parameters, the
seeds that all encodings have, and what they reached.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.markup import escape

from mmpos.evaluation.ablation import ablation
from mmpos.evaluation.results import Results, read
from mmpos.evaluation.runs import Run
from mmpos.evaluation.samples import write_text


def run_of(folder: Path, results: Results | None) -> Run:
    """What is known of a run.

    Raises: ValueError for a folder that is none, and for damaged files.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        known = sorted(each.parent for each in folder.glob("version_*/config.yaml"))
        hint = f"give {' or '.join(map(str, known))}" if known else "give that of a run"
        raise ValueError(f"{folder} has no config.yaml: {hint}")
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: expected names with values")
    if _inside(str(config.get("ckpt_path") or ""), folder):  # the same run, gone on
        config["ckpt_path"] = None
    return Run(
        name=str(folder),
        config=config,
        parameters=parameters(folder),
        metrics=metrics(folder / "metrics.csv"),
        environment=environment(folder / "environment.json"),
        results=results,
    )


def parameters(folder: Path) -> int | None:
    """How many numbers the network has in the run's checkpoint; None without one."""
    paths = [folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last")]
    paths += sorted(folder.glob("checkpoints/*.ckpt"))
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        return None
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    except (OSError, KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint of a run, or a damaged one") from error
    return sum(each.numel() for name, each in stored.items() if name.startswith("network."))


def metrics(path: Path) -> dict[str, float]:
    """The last of each number of the test."""
    if not path.is_file():
        return {}
    found: dict[str, float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name and name.startswith("test/") and value:
                    try:
                        found[name] = float(value)
                    except ValueError:
                        raise ValueError(f"{path} is damaged: {name} is {value!r}") from None
    return found


def environment(path: Path) -> dict[str, Any]:
    """That of the last start; nothing where none was recorded."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text("utf-8"))[-1])
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def results_of(given: Sequence[str], folders: Sequence[Path]) -> dict[Path, Results]:
    """The results of each run that has some.

    Raises: ValueError for results of no run, or two of one.
    """
    found: dict[Path, Results] = {}
    for each in given:
        named, _, path = each.rpartition("=")
        results = read(path)
        runs = [
            folder
            for folder in folders
            if (folder.resolve() == Path(named).resolve() if named else _is_of(results, folder))
        ]
        if len(runs) != 1:
            raise ValueError(
                f"{each} is of {len(runs)} of the runs: give it as RUN={path}, with one of the "
                "folders given"
            )
        if runs[0] in found:
            raise ValueError(f"{found[runs[0]].folder} and {path} are both of {runs[0]}: give one")
        found[runs[0]] = results
    return found


def _is_of(results: Results, folder: Path) -> bool:
    """Whether results lie in a run, or were made with a file of it."""
    names = [str(results.folder), *_texts(results.settings)]
    return any(_inside(name, folder) for name in names)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _inside(name: str, folder: Path) -> bool:
    return bool(name) and len(name) < 4096 and folder.resolve() in Path(name).resolve().parents


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare encodings, all else being the same.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, version_…")
    parser.add_argument("--results", nargs="+", default=[], help="of scripts/long_context.py")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="of the loss at the trained length, relative"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/ablation"))
    chosen = parser.parse_args(argv)
    try:
        held = results_of(chosen.results, chosen.runs)
        runs = [run_of(folder, held.get(folder)) for folder in chosen.runs]
        pages = ablation(runs, tolerance=chosen.tolerance)
    except ValueError as error:
        parser.error(str(error))
    chosen.output.mkdir(parents=True, exist_ok=True)
    for ending, page in zip(("md", "html"), pages, strict=True):
        write_text(chosen.output / f"ablation.{ending}", page)
    said = [line for line in pages[0].splitlines() if line.startswith(("# ", "- "))]
    console = Console(width=150)
    for line in said[:12]:
        console.print(escape(line))
    console.print(f"written: {escape(str(chosen.output / 'ablation.html'))}")


if __name__ == "__main__":
    main()
