"""The shipped text job from beginning to end, and mistakes in it."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import cli

FEW = ["--data.train_tokens=20000", "--data.eval_tokens=3000", "--trainer.accelerator=cpu"]
OTHER = ["--trainer.max_epochs=1", "--model.tied=false", "--model.ema=0.9"]  # not the default
FEW += ["--trainer.enable_progress_bar=false"]


def test_the_shipped_job_fits_tests_predicts_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "text", *FEW, *OTHER]) == 0
    folder = tmp_path / "runs" / "text" / "version_0"
    with (folder / "metrics.csv").open() as file:
        after_fit = list(csv.DictReader(file))[-1]
    bits = float(after_fit["test/bits_per_byte"])
    assert 2 < bits < 8 and f"{bits:.3f}" in capsys.readouterr().out
    best = str(folder / "checkpoints" / "best.ckpt")
    stored = torch.load(best, weights_only=True)["hyper_parameters"]
    assert (stored["vocabulary"], stored["context"]) == (257, 128)
    quietly = FEW[2:]
    assert cli.main(["test", "--ckpt_path", best, *quietly]) == 0
    shown = re.search(r"test/bits_per_byte\D+([\d.]+)", capsys.readouterr().out)
    assert shown and float(shown[1]) == pytest.approx(bits, rel=1e-5)
    longer = ['--data.prompts=[def main, "import\\nos"]', "--model.count=6"]
    assert cli.main(["predict", "--ckpt_path", best, *longer, *quietly]) == 0
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        answers = list(csv.DictReader(file))
    assert [answer["prompt"] for answer in answers] == ["def main", "import\nos"]
    assert all(set(answer) == {"prompt", "text"} and answer["text"] for answer in answers)
    last = str(folder / "checkpoints" / "last.ckpt")
    assert cli.main(["fit", "--ckpt_path", last, "--trainer.max_epochs=2", *quietly]) == 0
    begun = ["--model.weights", best, "--trainer.max_epochs=1", "--config", "text"]
    assert cli.main(["fit", *FEW, *begun]) == 0


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--model.context=64", "model.context comes from the data: use --data.context 64"),
        ("--model.vocabulary=64", "model.vocabulary comes from the data, by its source: leave"),
        ("--model.transformer.causal=false", "set causal to true"),
        ("--data.root=x", "add --data.source files"),
        ("--data.train_tokens=99999999", "the training text has"),
    ],
)
def test_mistakes_are_one_line(
    given: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "text", given, *FEW[1:]]) != 0
    told = [t for t in capsys.readouterr().err.splitlines() if "mmpos: error: " in t]
    assert len(told) == 1 and line in told[0]
