"""Test language models at contexts that they were never trained on.

    python scripts/length_sweep.py --train --seeds 0 1 2 --jobs 2      # train all, then test them
    python scripts/length_sweep.py CHECKPOINT [CHECKPOINT …]           # test what is trained

Scores the *same* last 32 tokens of held-out texts, each with the tokens before it up to a context:
so a longer context can only add what is far. Each model is tested as it was trained; with a window
of the trained length, which lets no token see farther than in training (the control); and, if it
has RoPE, with its frequencies changed for each context (``2 ×`` is twice the factor) or for the
longest alone (``fixed``). A learned table is resized. No weight changes.

``--train`` runs ``mmpos fit --config text`` for each encoding and seed in a process of its own;
options that the script does not know, as ``--name=value``, are passed on to it. Writes
``lengths.csv`` with a row for each model, way and context, ``lengths.png``, and prints tables: bits
per byte, mean of the seeds, lowest and highest in parentheses.
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
import torch
from compare_encodings import train_all
from matplotlib import colormaps, pyplot
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmpos.frequencies import (
    DynamicNTK,
    Extension,
    Llama3,
    NTKAware,
    PositionInterpolation,
    YaRN,
)
from mmpos.models import Transformer
from mmpos.positions import sequence
from mmpos.rotary import RotaryEncoding
from tasks import LanguageModel
from tasks.data import Text
from tasks.recurrent import Recurrent

matplotlib.use("Agg")

MODELS = {
    "none": ["--config", "encoding/none"],
    "sinusoidal": ["--config", "encoding/sinusoidal"],
    "learned": ["--config", "encoding/learned"],
    "RoPE": [],
    "RoPE, base 100": ["--config", "encoding/rope"],
    "xPos": ["--config", "encoding/xpos"],
    "ALiBi": ["--config", "encoding/alibi"],
    "T5": ["--config", "encoding/t5", "--model.transformer.bias.bidirectional=false"],
    "Kerple": ["--config", "encoding/kerple"],
    "FIRE": ["--config", "encoding/fire"],
    "Mamba-2": ["--config", "network/mamba2"],
}
"""What is trained, by the options of the command."""

EXTENSIONS: dict[str, Callable[[float, int], Extension]] = {
    "PI": lambda factor, _: PositionInterpolation(factor=factor),
    "NTK": lambda factor, _: NTKAware(factor=factor),
    "NTK, 2 ×": lambda factor, _: NTKAware(factor=2 * factor),
    "NTK, 4 ×": lambda factor, _: NTKAware(factor=4 * factor),
    "dynamic NTK": lambda _, trained: DynamicNTK(factor=2, original_length=trained),
    "Llama 3": lambda factor, trained: Llama3(factor=factor, original_length=trained),
    "YaRN": lambda factor, trained: YaRN(factor=factor, original_length=trained),
    "YaRN, scores as they were": lambda factor, trained: YaRN(
        factor=factor, original_length=trained, attention_factor=1.0
    ),
    "YaRN, 2 ×": lambda factor, trained: YaRN(factor=2 * factor, original_length=trained),
}
FIXED = ("PI", "YaRN")
"""Those that are also tested with the factor of the longest context at all of them."""


class Held(NamedTuple):
    """Texts that no model was trained on, of one more token than the longest context."""

    tokens: Tensor
    bytes: Tensor


class Score(NamedTuple):
    """Bits per byte of one model in one way at one context."""

    model: str
    seed: str
    way: str
    context: int
    bits: float


def held_out(data: Text, longest: int, count: int) -> Held:
    """``count`` pieces of the test text, none of which overlap or cross documents.

    First one of each document, then a second of those that are long enough, and so on.
    """
    data.setup("test")
    rows: Any = data.test_dataloader().dataset
    size = longest + 1
    begins = sorted(
        (piece, int(start) + piece * size)
        for start, length in zip(rows.starts, rows.lengths, strict=True)
        for piece in range(int(length) // size)
    )
    if len(begins) < count:
        raise ValueError(
            f"the test text has {len(begins)} pieces of {size} tokens, {count} are asked for: give "
            "fewer --texts or shorter --lengths"
        )
    places = torch.tensor([begin for _, begin in begins[:count]]).unsqueeze(-1) + torch.arange(size)
    tokens, counts = (torch.from_numpy(part.astype("int64")) for part in (rows.tokens, rows.bytes))
    return Held(tokens[places], counts[places])


@torch.no_grad()
def bits_per_byte(task: LanguageModel, held: Held, context: int, scored: int) -> float:
    """Of the last ``scored`` tokens of each text, seen with so many tokens in all."""
    nats, total, batch = 0.0, 0, max(1, 8192 // context)
    for tokens, counts in zip(held.tokens.split(batch), held.bytes.split(batch), strict=True):
        rows = tokens[:, -context - 1 :]
        encoded = task.network(rows[:, :-1], sequence(context), length=context)
        nats += float(
            cross_entropy(
                encoded[:, -scored:].flatten(0, 1), rows[:, -scored:].flatten(), reduction="sum"
            )
        )
        total += int(counts[:, -scored:].sum())
    return nats / math.log(2) / total


def ways(
    load: Callable[[int], LanguageModel], trained: int, contexts: Sequence[int]
) -> Iterator[tuple[str, int, LanguageModel]]:
    """A model at each context in each way, with the way's name."""
    longest = max(contexts)
    for context in contexts:
        task = load(context)
        transformer = task.network.transformer
        yield "", context, task
        if not isinstance(transformer, Recurrent):
            own = transformer.windows
            transformer.windows = [min(w or trained, trained) for w in own]
            yield f"window {trained}", context, task
            transformer.windows = own
        rotary = [part for part in transformer.modules() if type(part) is RotaryEncoding]
        if not rotary or any(part.extension is not None for part in rotary):
            continue
        factors = [(name, context / trained) for name in EXTENSIONS]
        names = factors if context > trained else []
        names += [(f"{name}, fixed", longest / trained) for name in FIXED if longest > trained]
        for name, factor in names:
            for part in rotary:
                part.extend(EXTENSIONS[name.removesuffix(", fixed")](factor, trained))
            yield name, context, task
        for part in rotary:
            part.extend(None)


