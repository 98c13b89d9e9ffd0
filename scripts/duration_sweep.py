"""Test classifiers of sound at durations, hops and sample rates that they were never trained on.

    python scripts/duration_sweep.py --train --seeds 0 1 2 --jobs 2    # train all, then test them
    python scripts/duration_sweep.py CHECKPOINT [CHECKPOINT …]         # test what is trained

Scores the config ``audio``: which of zero, one and two is said first, and which last, mean of both,
by voices that were held out (or recorded ones, ``--voices recorded``). Each model is tested as it
was trained; with more digits also by ``windows`` of the longest clip it was made for, over which
logits are averaged; at other hops also with positions in ``seconds``, which stay as they were,
while as trained tokens are counted. A learned table is ``resized`` to longer clips, or goes on with
``copies`` of its rows. No weight changes. The band of frequencies is that of the training data at
all rates, 0 to 4 kHz.

``--train`` runs ``mmpos fit --config audio`` for each encoding and seed in a process of its own;
options that the script does not know, as ``--name=value``, are passed on to it. Writes
``durations.csv`` with a row for each model, way and condition, ``durations.png``, and prints
tables: percent right, mean of the seeds, lowest and highest in parentheses; chance is 33.3.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib import colormaps, pyplot
from rich.console import Console
from rich.table import Table
from sweeps import Checkpoint, Curves, cell, curves, label, parsed, write_csv

from mmpos.additive import LearnedEncoding
from mmpos.resample import Resampling
from tasks import AudioClassification
from tasks.data import Audio
from tasks.data.features import Features

matplotlib.use("Agg")

MODELS = {
    "none": ["--config", "encoding/none"],
    "sinusoidal": [],
    "learned": ["--config", "encoding/learned"],
    "RoPE": ["--config", "encoding/rope"],
    "ALiBi": ["--config", "encoding/alibi"],
    "T5": ["--config", "encoding/t5"],
    "Transformer-XL": ["--config", "encoding/transformer_xl"],
}
"""What is trained, by the options of the command."""

TABLES = {
    "resized": Resampling(mode="bilinear", antialias=False),
    "copies": Resampling(fit="extend"),
}
HIGHEST = 4000.0


class Score(NamedTuple):
    """How many answers of one model are right in one way, and under which condition."""

    model: str
    seed: str
    way: str
    kind: str
    """What is varied: digits, hop or rate."""
    value: float
    right: float
    seconds: float
    """Mean length of the clips."""


@torch.no_grad()
def right(task: AudioClassification, data: Audio) -> tuple[float, float]:
    """The part of right answers over all questions, and the mean length of clips in seconds."""
    hits, answers = 0, 0
    for sound, labels in data.test_dataloader():
        for question, logits in task(*sound).items():
            hits += int((logits.argmax(-1) == labels[question]).sum())
            answers += len(logits)
    source = data.samples("test").source
    return hits / answers, mean(source.seconds(index) for index in range(len(source)))


class Trained(Checkpoint):
    """A checkpoint of the command, and what it was trained on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a classifier of sound", AudioClassification, ["frames"])
        self.frames = int(self.settings["frames"])
        self.features = Features(**self.options["features"])

    def data(self, **options: Any) -> Audio:
        return Audio(**{**self.options, "seed": 0, "spec_augment": None, **options})

    def model(self, frames: int, table: Resampling | None = None) -> AudioClassification:
        """The model for clips of so many frames, tables taken there in a way of their own."""
        task = AudioClassification.load_from_checkpoint(self.path, map_location="cpu").eval()
        additive = task.network.transformer.additive  # type: ignore[union-attr]
        if isinstance(additive, LearnedEncoding) and frames > self.frames:
            additive.resampling = table or additive.resampling
            tokens: Any = task.network.tokens
            additive.resize(tokens.grid(self.features.height, frames))
        return task

    @property
    def ticks(self) -> float:
        """Tokens in a second of its training data."""
        tokens: Any = self.model(self.frames).network.tokens
        stride = tokens.stride if isinstance(tokens.stride, int) else tokens.stride[1]
        return 1 / (stride * self.features.step)


