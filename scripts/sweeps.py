"""What sweeps share: checkpoints, arguments, means of seeds, tables that are written."""

from __future__ import annotations

import argparse
import csv
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean
from typing import Any

import torch
from compare_encodings import train_all

Curves = dict[tuple[str, str], dict[float, list[float]]]
"""By model and way: what all seeds reached under each condition, in percent."""


class Checkpoint:
    """A checkpoint of the command that was trained on embedded data.

    Raises: ValueError for another file, or other data.
    """

    def __init__(self, path: Path, kind: str, task: type, needed: Sequence[str]) -> None:
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
            self.settings = {name: stored["hyper_parameters"][name] for name in needed}
            options = dict(stored["datamodule_hyper_parameters"])
            own = options["source"] == "embedded"
            made = stored["hyper_parameters"].get("_class_path", f"tasks.{task.__name__}")
            if made != f"tasks.{task.__name__}":
                raise TypeError(made)
        except (OSError, KeyError, TypeError, RuntimeError, UnpicklingError) as error:
            raise ValueError(f"{path} is no checkpoint of {kind}") from error
        if not own:
            raise ValueError(f"{path} was not trained on the embedded data, which is swept")
        self.path = path
        self.options: dict[str, Any] = {k: v for k, v in options.items() if not k.startswith("_")}

    @property
    def name(self) -> tuple[str, str]:
        """Its model and seed, by its folder ``NAME-SEED``, else its path."""
        for part in self.path.parts[::-1]:
            name, _, seed = part.rpartition("-")
            if name and seed.isdigit():
                return name, seed
        return str(self.path), ""


def parsed(
    parser: argparse.ArgumentParser,
    models: Mapping[str, Sequence[str]],
    job: str,
    output: str,
    argv: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[Path]]:
    """Arguments with those that all sweeps have, and the checkpoints that they name or train."""
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--train", action="store_true", help="train the models first")
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path(output))
    chosen, options = parser.parse_known_args(argv)
    if options and not chosen.train:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if chosen.train == bool(chosen.checkpoints):
        parser.error(
            "name checkpoints, or give --train, with options for the command as --name=value"
        )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if not chosen.train:
        return chosen, chosen.checkpoints
    commands = {name: ["--config", job, *models[name]] for name in chosen.models}
    return chosen, train_all(commands, chosen.seeds, chosen.output, chosen.jobs, options)


def curves(scores: Iterable[tuple[str, str, float, float]]) -> Curves:
    """Of model, way, condition and part of right answers."""
    out: Curves = defaultdict(lambda: defaultdict(list))
    for model, way, value, right in scores:
        out[model, way][value].append(100 * right)
    return out


def label(model: str, way: str) -> str:
    """What a row or a line is called."""
    return f"{model}, {way}" if way else model


def cell(values: Sequence[float] | None) -> str:
    """The mean of seeds, lowest and highest in parentheses; a dash for none."""
    if not values:
        return "–"
    spread = f" ({min(values):.0f}–{max(values):.0f})" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A line for each score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows(rows)