def loader(path: Path) -> tuple[Callable[[int], LanguageModel], int, dict[str, Any]]:
    """What loads the model of a checkpoint for a context, its trained context, its data's options.

    Raises: ValueError for a file that is no checkpoint of a language model.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        trained = int(stored["hyper_parameters"]["context"])
        options = dict(stored["datamodule_hyper_parameters"])
    except (OSError, KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        raise ValueError(f"{path} is no checkpoint of a language model") from error

    def load(context: int) -> LanguageModel:
        return LanguageModel.load_from_checkpoint(path, map_location="cpu", context=context).eval()

    return load, trained, {k: v for k, v in options.items() if not k.startswith("_")}


def name_of(path: Path, transformer: Transformer) -> tuple[str, str]:
    """A model's name and seed: of its folder ``NAME-SEED``, else its encodings and its path."""
    for part in path.parts[::-1]:
        name, _, seed = part.rpartition("-")
        if name and seed.isdigit():
            return name, seed
    slots = (transformer.additive, transformer.rotary, transformer.bias)
    used = [type(slot).__name__ for slot in slots if slot is not None]
    return " + ".join(used) or type(transformer).__name__, str(path)


def sweep(
    paths: Sequence[Path], contexts: Sequence[int], texts: int, scored: int
) -> tuple[list[Score], int]:
    """All scores, and the context that the models were trained on."""
    loaded = {path: loader(path) for path in paths}
    lengths = {trained for _, trained, _ in loaded.values()}
    if len(lengths) > 1:
        raise ValueError(f"the checkpoints were trained at different contexts: {sorted(lengths)}")
    (trained,) = lengths
    contexts = sorted({*contexts, trained})
    if contexts[0] < scored:
        raise ValueError(f"{scored} tokens are scored, a context has {contexts[0]}")
    scores, held = [], {}
    for path, (load, _, options) in loaded.items():
        # the test text depends neither on the seed nor on how much was trained on
        own = {**options, "eval_tokens": None, "seed": 0, "context": max(contexts), "batch_size": 1}
        key = str(sorted(own.items()))
        if key not in held:
            held[key] = held_out(Text(**own), max(contexts), texts)
        for way, context, task in ways(load, trained, contexts):
            name, seed = name_of(path, task.network.transformer)
            bits = bits_per_byte(task, held[key], context, scored)
            scores.append(Score(name, seed, way, context, bits))
    return scores, trained