def conditions(
    trained: Trained, digits: Sequence[int], hops: Sequence[float], rates: Sequence[int]
) -> Iterator[tuple[str, float, str, AudioClassification, Audio]]:
    """What is varied, to what, the way, the model and its data."""
    seconds = float(trained.options["seconds"])
    for count in (0, *digits):
        longest = seconds if not count else max(seconds, 1.2 * count)
        spoken = {"digits": (count, count)} if count else {}
        whole = trained.data(longer="extend", seconds=longest, **spoken)
        task = trained.model(whole.frames)
        has_table = isinstance(task.network.transformer.additive, LearnedEncoding)  # type: ignore
        if has_table and longest > seconds:
            for way, how in TABLES.items():
                yield "digits", count, way, trained.model(whole.frames, how), whole
        else:
            yield "digits", count, "", task, whole
        if longest > seconds:
            parts = trained.data(longer="windows", overlap=0.5, **spoken)
            yield "digits", count, "windows", trained.model(trained.frames), parts
    for kind, values in (("hop", hops), ("rate", rates)):
        for value in values:
            features = replace(trained.features, high=HIGHEST, **{kind: value})
            data = trained.data(features=features)
            yield kind, value, "", trained.model(data.frames), data
            if kind == "hop":
                task = trained.model(trained.frames)
                if not isinstance(task.network.transformer.additive, LearnedEncoding):  # type: ignore
                    task.ticks = trained.ticks
                    yield kind, value, "seconds", task, data


def sweep(
    paths: Sequence[Path],
    digits: Sequence[int],
    hops: Sequence[float],
    rates: Sequence[int],
    options: dict[str, Any],
) -> list[Score]:
    """All scores; ``options`` are of the data."""
    scores = []
    for path in paths:
        trained = Trained(path)
        trained.options |= options
        for kind, value, way, task, data in conditions(trained, digits, hops, rates):
            part, seconds = right(task, data)
            scores.append(Score(*trained.name, way, kind, value, part, seconds))
    return scores


def of_kind(scores: Sequence[Score], kind: str) -> Curves:
    return curves((s.model, s.way, s.value, s.right) for s in scores if s.kind == kind)


def table(scores: Sequence[Score], kind: str) -> Table:
    """A row for each model and way."""
    found = of_kind(scores, kind)
    lengths = {s.value: s.seconds for s in scores if s.kind == kind}
    heads = [
        f"{value:g}"
        if kind != "digits"
        else f"{value or 'trained':g} ({length:.1f} s)"
        if value
        else f"trained ({length:.1f} s)"
        for value, length in sorted(lengths.items())
    ]
    unit = {"digits": "digits", "hop": "hop in seconds", "rate": "sample rate in Hz"}[kind]
    out = Table("model", *heads, title=f"right answers in percent by {unit}; chance is 33.3")
    for (name, way), curve in found.items():
        out.add_row(label(name, way), *(cell(curve.get(v)) for v in sorted(lengths)))
    return out


def picture(path: Path, scores: Sequence[Score]) -> None:
    """A panel for each of what is varied."""
    figure, panels = pyplot.subplots(1, 3, figsize=(18, 5.5), sharey=True)
    names = list(dict.fromkeys(score.model for score in scores))
    for panel, kind in zip(panels, ("digits", "hop", "rate"), strict=True):
        lengths = {s.value: s.seconds for s in scores if s.kind == kind}
        for (name, way), curve in of_kind(scores, kind).items():
            at = [lengths[v] if kind == "digits" else v for v in sorted(curve)]
            means = [mean(curve[value]) for value in sorted(curve)]
            style = {"": "o-", "windows": "s:"}.get(way, "^--")
            color = colormaps["tab10"](names.index(name))
            panel.plot(at, means, style, color=color, label=label(name, way))
        panel.axhline(100 / 3, color="grey", linestyle=":")
        panel.set_xlabel({"digits": "seconds", "hop": "hop, seconds", "rate": "rate, Hz"}[kind])
        panel.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    panels[0].set_ylabel("right answers, percent")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Test classifiers of sound at other durations.")
    parser.add_argument("--digits", nargs="*", type=int, default=[12, 16, 24, 32])
    parser.add_argument("--hops", nargs="*", type=float, default=[0.005, 0.008, 0.0125, 0.02])
    parser.add_argument("--rates", nargs="*", type=int, default=[16000, 44100])
    parser.add_argument("--sequences", type=int, default=300, help="of each condition")
    parser.add_argument("--voices", default="synthetic", choices=["synthetic", "recorded"])
    chosen, paths = parsed(parser, MODELS, "audio", "runs/durations", argv)
    own = {"eval_samples": chosen.sequences, "test_voices": chosen.voices}
    try:
        scores = sweep(paths, chosen.digits, chosen.hops, chosen.rates, own)
    except ValueError as error:
        parser.error(str(error))
    write_csv(chosen.output / "durations.csv", Score._fields, scores)
    console = Console(width=150)
    for kind in ("digits", "hop", "rate"):
        if any(score.kind == kind for score in scores):
            console.print(table(scores, kind))
    picture(chosen.output / "durations.png", scores)
    console.print(f"written: {chosen.output / 'durations.csv'}, {chosen.output / 'durations.png'}")


if __name__ == "__main__":
    main()
