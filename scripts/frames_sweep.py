"""Test classifiers of video at frame counts, rates and sizes that they were never trained on.

    python scripts/frames_sweep.py --train --seeds 0 1 2 --jobs 2    # train all, then test them
    python scripts/frames_sweep.py CHECKPOINT [CHECKPOINT …]         # test what is trained

Scores the config ``video``: what goes round, and how, which the order of frames alone tells. Other
numbers of frames are at the rate of the training data, and so shorter or longer clips; other rates
are of clips as long as those. Each model is tested as it was trained; at other rates also with
positions in ``seconds``, which stay as they were, while as trained frames are counted; at other
sizes also with height and width ``scaled`` to the training grid, or with ``patches resized``, so
that there are as many. A learned table is ``resized``, or
keeps its rows of time and goes on with copies (``rows kept``), or is read between its rows at the
``seconds`` of a frame. ``shuffled`` frames tell whether time was needed. No weight changes.

``--train`` runs ``mmpos fit --config video`` for each encoding and seed in a process of its own;
options that the script does not know, as ``--name=value``, are passed on to it. Writes
``frames.csv`` with a row for each model, way, condition and question, ``frames.png``, and prints
tables: percent right, mean of the seeds, lowest and highest in parentheses.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib import colormaps, pyplot
from rich.console import Console
from rich.table import Table
from sweeps import Checkpoint, Curves, cell, curves, label, parsed, write_csv

from mmpos.additive import TableEncoding
from mmpos.coordinates import Index, Scaled
from mmpos.resample import Resampling
from tasks import VideoClassification
from tasks.data import Video

matplotlib.use("Agg")

MODELS = {
    "none": ["--config", "encoding/none"],
    "sinusoidal": ["--config", "encoding/sinusoidal"],
    "learned": ["--config", "encoding/learned"],
    "factorised": ["--config", "encoding/factorized"],
    "RoPE": [],
    "MRoPE": ["--config", "encoding/mrope", "--model.transformer.rotary.base", "10"],
    "T5": ["--config", "encoding/t5"],
    "ALiBi": ["--config", "encoding/alibi", "--model.transformer.bias.axis_scale", "[0.5, 1, 1]"],
}
"""What is trained, by the options of the command."""

TABLES = {
    "resized": Resampling(mode="bilinear", antialias=False),
    "rows kept": Resampling(mode="bilinear", antialias=False, fit=("extend", "resize", "resize")),
}
KINDS = {"frames": "frames", "fps": "frames a second", "size": "pixels", "shuffled": "frames"}
"""What is varied, and its unit."""


class Score(NamedTuple):
    """How many answers to one question are right, of one model in one way and condition."""

    model: str
    seed: str
    way: str
    kind: str
    """What is varied."""
    value: float
    question: str
    right: float


class Condition(NamedTuple):
    """What is varied, to what, the way there, the model and its data."""

    kind: str
    value: float
    way: str
    task: VideoClassification
    data: Video


@torch.no_grad()
def right(task: VideoClassification, data: Video) -> dict[str, float]:
    """The part of right answers to each question."""
    hits = dict.fromkeys(task.questions, 0)
    count = 0
    for clips, labels in data.test_dataloader():
        for question, logits in task(*clips).items():
            hits[question] += int((logits.argmax(-1) == labels[question]).sum())
        count += len(next(iter(labels.values())))
    return {question: found / count for question, found in hits.items()}


class Trained(Checkpoint):
    """A checkpoint of the command, and what it was trained on."""

    def __init__(self, path: Path) -> None:
        needed = ["frames", "patch_size"]
        super().__init__(path, "a classifier of video", VideoClassification, needed)
        self.frames = int(self.settings["frames"])
        self.fps = float(self.options["fps"])
        self.ticks = self.fps / self.settings["patch_size"][0]

    def data(self, **options: Any) -> Video:
        return Video(**{**self.options, "seed": 0, **options})

    def model(self, data: Video, table: Resampling | None = None) -> VideoClassification:
        """The model, its tables taken to the grid of these data if a way is given."""
        task = VideoClassification.load_from_checkpoint(self.path, map_location="cpu").eval()
        for encoding in self.encodings(task):
            if table is not None and isinstance(encoding, TableEncoding):
                encoding.resampling = table
                encoding.resize(self.grid(task, data))
        return task

    def grid(self, task: VideoClassification, data: Video) -> tuple[int, ...]:
        tokens: Any = task.network.tokens
        return tokens.grid(data.frames, *data.image_size)

    def encodings(self, task: VideoClassification) -> list[Any]:
        """What reads positions, in the three places."""
        network: Any = task.network.transformer
        return [e for e in (network.additive, network.rotary, network.bias) if e is not None]


def ways(trained: Trained, kind: str, data: Video) -> Iterator[tuple[str, VideoClassification]]:
    """The ways in which a model goes to these data."""
    task = trained.model(data)
    found = trained.encodings(task)
    table = any(isinstance(encoding, TableEncoding) for encoding in found)
    home = tuple(task.network.transformer.axes)  # type: ignore[arg-type]
    if not table or trained.grid(task, data) == home:
        yield "", task
    else:
        for way, how in TABLES.items():
            if way == "resized" or kind == "frames":
                yield way, trained.model(data, how)
    if kind == "size" and trained.grid(task, data) != home:
        resized = trained.model(data)
        tokens: Any = resized.network.tokens
        time, *patch = tokens.patch_size
        old = trained.data().image_size
        ours = [
            side * new // was for side, new, was in zip(patch, data.image_size, old, strict=True)
        ]
        tokens.patch_size = (time, *ours)
        if trained.grid(resized, data) == home:
            yield "patches resized", resized
    if not found:
        return
    if kind == "fps":
        timed = trained.model(data)
        timed.ticks = trained.ticks
        for encoding in trained.encodings(timed) if table else ():
            encoding.coordinates = Index()
        yield "seconds", timed
    elif kind == "size" and not table:
        scaled = trained.model(data)
        for encoding in trained.encodings(scaled):
            encoding.coordinates = Scaled((None, *home[1:]))
        yield "scaled", scaled


def conditions(
    trained: Trained, frames: Sequence[int], rates: Sequence[float], sizes: Sequence[int]
) -> Iterator[Condition]:
    """All of them, the one that was trained on first."""
    seconds = trained.frames / trained.fps
    size = max(trained.data().image_size)
    varied: list[tuple[str, float, dict[str, Any]]] = []
    varied += [("frames", n, {"frames": n}) for n in sorted({trained.frames, *frames})]
    for rate in sorted({trained.fps, *rates}):
        count = round(rate * seconds)
        varied.append(("fps", rate, {"fps": rate, "frames": count}))
    varied += [("size", n, {"image_size": n}) for n in sorted({size, *sizes})]
    varied.append(("shuffled", trained.frames, {"order": "shuffled"}))
    for kind, value, options in varied:
        data = trained.data(**options)
        for way, task in ways(trained, kind, data):
            yield Condition(kind, value, way, task, data)


def sweep(
    paths: Sequence[Path],
    frames: Sequence[int],
    rates: Sequence[float],
    sizes: Sequence[int],
    options: dict[str, Any],
) -> list[Score]:
    """All scores; ``options`` are of the data."""
    scores = []
    for path in paths:
        trained = Trained(path)
        trained.options |= options
        for kind, value, way, task, data in conditions(trained, frames, rates, sizes):
            try:
                found = right(task, data)
            except ValueError as error:  # a table that was trained in seconds, say
                print(f"left out: {label(trained.name[0], way)}, {kind} {value:g}: {error}")
                continue
            own = (*trained.name, way, kind, value)
            scores += [Score(*own, question, part) for question, part in found.items()]
    return scores


def of_kind(scores: Sequence[Score], kind: str, question: str) -> Curves:
    own = (s for s in scores if s.kind == kind and s.question == question)
    return curves((s.model, s.way, s.value, s.right) for s in own)


def table(scores: Sequence[Score], kind: str, question: str) -> Table:
    """A row for each model and way."""
    found = of_kind(scores, kind, question)
    values = sorted({value for curve in found.values() for value in curve})
    out = Table(
        "model",
        *(f"{value:g}" for value in values),
        title=f"{question}: right answers in percent by {kind}, {KINDS[kind]}",
    )
    for (name, way), curve in found.items():
        out.add_row(label(name, way), *(cell(curve.get(value)) for value in values))
    return out


def picture(path: Path, scores: Sequence[Score]) -> None:
    """A panel for each of what is varied, of the question that needs time."""
    figure, panels = pyplot.subplots(1, 3, figsize=(18, 5.5), sharey=True)
    names = list(dict.fromkeys(score.model for score in scores))
    for panel, kind in zip(panels, ("frames", "fps", "size"), strict=True):
        for (name, way), curve in of_kind(scores, kind, "how").items():
            values = sorted(curve)
            means = [sum(curve[v]) / len(curve[v]) for v in values]
            style = {"": "o-", "seconds": "s:", "scaled": "s:", "patches resized": "d-."}.get(
                way, "^--"
            )
            color = colormaps["tab10"](names.index(name))
            panel.plot(values, means, style, color=color, label=label(name, way))
        panel.axhline(25, color="grey", linestyle=":")
        panel.set_xlabel(f"{kind}, {KINDS[kind]}" if kind != "frames" else "frames")
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    panels[0].set_ylabel("how: right answers, percent")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Test classifiers of video at other frames.")
    parser.add_argument("--frames", nargs="*", type=int, default=[8, 12, 24, 32])
    parser.add_argument("--rates", nargs="*", type=float, default=[4, 5, 10, 16, 20])
    parser.add_argument("--sizes", nargs="*", type=int, default=[48, 64])
    parser.add_argument("--clips", type=int, default=300, help="of each condition")
    chosen, paths = parsed(parser, MODELS, "video", "runs/frames", argv)
    own = {"eval_samples": chosen.clips}
    try:
        scores = sweep(paths, chosen.frames, chosen.rates, chosen.sizes, own)
    except ValueError as error:
        parser.error(str(error))
    write_csv(chosen.output / "frames.csv", Score._fields, scores)
    console = Console(width=150)
    for question in dict.fromkeys(score.question for score in scores):
        for kind in KINDS:
            console.print(table(scores, kind, question))
    picture(chosen.output / "frames.png", scores)
    console.print(f"written: {chosen.output / 'frames.csv'}, {chosen.output / 'frames.png'}")


if __name__ == "__main__":
    main()
