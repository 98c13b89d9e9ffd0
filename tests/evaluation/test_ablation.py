"""What may be compared as an ablation, and what its report says: planted pairs of runs."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mmpos.evaluation.ablation import ablation
from mmpos.evaluation.effective import Cell
from mmpos.evaluation.fingerprint import difference, encoding, fingerprint, labels
from mmpos.evaluation.results import ROWS, Results
from mmpos.evaluation.rows import Row
from mmpos.evaluation.runs import Run, grouped

ROPE = {"rotary": {"class_path": "mmpos.RotaryEncoding", "init_args": {"base": 10000.0}}}
ALIBI = {"bias": {"class_path": "mmpos.ALiBi", "init_args": {"distance": "euclidean"}}}
TABLE = {"additive": {"class_path": "mmpos.LearnedEncoding", "init_args": {"std": 0.02}}}
KINDS = [("single", 0), ("distractors", 3), ("conflict", 0)]


def config(slots: dict, seed: int = 0, **changes: object) -> dict:
    """As ``config.yaml`` is read; a change is of a path with dots."""
    network = {
        "size": "nano",
        "depth": 2,
        "additive": None,
        "rotary": None,
        "bias": None,
        "norm": {"class_path": "torch.nn.LayerNorm", "init_args": {"bias": True, "eps": 1e-5}},
    }
    made = {
        "seed_everything": seed,
        "model": {
            "class_path": "tasks.LanguageModel",
            "init_args": {
                "lr": 0.002,
                "extension": None,
                "transformer": {"class_path": "Transformer", "init_args": network | slots},
            },
        },
        "data": {
            "class_path": "tasks.data.Needles",
            "init_args": {"length": 64, "batch_size": 32, "seed": seed, "split_seed": 0},
        },
        "trainer": {
            "max_epochs": 4,
            "gradient_clip_val": 1.0,
            "logger": {"init_args": {"save_dir": "runs", "name": f"{slots}-{seed}"}},
            "callbacks": [{"class_path": "Checkpoint", "init_args": {"dirpath": None, "top": 1}}],
        },
    }
    for path, value in changes.items():
        *names, last = path.replace("__", ".").split(".")
        place = made
        for name in names:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        place[last] = value
    return made


def runs(slots: dict, seeds=(0, 1, 2), loss: float = 1.0, **given) -> list[Run]:
    name = "-".join(slots) or "none"
    settings = {"parameters": 1000, **given}
    return [
        Run(f"runs/{name}-{seed}", config(slots, seed), metrics={"test/loss": loss}, **settings)
        for seed in seeds
    ]


def results(right: int = 50, a7: str = "PASS", depths=(0.0, 0.5, 1.0), **given) -> Results:
    lengths = [64, 128, 256]
    cells = [
        Cell(task, length, depth, 50, right, distractors=distractors)
        for task, distractors in KINDS
        for length in lengths
        for depth in depths
    ]
    rows = {name: Row("PASS", "measured") for name in ROWS} | {"A7": Row(a7, "given")}
    rows["A12"] = Row("PASS", "measured", data={"accepted": 256})
    settings = {"claimed": 256, "lengths": lengths, "threshold": 0.8, "trained": 64}
    costs = {"64": dict.fromkeys(("train", "prefill", "decode", "peak", "kv_measured"), 1.0)}
    made = {"costs": costs, "settings": settings, "cells": cells, "rows": rows, **given}
    return Results(Path("long"), **made)


def test_the_encoding_alone_leaves_the_fingerprint() -> None:
    marks = {
        fingerprint(config(slots, seed))
        for slots in ({}, ROPE, ALIBI, TABLE, ROPE | {"per_layer": ["rotary"]})
        for seed in (0, 5)
    }
    assert len(marks) == 1 and re.fullmatch("[0-9a-f]{16}", marks.pop())
    extended = config(ROPE, model__init_args__extension={"class_path": "YaRN"})
    assert fingerprint(extended) == fingerprint(config(ROPE))
    assert fingerprint({}) != fingerprint(config({}))


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("model.init_args.lr", 0.001, "optimizer"),
        ("trainer.gradient_clip_val", 0.5, "optimizer"),
        ("trainer.max_epochs", 5, "amount of training"),
        ("data.init_args.batch_size", 64, "data"),
        ("data.init_args.split_seed", 1, "data"),
        ("model.init_args.transformer.init_args.depth", 3, "model"),
        ("model.init_args.transformer.init_args.norm.init_args.bias", False, "model"),
        ("model.init_args.transformer.class_path", "Recurrent", "model"),
        ("trainer.callbacks.0.init_args.top", 2, "training"),
        ("trainer.precision", "bf16-mixed", "training"),
        ("ckpt_path", "other.ckpt", "command"),
    ],
)
def test_all_else_is_refused_by_its_name(path: str, value: object, part: str) -> None:
    one, other = config(ROPE), config(ALIBI, **{path: value})
    assert fingerprint(one) != fingerprint(other)
    pair = [Run("runs/a", one), Run("runs/b", other)]
    with pytest.raises(ValueError, match="runs/a and runs/b differ in the ") as error:
        ablation(pair)
    assert f"the {part}: {path} is " in str(error.value) and "\n" not in str(error.value)
    assert str(value).lower() in str(error.value).lower()


def test_the_first_difference_is_named_with_how_many_more() -> None:
    two = {"model.init_args.lr": 0.1, "trainer.max_epochs": 9, "data.init_args.length": 8}
    said = difference(config({}), config({}, **two))
    assert said == "the data: data.init_args.length is 64 and 8 (and 2 more)"
    assert difference(config({}), config({})) is None


def test_what_is_the_same_hashes_the_same() -> None:
    one = config(ROPE)
    other = copy.deepcopy(dict(reversed(one.items())))
    other["trainer"]["gradient_clip_val"] = 1  # not 1.0
    other["trainer"]["plugins"] = None
    other["trainer"]["logger"] = False
    other["trainer"]["default_root_dir"] = "elsewhere"
    other["trainer"]["callbacks"][0]["init_args"]["dirpath"] = "there"
    other["trainer"]["log_every_n_steps"] = 7
    assert fingerprint(one) == fingerprint(other) and difference(one, other) is None
    other["trainer"]["deterministic"] = True  # neither 1 nor absent
    assert fingerprint(one) != fingerprint(other)


def test_encodings_are_told_apart() -> None:
    slower = copy.deepcopy(ROPE)
    slower["rotary"]["init_args"]["base"] = 500.0
    both = [encoding(config(slots)) for slots in ({}, ROPE, ROPE | TABLE, slower)]
    assert labels(both[:3]) == ["none", "RotaryEncoding", "LearnedEncoding + RotaryEncoding"]
    assert labels(both[1::2]) == ["RotaryEncoding (base=10000)", "RotaryEncoding (base=500)"]
    layers = {"rotary": [ROPE["rotary"], {"class_path": "torch.nn.Identity"}]}
    assert labels([encoding(config(layers))]) == ["RotaryEncoding + Identity"]
    extended = config(ROPE, model__init_args__extension={"class_path": "mmpos.frequencies.YaRN"})
    assert labels([encoding(extended)]) == ["RotaryEncoding + YaRN"]
    groups = grouped([*runs(ROPE), *runs(slower)])
    assert {name: list(own) for name, own in groups.items()} == {
        "RotaryEncoding (base=10000)": ["0", "1", "2"],
        "RotaryEncoding (base=500)": ["0", "1", "2"],
    }


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ([], "there are no runs: give runs of two"),
        (runs(ROPE), "all runs have one encoding, RotaryEncoding: give runs of two"),
        ([*runs(ROPE), *runs(ALIBI), *runs(ROPE, [1])], "the same encoding with the same seed, 1"),
        ([*runs(ROPE, [0, 1]), *runs(ALIBI, [2])], "(RotaryEncoding: 0, 1; ALiBi: 2)"),
    ],
)
def test_runs_that_cannot_be_compared(given: list[Run], line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        ablation(given)
    assert "\n" not in str(error.value)


def test_a_table_states_its_parameters() -> None:
    text, page = ablation([*runs(ROPE), *runs(TABLE, parameters=1064)])
    assert (
        "differ in size by up to 64 parameters, 6.4 % of the smallest, and LearnedEncoding" in text
    )
    assert "| 0, 1, 2 | 1,064 | +64 |" in text and "| 0, 1, 2 | 1,000 | +0 |" in text
    assert "rotary.base=10000" in text and "64 parameters" in page
    assert fingerprint(config(ROPE)) in text
    assert "Every model has 1,000 parameters." in ablation([*runs(ROPE), *runs(ALIBI)])[0]
    unknown = ablation([*runs(ROPE), *runs(ALIBI, parameters=None)])[0]
    assert "How many parameters ALiBi has learned is not known." in unknown


def test_seeds_that_differ_are_said_and_not_compared() -> None:
    ours, theirs = runs(ROPE), runs(ALIBI, (1, 2, 3), loss=1.01)
    ours[0].metrics["test/loss"] = 100.0  # type: ignore[index]  # of seed 0, which ALiBi lacks
    text, _ = ablation([*theirs, *ours])
    assert (
        "The seeds differ (ALiBi: 1, 2, 3; RotaryEncoding: 0, 1, 2), and compared are only 1 and 2."
        in text
    )
    assert "The encodings have 2 seeds in common where 3 are asked for" in text
    assert "seed 0 of ALiBi; seed 3 of RotaryEncoding; 1 of 3 seeds" in text
    assert "| RotaryEncoding | 1 (1–1) |" in text and "| ALiBi | 1.01 (1.01–1.01) |" in text
    whole, _ = ablation([*runs(ROPE), *runs(ALIBI)])
    assert "The seeds differ" not in whole and "in common" not in whole


def test_other_losses_at_the_trained_length_are_not_clean() -> None:
    for loss, said in ((1.019, "so that lengths beyond are compared cleanly"), (1.05, "not compa")):
        text, _ = ablation([*runs(ROPE), *runs(ALIBI, loss=loss)])
        assert said in text, loss
    text, _ = ablation([*runs(ROPE), *runs(ALIBI, loss=1.05)], tolerance=0.1)
    assert "5 % apart where 10 % is allowed, so that lengths beyond are compared cleanly" in text


def test_the_steps_name_what_is_missing() -> None:
    full, part = results(), results(a7="NOT RUN", depths=(0.5, 1.0), costs={"prefill": 1.0})
    text, _ = ablation([*runs(ROPE, results=full), *runs(ALIBI, results=part)])
    steps = [line for line in text.splitlines() if re.match(r"\| (\d|then) \| ", line)]
    alibi = "of runs/bias-0, runs/bias-1 and runs/bias-2"
    assert len(steps) == 7 and "Of the six steps 3 are done" in text
    assert steps[0].endswith("| done | nothing |") and steps[1].endswith("| done | nothing |")
    assert f"beginning at length 64 {alibi}; beginning at length 128 {alibi}" in steps[2]
    assert steps[3].endswith("| done | nothing |")
    assert f"train in costs.json {alibi}" in steps[4] and "kv in costs" in steps[4]
    assert "prefill" not in steps[4].partition("**incomplete**")[2]
    assert steps[5].endswith(f"| **incomplete** | row A7 {alibi} |")
    few = results()
    kept = [cell for cell in few.cells if cell.length < 256 and cell.task != "conflict"]
    few = replace(few, cells=kept, missing=("failures.jsonl",))
    text, _ = ablation([*runs(ROPE, results=full), *runs(ALIBI, results=few)])
    steps = [line for line in text.splitlines() if re.match(r"\| (\d|then) \| ", line)]
    assert steps[2].endswith(f"| **incomplete** | length 256 {alibi} |")
    assert steps[3].endswith(f"| **incomplete** | the task conflict {alibi} |")
    assert steps[6].endswith(f"| **incomplete** | failures.jsonl {alibi} |")
    none, _ = ablation([*runs(ROPE), *runs(ALIBI)])
    assert none.count("| **incomplete** | results of every run |") == 5
    assert "There are no results of every run." in none


def test_long_contexts_are_compared_over_shared_seeds() -> None:
    ours = [
        r
        for seed, right in enumerate((50, 40, 30))
        for r in runs(ROPE, [seed], results=results(right))
    ]
    theirs = [*runs(ALIBI, [0, 1], results=results()), *runs(ALIBI, [2])]
    text, _ = ablation([*ours, *theirs])
    assert "no results of runs/bias-2, and compared is what every encoding has of 0 and 1." in text
    assert "| single | 64 | 90 (80–100) | 100 (100–100) |" in text
    assert "With RotaryEncoding it is 0 at the least of the seeds, at the most 256 tokens." in text


def test_environments_that_differ_are_said() -> None:
    torch = {"packages": {"torch": "2.9"}, "device": "cpu", "git": {"commit": "abc", "changed": 0}}
    newer = torch | {"packages": {"torch": "2.10"}, "git": {"commit": "abc", "changed": 1}}
    text, _ = ablation([*runs(ROPE, environment=torch), *runs(ALIBI, environment=newer)])
    assert "The runs differ in the package torch, 2.10 and 2.9." in text
    assert "The runs differ in the commit, abc and abc with changes." in text
    assert "was not recorded" not in text and "in device" not in text
    assert "environment of every run was not recorded" in ablation([*runs(ROPE), *runs(ALIBI)])[0]


def test_the_same_runs_give_the_same_report() -> None:
    given = [*runs(ROPE, results=results(45)), *runs(ALIBI, results=results())]
    first = ablation(given)
    assert ablation(copy.deepcopy(given)) == first
    assert all(line.startswith(("#", "|", "- ")) for line in first[0].splitlines() if line)
    claims = [line for line in first[0].splitlines() if line.startswith("- ")]
    assert all(re.search(r"\. \((formula|paper|local): .*\)$", line) for line in claims)
