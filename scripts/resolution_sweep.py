"""Test trained image models at resolutions that they were never trained on.

    python scripts/resolution_sweep.py CHECKPOINT [CHECKPOINT …] --sizes 16 24 32 48 64

Each checkpoint is tested on the scenes of its own data, rendered at each size, with no fine-tuning
and the whole canvas in view. A learned table is resized; an encoding that reads coordinates is
tested with its own and, with the same weights, with coordinates scaled to the training grid. Writes
a CSV and a PNG, and prints a table: accuracy by size, the trained size marked, the area under the
curve over the logarithm of the size, and the worst drop from the trained size.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean

import lightning as L
import matplotlib
import torch
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from mmpos.additive import LearnedEncoding
from mmpos.coordinates import Scaled
from mmpos.interop.timm import Backbone, describe
from mmpos.models import BackboneClassifier, Classifier
from tasks import ImageClassification
from tasks.data import Images

matplotlib.use("Agg")
Curve = dict[int, float]


def models(path: Path, size: int) -> Iterator[tuple[str, ImageClassification]]:
    """The model of a checkpoint at a size, once for each way of going there, with its name."""
    task = ImageClassification.load_from_checkpoint(
        path, map_location="cpu", image_size=(size, size)
    )
    if isinstance(task.network, BackboneClassifier):
        backbone = task.network.backbone
        if not isinstance(backbone, Backbone):
            raise ValueError(f"{path} has a backbone that is none of timm's: its sizes are its own")
        schemes = describe(backbone.model)
        yield (
            f"{schemes.model}, {', '.join(s.kind for s in schemes.schemes) or 'no encoding'}",
            task,
        )
        return
    assert isinstance(task.network, Classifier)
    transformer = task.network.transformer
    slots = (transformer.additive, transformer.rotary, transformer.bias)
    used = [slot for slot in slots if slot is not None]
    name = " + ".join(type(slot).__name__ for slot in used) or "no encoding"
    if isinstance(transformer.additive, LearnedEncoding):
        name += f", table resized ({transformer.additive.resampling})"
    readers = [slot for slot in used if getattr(slot, "coordinates", None) is not None]
    own = {type(slot.coordinates).__name__ for slot in readers}
    words = "raw coordinates" if own == {"Index"} else f"{' and '.join(sorted(own))} coordinates"
    yield f"{name}, {words}" if readers else name, task
    if own - {"Scaled"}:
        stored = torch.load(path, map_location="cpu", weights_only=True)["hyper_parameters"]
        pairs = zip(stored["image_size"], stored["patch_size"], strict=True)
        grid = [pixels // patch for pixels, patch in pairs]
        for slot in readers:
            slot.coordinates = Scaled(grid)  # type: ignore[assignment]
        yield f"{name}, scaled to the training grid", task


def trained_size(path: Path) -> int:
    """Height and width of the images that a checkpoint was trained on, which must be one number.

    Raises: ValueError for a file that is no checkpoint of an image task, or one of rectangles.
    """
    try:
        settings = torch.load(path, map_location="cpu", weights_only=True)["hyper_parameters"]
        height, width = settings["image_size"]
    except (OSError, KeyError, IndexError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint of an image task") from error
    if height != width:
        raise ValueError(f"{path} was trained on {height} × {width}; the sweep is over squares")
    return int(height)


def test(path: Path, size: int, batch_size: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Test accuracy of each question at a size, by way."""
    stored = torch.load(path, map_location="cpu", weights_only=True)
    options = dict(stored["datamodule_hyper_parameters"])
    options = {k: v for k, v in options.items() if not k.startswith("_")}
    data = Images(**{**options, "image_size": size, "batch_size": batch_size})
    for name, task in models(path, size):
        trainer = L.Trainer(
            accelerator="auto", devices=1, logger=False, enable_progress_bar=False, barebones=False
        )
        (found,) = trainer.test(task, datamodule=data, verbose=False)
        yield name, {k.split("/")[1]: v for k, v in found.items() if k.endswith("_accuracy")}


def area(curve: Curve) -> float:
    """Mean height of a curve over the logarithm of the size, by trapezoids."""
    points = sorted((math.log2(size), value) for size, value in curve.items())
    if len(points) == 1:
        return points[0][1]
    parts = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points)]
    return sum(parts) / (points[-1][0] - points[0][0])


def table(question: str, curves: dict[str, Curve], trained: int) -> Table:
    """A row for each way; percent."""
    sizes = sorted(next(iter(curves.values())))
    heads = [f"[bold]{size}*[/]" if size == trained else str(size) for size in sizes]
    out = Table(question, *heads, "area", "worst drop", title=f"{question}, % (* trained size)")
    for name, curve in curves.items():
        drop = curve.get(trained, max(curve.values())) - min(curve.values())
        cells = [f"{100 * curve[size]:.1f}" for size in sizes]
        out.add_row(name, *cells, f"{100 * area(curve):.1f}", f"{100 * drop:.1f}")
    return out


def picture(path: Path, curves: dict[str, dict[str, Curve]], trained: int) -> None:
    """A panel for each question, a colour for each encoding, dashed where coordinates are raw."""
    figure, panels = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 5), squeeze=False)
    names = next(iter(curves.values()))
    colours = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(map(_kind, names)))}
    for panel, (question, ways) in zip(panels[0], curves.items(), strict=True):
        sizes = sorted({size for curve in ways.values() for size in curve})
        for name, curve in ways.items():
            panel.plot(
                sizes,
                [100 * curve[size] for size in sizes],
                "o--" if "raw" in name else "o-",
                color=colours[_kind(name)],
                label=name,
            )
        panel.axvline(trained, color="grey", linestyle=":", label=f"trained at {trained}")
        panel.set(xscale="log", xlabel="image size, pixels", ylabel=f"{question}, %", ylim=(0, 100))
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.04 * (len(labels) // 2 + 1), 1, 1))
    figure.savefig(path, dpi=120)


def _kind(name: str) -> str:
    return name.partition(",")[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Test trained image models at other resolutions.")
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 24, 32, 48, 64])
    parser.add_argument("--output", type=Path, default=Path("runs/resolution_sweep"))
    parser.add_argument("--batch-size", type=int, default=128)
    chosen = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        sizes = {trained_size(path) for path in chosen.checkpoints}
    except ValueError as error:
        parser.error(str(error))
    if len(sizes) > 1:
        parser.error(f"the checkpoints were trained at different sizes: {sorted(sizes)}")
    (trained,) = sizes
    chosen.sizes = sorted({*chosen.sizes, trained})

    rows = []
    try:
        for path, size in itertools.product(chosen.checkpoints, chosen.sizes):
            for name, accuracies in test(path, size, chosen.batch_size):
                rows += [(str(path), name, size, *each) for each in accuracies.items()]
    except ValueError as error:
        parser.error(str(error))
    chosen.output.mkdir(parents=True, exist_ok=True)
    with (chosen.output / "sweep.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["checkpoint", "way", "size", "question", "accuracy"])
        writer.writerows(rows)

    found: dict[str, dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for _, name, size, question, value in rows:
        found[question.removesuffix("_accuracy")][name][size].append(value)
    curves = {
        question: {
            name: {size: mean(values) for size, values in sizes.items()}
            for name, sizes in ways.items()
        }
        for question, ways in found.items()
    }
    console = Console(width=160)
    for question, ways in curves.items():
        console.print(table(question, ways, trained))
    picture(chosen.output / "sweep.png", curves, trained)
    console.print(f"written: {chosen.output / 'sweep.csv'}, {chosen.output / 'sweep.png'}")


if __name__ == "__main__":
    main()
