"""The script: run folders as the command writes them, results beside them, one-line refusals."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

SCRIPTS = Path(__file__).parents[1] / "scripts"
SLOTS = {"rope": {"rotary": {"class_path": "mmpos.RotaryEncoding"}}, "none": {"rotary": None}}


@pytest.fixture(scope="module")
def main() -> Callable[..., None]:
    return runpy.run_path(str(SCRIPTS / "ablation.py"))["main"]


def write_run(folder: Path, kind: str, seed: int, lr: float = 0.002, more: int = 0) -> Path:
    run = folder / f"{kind}-{seed}" / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    network = {"class_path": "Transformer", "init_args": SLOTS[kind]}
    config = {
        "seed_everything": seed,
        "model": {"class_path": "Task", "init_args": {"lr": lr, "transformer": network}},
        "trainer": {"max_epochs": 2, "logger": {"init_args": {"name": f"{kind}-{seed}"}}},
        "ckpt_path": str(run / "checkpoints" / "last.ckpt") if seed else None,
    }
    (run / "config.yaml").write_text("# lightning.pytorch==2.6.6\n" + yaml.safe_dump(config))
    (run / "environment.json").write_text(
        json.dumps([{"device": f"gpu {seed}"}, {"device": "cpu"}])
    )
    (run / "metrics.csv").write_text(
        f"epoch,step,test/loss,train/loss\n0,24,,3.5\n1,49,9.0,\n2,50,{1.5 + seed / 10},\n"
    )
    weights = {"network.a": torch.zeros(3, 5), "network.b": torch.zeros(7 + more)}
    stored = {"state_dict": {**weights, "metrics.total": torch.zeros(99)}}
    torch.save(stored, run / "checkpoints" / "best.ckpt")
    return run


def write_results(folder: Path, named: str = "model") -> Path:
    folder.mkdir(parents=True)
    settings = {"name": named, "claimed": 64, "lengths": [64], "threshold": 0.8, "trained": 64}
    rows = {
        f"A{n}": {"status": "PASS", "evidence": "", "data": {"accepted": 64}} for n in range(1, 13)
    }
    cell = {"task": "single", "length": 64, "depth": 0.0, "n": 50, "right": 41}
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "cells.jsonl").write_text(json.dumps(cell) + "\n")
    return folder


def test_runs_are_compared(main, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = [write_run(tmp_path, "none", seed) for seed in range(3)]
    runs += [write_run(tmp_path, "rope", seed, more=2) for seed in range(3)]
    out = tmp_path / "out"
    given = [*map(str, runs), "--output", str(out)]
    main(given)
    text, page = ((out / f"ablation.{ending}").read_text() for ending in ("md", "html"))
    assert "differ in size by up to 2 parameters, 9.09 % of the smallest" in text
    assert "| RotaryEncoding | 1.6 (1.5–1.7) |" in text and "train/loss" not in text
    assert "| done | nothing |" in text and "not recorded" not in text
    assert "The runs differ in" not in text  # as the last start of each had it
    assert page.startswith("<!DOCTYPE html>") and "results of every run" in page
    said = capsys.readouterr().out
    assert "fingerprint" in said and "ablation.html" in said
    main(given)
    assert (out / "ablation.md").read_text() == text
    assert (out / "ablation.html").read_text() == page


def test_results_belong_to_their_run(main, tmp_path: Path) -> None:
    runs = {kind: write_run(tmp_path, kind, 0) for kind in SLOTS}
    inside = write_results(runs["rope"] / "long")
    named = write_results(tmp_path / "named", str(runs["none"] / "checkpoints" / "best.ckpt"))
    text = None
    for none in (str(named), f"{runs['none']}={write_results(tmp_path / 'told')}"):
        given = [*map(str, runs.values()), "--results", str(inside), none]
        main([*given, "--output", str(tmp_path / "out")])
        found = (tmp_path / "out" / "ablation.md").read_text()
        assert "| single | 64 | 82 | 82 |" in found and "no results" not in found
        assert text in (None, found)
        text = found


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: write_run(f, "rope", 1, lr=0.004), "the optimizer: model.init_args.lr is 0.002"),
        (lambda f: f / "nowhere", "nowhere has no config.yaml: give that of a run"),
        (lambda f: f / "none-0", "none-0 has no config.yaml: give "),
        (
            lambda f: (
                (write_run(f, "rope", 1) / "config.yaml").write_text("a: [")
                and f / "rope-1" / "version_0"
            ),
            "config.yaml is damaged",
        ),
        (
            lambda f: (
                (write_run(f, "rope", 1) / "checkpoints" / "best.ckpt").write_text("?")
                and f / "rope-1" / "version_0"
            ),
            "best.ckpt is no checkpoint of a run",
        ),
        (
            lambda f: (
                (write_run(f, "rope", 1) / "environment.json").write_text("[]")
                and f / "rope-1" / "version_0"
            ),
            "environment.json is damaged",
        ),
    ],
)
def test_refusals_are_one_line(main, tmp_path, change, line, capsys) -> None:
    runs = [write_run(tmp_path, kind, 0) for kind in SLOTS]
    with pytest.raises(SystemExit):
        main([*map(str, runs), str(change(tmp_path)), "--output", str(tmp_path / "out")])
    error = capsys.readouterr().err.splitlines()[-1]
    assert line in error and not (tmp_path / "out").exists()


def test_results_of_no_run_are_refused(main, tmp_path: Path, capsys) -> None:
    runs = [write_run(tmp_path, kind, 0) for kind in SLOTS]
    stray = write_results(tmp_path / "stray")
    two = [write_results(runs[0] / name) for name in ("one", "two")]
    cases = (
        ([stray], f"is of 0 of the runs: give it as RUN={stray}"),
        ([f"{tmp_path}={stray}"], "is of 0 of the runs"),
        (two, f"are both of {runs[0]}: give one"),
        ([tmp_path], "has no settings.json"),
    )
    for given, line in cases:
        with pytest.raises(SystemExit):
            main([*map(str, runs), "--results", *map(str, given)])
        assert line in capsys.readouterr().err.splitlines()[-1]
