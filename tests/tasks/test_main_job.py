"""The shipped image job from beginning to end, at a small size: fit, test, predict, go on."""

import csv
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks import cli

SMALL = [
    "--data.image_size=[16, 24]",
    "--data.patch_size=8",
    "--data.train_samples=128",
    "--data.batch_size=32",
    "--model.transformer.depth=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["fit", "--config", "image", *SMALL, "--trainer.max_epochs=1"]) == 0
    return folder / "runs" / "image" / "version_0"


def test_what_a_run_leaves(run: Path) -> None:
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "config.yaml",
        "environment.json",
        "hparams.yaml",
        "metrics.csv",
    }
    with (run / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert 0 <= float(last["test/what_accuracy"]) <= 1 and float(last["test/loss"]) > 0


def test_the_checkpoint_alone_is_enough_to_test(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["test", f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}", "--trainer.accelerator=cpu"]
    assert cli.main([*args, "--trainer.enable_progress_bar=false"]) == 0
    with (run / "metrics.csv").open() as file:
        after_fit = float(list(csv.DictReader(file))[-1]["test/loss"])
    shown = capsys.readouterr().out
    assert f"{after_fit:.4f}" in shown, shown


def test_predict_a_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name in ("b.png", "a.png", "deep/c.jpg"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (30, 41, 3), dtype=np.uint8)).save(path)
    args = ["predict", f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"]
    args += ["--data.predict_folder=photos", "--trainer.accelerator=cpu"]
    assert cli.main([*args, "--trainer.enable_progress_bar=false"]) == 0
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["photos/a.png", "photos/b.png", "photos/deep/c.jpg"]
    for row in rows:
        assert row["where"] in {"top left", "top right", "bottom left", "bottom right"}
        assert 0.25 <= float(row["where_probability"]) <= 1
        assert 0.1 <= float(row["what_probability"]) <= 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_going_on_takes_what_is_typed_and_the_rest_from_the_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["fit", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}", "--trainer.max_epochs=2"]
    args += ["--model.lr=0.5", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.main([*args, "--test_after_fit=false"]) == 0
    saved = tmp_path / "runs" / "image" / "version_0" / "checkpoints" / "last.ckpt"
    stored = torch.load(saved, weights_only=True)
    assert stored["mmpos_trainer"]["gradient_clip_val"] == 1.0
    assert stored["mmpos_trainer"]["max_epochs"] == 2
    assert stored["global_step"] == 2 * 4
    assert stored["hyper_parameters"]["lr"] == 0.5
    assert stored["hyper_parameters"]["transformer"]["init_args"]["depth"] == 1
    assert stored["datamodule_hyper_parameters"]["train_samples"] == 128


def test_weights_of_another_width_are_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = f"--model.weights={run / 'checkpoints' / 'best.ckpt'}"
    wide = ["fit", "--config", "image", *SMALL, weights, "--model.transformer.dim=32"]
    assert cli.main(wide) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "mmpos: error" in line]
    assert "64" in line and "32" in line and "do not fit the model" in line


def test_predict_without_the_folder_that_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        for index in range(20):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    own = ["--data.source=folder", "--data.root=photos", "--data.batch_size=8"]
    small = [arg for arg in SMALL if "train_samples" not in arg and "batch_size" not in arg]
    assert cli.main(["fit", "--config", "image", *small, *own, "--trainer.max_epochs=1"]) == 0
    (tmp_path / "photos").rename(tmp_path / "moved")
    checkpoint = "--ckpt_path=runs/image/version_0/checkpoints/best.ckpt"
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.main(["predict", checkpoint, "--data.predict_folder=moved/cat", *quiet]) == 0
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 and list(rows[0]) == ["file", "class", "probability"]
    assert {row["class"] for row in rows} <= {"cat", "dog"}
    assert cli.main(["test", checkpoint, *quiet]) == 1


def test_fine_tuning_at_another_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The transformer comes from the weights' checkpoint, and its table is resized."""
    monkeypatch.chdir(tmp_path)
    first = ["fit", "--config", "image", "--config", "encoding/learned", *SMALL]
    assert cli.main([*first, "--trainer.max_epochs=1", "--test_after_fit=false"]) == 0
    weights = tmp_path / "runs" / "image" / "version_0" / "checkpoints" / "best.ckpt"
    again = ["fit", "--config", "finetune_resolution", f"--model.weights={weights}"]
    again += ["--data.image_size=[24, 40]", "--data.patch_size=8", "--data.train_samples=128"]
    again += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    assert cli.main([*again, "--trainer.max_epochs=1", "--test_after_fit=false"]) == 0
    folder = tmp_path / "runs" / "finetune_resolution" / "version_0" / "checkpoints"
    table = "network.transformer.additive.table"
    old = torch.load(weights, weights_only=True)
    new = torch.load(folder / "last.ckpt", weights_only=True)
    assert old["state_dict"][table].shape == (2, 3, 64)
    assert new["state_dict"][table].shape == (3, 5, 64)
    assert new["hyper_parameters"]["transformer"] == old["hyper_parameters"]["transformer"]
    assert new["hyper_parameters"]["lr"] == 5e-4 and new["global_step"] == 2


def test_the_sweep_over_sizes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    square = ["fit", "--config", "image", *SMALL, "--data.image_size=16", "--trainer.max_epochs=1"]
    assert cli.main([*square, "--test_after_fit=false"]) == 0
    trained = tmp_path / "runs" / "image" / "version_0" / "checkpoints" / "best.ckpt"
    script = Path(__file__).parents[2] / "scripts" / "resolution_sweep.py"
    main = runpy.run_path(str(script))["main"]
    for wrong in (run / "checkpoints" / "best.ckpt", tmp_path / "absent.ckpt"):
        with pytest.raises(SystemExit):
            main([str(wrong)])
    main([str(trained), "--sizes", "24", "--output", "sweep"])  # and the trained size
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["size"], row["question"]) for row in rows} == {
        (size, f"{question}_accuracy") for size in ("16", "24") for question in ("what", "where")
    }
    assert {row["way"] for row in rows} == {
        "RotaryEncoding, raw coordinates",
        "RotaryEncoding, scaled to the training grid",
    }
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 10_000
    assert "16*" in capsys.readouterr().out


def test_fine_tuning_from_a_file_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "finetune_resolution", "--model.weights=absent.ckpt"]) == 2
    assert "since absent.ckpt is missing or records no settings" in capsys.readouterr().err