Curves = dict[tuple[str, str], dict[int, list[float]]]
"""By model and way: the bits of all seeds at each context."""


def curves(scores: Sequence[Score]) -> Curves:
    out: Curves = defaultdict(lambda: defaultdict(list))
    for score in scores:
        out[score.model, score.way][score.context].append(score.bits)
    return out


def table(found: Curves, trained: int) -> Table:
    """A row for each model as it was trained, with its window beside it."""
    contexts = _contexts(found)
    longest, window = contexts[-1], f"window {trained}"
    title = f"bits per byte by context (* trained); {longest} w: with a window of {trained}"
    out = Table("model", *_heads(contexts, trained), f"{longest} w", title=title)
    for (name, way), curve in found.items():
        if not way:
            control = found.get((name, window), {}).get(longest)
            out.add_row(name, *(_cell(curve.get(c)) for c in contexts), _cell(control))
    return out


def extended(found: Curves) -> list[str]:
    """The models whose frequencies were changed."""
    return list(dict.fromkeys(name for name, way in found if way in EXTENSIONS))


def table_of(model: str, found: Curves, trained: int) -> Table:
    """A row for each way to change the frequencies of a model."""
    contexts = _contexts(found)
    out = Table(model, *_heads(contexts, trained), title=f"{model}, with other frequencies")
    for (name, way), curve in found.items():
        if name == model and not way.startswith("window"):
            out.add_row(way or "as trained", *(_cell(curve.get(c)) for c in contexts))
    return out


def _contexts(found: Curves) -> list[int]:
    return sorted({context for curve in found.values() for context in curve})


def _heads(contexts: Sequence[int], trained: int) -> list[str]:
    return [f"[bold]{context}*[/]" if context == trained else str(context) for context in contexts]


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "–"
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def picture(path: Path, found: Curves, trained: int) -> None:
    """All models as they were trained, and a panel for each with other frequencies."""
    names = extended(found)
    figure, panels = pyplot.subplots(
        1, 1 + len(names), figsize=(6 * (1 + len(names)), 5), sharey=True, squeeze=False
    )
    contexts = _contexts(found)
    for panel, title in zip(panels[0], ["as trained", *names], strict=True):
        panel.set_prop_cycle(color=colormaps["tab20"](range(20)))
        for (name, way), curve in found.items():
            label = (name if not way else "") if title == "as trained" else (way or "as trained")
            if not label or title not in ("as trained", name):
                continue
            means = [mean(curve[context]) for context in sorted(curve)]
            dashed = "fixed" in way or "window" in way
            panel.plot(sorted(curve), means, "o--" if dashed else "o-", label=label)
        panel.axvline(trained, color="grey", linestyle=":")
        panel.set(xscale="log", xlabel="context, tokens", title=title)
        panel.set_xticks(contexts, [str(context) for context in contexts])
        panel.minorticks_off()
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    panels[0][0].set_ylabel("bits per byte of the same bytes")
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Test language models at other contexts.")
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--train", action="store_true", help="train the models first")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 256, 512, 1024])
    parser.add_argument("--texts", type=int, default=100, help="texts whose end is scored")
    parser.add_argument("--scored", type=int, default=32, help="tokens of each that are scored")
    parser.add_argument("--output", type=Path, default=Path("runs/lengths"))
    chosen, options = parser.parse_known_args(argv)
    if options and not chosen.train:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if chosen.train == bool(chosen.checkpoints):
        parser.error(
            "name checkpoints, or give --train, with options for the command as --name=value"
        )
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    paths = chosen.checkpoints
    if chosen.train:
        models = {name: ["--config", "text", *MODELS[name]] for name in chosen.models}
        paths = train_all(models, chosen.seeds, chosen.output, chosen.jobs, options)
    try:
        scores, trained = sweep(paths, chosen.lengths, chosen.texts, chosen.scored)
    except ValueError as error:
        parser.error(str(error))
    chosen.output.mkdir(parents=True, exist_ok=True)
    with (chosen.output / "lengths.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Score._fields)
        writer.writerows(scores)
    found = curves(scores)
    console = Console(width=140)
    console.print(table(found, trained))
    for model in extended(found):
        console.print(table_of(model, found, trained))
    picture(chosen.output / "lengths.png", found, trained)
    console.print(f"written: {chosen.output / 'lengths.csv'}, {chosen.output / 'lengths.png'}")


if __name__ == "__main__":
    main()
