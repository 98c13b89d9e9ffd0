"""The comparison of layouts: scores and blanking against a plain computation."""

import argparse
import csv
import importlib
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tasks import MultimodalClassification, cli
from tasks.data import Multimodal

SCRIPTS = Path(__file__).parents[1] / "scripts"
COUNT = 20
FEW = ["--data.train_samples=64", "--data.eval_samples=4", "--trainer.max_epochs=1"]
FEW += ["--model.transformer.depth=1", "--trainer.accelerator=cpu"]
FEW += ["--trainer.enable_progress_bar=false", "--trainer.logger.name=M-RoPE-3"]


def test_scores_are_those_of_each_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)
    assert cli.main(["fit", "--config", "multimodal", *FEW]) == 0
    best = tmp_path / "runs" / "M-RoPE-3" / "version_0" / "checkpoints" / "best.ckpt"
    stored = torch.load(best, weights_only=True)
    torch.manual_seed(0)
    for name, weight in stored["state_dict"].items():
        if name.startswith("network") and weight.ndim > 1:
            weight.normal_(std=0.3)  # so few steps give every row the same answer
    torch.save(stored, best)
    main = runpy.run_path(str(SCRIPTS / "compare_layouts.py"))["main"]
    main([str(best), "--pages", str(COUNT), "--output", str(tmp_path)])
    with (tmp_path / "layouts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and {(r["model"], r["seed"]) for r in rows} == {("M-RoPE", "3")}
    task = MultimodalClassification.load_from_checkpoint(best, map_location="cpu").eval()
    data = Multimodal(eval_samples=COUNT, batch_size=1)
    data.setup("test")
    for blank in ("", "text", "image", "audio"):
        right = {"what": 0, "where": 0}
        for mixed, labels in data.test_dataloader():
            own = {
                k: None if blank and k.startswith(blank) else v for k, v in mixed._asdict().items()
            }
            with torch.no_grad():
                answers = task(**own)
            for question in right:
                right[question] += int(answers[question].argmax() == labels[question])
        found = {r["question"]: float(r["right"]) for r in rows if r["blank"] == blank}
        assert found == pytest.approx({q: n / COUNT for q, n in right.items()}), blank


def test_what_cannot_be_compared_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    main = runpy.run_path(str(SCRIPTS / "compare_layouts.py"))["main"]
    with pytest.raises(SystemExit):
        main(["nothing.ckpt"])
    assert "nothing.ckpt is no checkpoint of a multimodal classifier" in capsys.readouterr().err


def test_a_table_has_a_column_for_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    scope = runpy.run_path(str(SCRIPTS / "compare_layouts.py"))
    scores = [
        scope["Score"]("m", str(seed), blank, question, (place + seed) / 10 + (question == "what"))
        for seed in (0, 1)
        for place, blank in enumerate(("", "text", "image", "audio"))
        for question in ("what", "where")
    ]
    table = scope["table"](scores, "where")
    assert [(column.header, *column.cells) for column in table.columns] == [
        ("positions", "m"),
        ("all", "5.0 (0–10)"),
        ("without text", "15.0 (10–20)"),
        ("without image", "25.0 (20–30)"),
        ("without audio", "35.0 (30–40)"),
    ]


def test_each_model_is_trained_by_its_own_options_and_each_seed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    sweeps, trainer = (
        importlib.import_module("sweeps"),
        importlib.import_module("compare_encodings"),
    )
    runs = []

    def train(model: str, seed: int, folder: Path, options: Sequence[str]) -> dict:
        best = folder / f"{model}-{seed}" / "version_0" / "checkpoints" / "best.ckpt"
        best.parent.mkdir(parents=True)
        best.touch()
        runs.append((model, seed, [*options]))
        return {"model": model, "seed": seed}

    monkeypatch.setattr(trainer, "train", train)
    models = {"M-R": ["--x=1"], "none": [], "left out": []}
    argv = ["--train", "--seeds", "0", "3", "--models", "M-R", "none", "--data.y=2"]
    argv += ["--output", str(tmp_path)]
    for _ in range(2):  # what is trained is not trained again
        _, paths = sweeps.parsed(argparse.ArgumentParser(), models, "job", "runs", argv)
        assert [path.relative_to(tmp_path).parts[0] for path in paths] == [
            *("M-R-0", "none-0", "M-R-3", "none-3")
        ]
        assert all(path.is_file() for path in paths)
        assert runs == [
            (name, seed, ["--config", "job", *models[name], "--data.y=2"])
            for seed in (0, 3)
            for name in ("M-R", "none")
        ]
    assert (tmp_path / "runs.csv").read_text().split() == [
        *("model,seed", "M-R,0", "none,0", "M-R,3", "none,3")
    ]
