"""Train the multimodal job with every layout of positions, and test each without a modality.

    python scripts/compare_layouts.py --train --seeds 0 1 2 --jobs 2    # train all, then test them
    python scripts/compare_layouts.py CHECKPOINT [CHECKPOINT …]         # test what is trained

Scores the config ``multimodal``: a text names the row and a spoken number the column of a picture
on a page; what is it, and where? Each model is tested with everything, and without the text, the
page or the sound, in every row (``--data.blank``): what it then still knows. Exact bounds: "what"
1/2 without text or sound, 1/5 without the page; "where" 1/2, and 1/4 without both.

``--train`` runs ``mmpos fit --config multimodal`` for each layout and seed in a process of its own;
options that the script does not know, as ``--name=value``, are passed on to it. Writes
``layouts.csv`` with a row for each model, blanking and question, and prints a table: percent right,
mean of the seeds, lowest and highest in parentheses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sweeps import Checkpoint, cell, curves, parsed, write_csv

from tasks import MultimodalClassification
from tasks.data import Multimodal

MODELS = {
    "M-RoPE": [],
    "RoPE, axes missing": ["--model.layout=missing", "--config", "encoding/rope"],
    "RoPE, one axis": ["--model.layout=sequence", "--config", "encoding/rope"],
    "sinusoidal, axes missing": [*("--model.layout=missing", "--config", "encoding/sinusoidal")],
    "none": ["--config", "encoding/none"],
}
"""What is trained, by the options of the command."""

BLANKS = ("", "text", "image", "audio")


class Score(NamedTuple):
    """How many answers to one question are right, of one model without one modality."""

    model: str
    seed: str
    blank: str
    question: str
    right: float


@torch.no_grad()
def right(task: MultimodalClassification, data: Multimodal) -> dict[str, float]:
    """The part of right answers to each question."""
    hits, count = dict.fromkeys(task.questions, 0), 0
    for mixed, labels in data.test_dataloader():
        for question, logits in task(*mixed).items():
            hits[question] += int((logits.argmax(-1) == labels[question]).sum())
        count += len(next(iter(labels.values())))
    return {question: found / count for question, found in hits.items()}


def scores_of(paths: Sequence[Path], options: dict[str, Any]) -> list[Score]:
    """All scores; ``options`` are of the data."""
    scores = []
    for path in paths:
        trained = Checkpoint(path, "a multimodal classifier", MultimodalClassification, ["layout"])
        task = MultimodalClassification.load_from_checkpoint(path, map_location="cpu").eval()
        for blank in BLANKS:
            left_out = [blank] if blank else None
            data = Multimodal(**{**trained.options, "seed": 0, "blank": left_out, **options})
            scores += [
                Score(*trained.name, blank, q, part) for q, part in right(task, data).items()
            ]
    return scores


def table(scores: Sequence[Score], question: str) -> Table:
    """A row for each model."""
    own = [score for score in scores if score.question == question]
    found = curves((s.model, "", BLANKS.index(s.blank), s.right) for s in own)
    heads = [f"without {blank}" if blank else "all" for blank in BLANKS]
    out = Table("positions", *heads, title=f"{question}: right answers in percent")
    for (name, _), curve in found.items():
        out.add_row(name, *(cell(curve.get(place)) for place in range(len(BLANKS))))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare layouts of multimodal positions.")
    parser.add_argument("--pages", type=int, default=1000, help="tested")
    chosen, paths = parsed(parser, MODELS, "multimodal", "runs/layouts", argv)
    try:
        scores = scores_of(paths, {"eval_samples": chosen.pages})
    except ValueError as error:
        parser.error(str(error))
    write_csv(chosen.output / "layouts.csv", Score._fields, scores)
    console = Console(width=150)
    for question in dict.fromkeys(score.question for score in scores):
        console.print(table(scores, question))
    console.print(f"written: {chosen.output / 'layouts.csv'}")


if __name__ == "__main__":
    main()
