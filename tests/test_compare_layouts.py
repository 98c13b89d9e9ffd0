"""The comparison of layouts: scores and blanking against a plain computation."""

import csv
import runpy
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
