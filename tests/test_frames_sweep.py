"""The sweep over frame counts, rates and sizes: each score against a plain computation."""

import csv
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmpos
from tasks import VideoClassification, cli
from tasks.data.motion import Motion

SCRIPTS = Path(__file__).parents[1] / "scripts"
COUNT = 20
FEW = ["--data.train_samples=32", "--data.eval_samples=4", "--trainer.max_epochs=1"]
FEW += ["--model.transformer.depth=1", "--model.transformer.dim=32"]
FEW += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
OPTIONS = ["--frames", "9", "--rates", "4", "16", "--sizes", "64", "--clips", str(COUNT)]
TABLE = "network.transformer.additive.table"
NORMAL = {"mean": 0.0517, "std": 0.1767}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Callable[..., None]]:
    """Two models as ``--train`` makes them, and the script's main."""
    folder = tmp_path_factory.mktemp("frames")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(SCRIPTS)
        for name, over in (("RoPE-0", []), ("learned-0", ["--config", "encoding/learned"])):
            run = [f"--trainer.logger.name={name}"]
            assert cli.main(["fit", "--config", "video", *over, *FEW, *run]) == 0
        main = runpy.run_path(str(SCRIPTS / "frames_sweep.py"))["main"]
    paths = [
        folder / "runs" / name / "version_0" / "checkpoints" / "best.ckpt"
        for name in ("RoPE-0", "learned-0")
    ]
    for path in paths:  # so few steps give every clip the same answer
        stored = torch.load(path, weights_only=True)
        torch.manual_seed(0)
        for name, weight in stored["state_dict"].items():
            if name.startswith("network") and weight.ndim > 1:
                weight.normal_(std=0.3)
        torch.save(stored, path)
    return paths, main


def plainly(
    task: VideoClassification,
    data: Motion,
    ticks: float | None = None,
) -> dict[str, float]:
    """The part of right answers, clip by clip."""
    task.ticks = ticks
    right = {"what": 0, "how": 0}
    for index in range(COUNT):
        frames, labels = data[index]
        with torch.no_grad():
            answers = task(frames[None], None, 1 / data.fps)
        for question in right:
            right[question] += int(answers[question].argmax() == labels[question])
    return {question: found / COUNT for question, found in right.items()}


def test_scores_are_those_of_a_plain_computation(sweep, tmp_path: Path) -> None:
    paths, main = sweep
    main([*map(str, paths), *OPTIONS, "--output", str(tmp_path)])
    with (tmp_path / "frames.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "frames.png").stat().st_size > 10_000
    found = {
        (r["model"], r["kind"], float(r["value"]), r["way"], r["question"]): float(r["right"])
        for r in rows
    }
    assert len(found) == len(rows)
    task = VideoClassification.load_from_checkpoint(paths[0], map_location="cpu").eval()
    expected = {
        ("frames", 16, ""): plainly(task, Motion("test", COUNT, **NORMAL)),
        ("frames", 9, ""): plainly(task, Motion("test", COUNT, seconds=9 / 8, **NORMAL)),
        ("fps", 4, ""): plainly(task, Motion("test", COUNT, fps=4, **NORMAL)),
        ("fps", 16, ""): plainly(task, Motion("test", COUNT, fps=16, **NORMAL)),
        ("fps", 16, "seconds"): plainly(task, Motion("test", COUNT, fps=16, **NORMAL), 8.0),
        ("size", 64, ""): plainly(task, Motion("test", COUNT, size=(64, 64), **NORMAL)),
    }
    for key, right in expected.items():
        for question, value in right.items():
            assert found["RoPE", *key, question] == pytest.approx(value, abs=1e-6), key
    ways = {(kind, value, way) for model, kind, value, way, _ in found if model == "learned"}
    assert ways == {
        *(("frames", 9, "resized"), ("frames", 9, "rows kept"), ("frames", 16, "")),
        *(("fps", 4, "resized"), ("fps", 4, "seconds"), ("fps", 8, ""), ("fps", 8, "seconds")),
        *(("fps", 16, "resized"), ("fps", 16, "seconds")),
        *(("size", 32, ""), ("size", 64, "resized"), ("size", 64, "patches resized")),
        ("shuffled", 16, ""),
    }
    # at the trained rate the seconds of a frame are its number
    for model in ("RoPE", "learned"):
        for question in ("what", "how"):
            same = [found[model, "fps", 8, way, question] for way in ("", "seconds")]
            assert same[0] == same[1] == found[model, "frames", 16, "", question]


def test_a_table_goes_on_as_its_way_says(sweep) -> None:
    paths, main = sweep
    trained = main.__globals__["Trained"](paths[1])
    ways = main.__globals__["TABLES"]
    stored = torch.load(paths[1], weights_only=True)["state_dict"][TABLE]
    assert stored.shape == (16, 2, 2, 32) and trained.ticks == 8
    longer, shorter = trained.data(frames=24), trained.data(frames=9)
    resized, kept, first = (
        trained.model(data, ways[way]).network.transformer.additive.table.data
        for way, data in (("resized", longer), ("rows kept", longer), ("rows kept", shorter))
    )
    assert torch.equal(kept, torch.cat((stored, stored[:8]))) and torch.equal(first, stored[:9])
    plain = torch.nn.functional.interpolate(stored.flatten(1).T[None], 24, mode="linear")[
        0
    ].T.unflatten(1, (2, 2, 32))
    torch.testing.assert_close(resized, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name checkpoints, or give --train"),
        (["x.ckpt", "--data.frames=3"], "unrecognized arguments: --data.frames=3"),
        (["other.ckpt"], "other.ckpt is no checkpoint of a classifier of video"),
        (["nothing.ckpt"], "nothing.ckpt is no checkpoint of a classifier of video"),
    ],
)
def test_what_cannot_be_swept_is_one_line(
    sweep, arguments, message, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = torch.load(sweep[0][0], weights_only=True)
    stored["hyper_parameters"]["_class_path"] = "tasks.MultimodalClassification"
    torch.save(stored, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        sweep[1](arguments)
    assert message in capsys.readouterr().err


def test_conditions_are_of_the_data_and_positions_that_they_say(sweep) -> None:
    paths, main = sweep
    for path, encoding in zip(paths, ("rotary", "additive"), strict=True):
        trained = main.__globals__["Trained"](path)
        found = {
            (c.kind, c.value, c.way): c
            for c in main.__globals__["conditions"](trained, [], [16.0], [64])
        }
        assert found["frames", 16, ""].data.order == "real"
        assert found["shuffled", 16, ""].data.order == "shuffled"
        of = {
            key: getattr(condition.task.network.transformer, encoding).coordinates
            for key, condition in found.items()
        }
        if encoding == "additive":  # read at the positions that it is given
            assert type(of["fps", 16, "seconds"]) is mmpos.coordinates.Index
        else:  # height and width alone are scaled
            cells = torch.tensor([[9, 3, 3]])
            places = of["size", 64, "scaled"](cells, axes=(16, 2, 2), extent=(16, 4, 4))
            assert places.tolist() == [[9, 1.5, 1.5]]


def test_positions_in_a_second_are_tubelets_in_a_second(sweep, tmp_path: Path) -> None:
    paths, main = sweep
    stored = torch.load(paths[0], weights_only=True)
    stored["hyper_parameters"]["patch_size"] = [2, 16, 16]
    torch.save(stored, tmp_path / "two.ckpt")
    assert main.__globals__["Trained"](tmp_path / "two.ckpt").ticks == 4


def test_a_table_has_one_question_and_what_is_varied(sweep) -> None:
    scope = sweep[1].__globals__
    scores = [
        scope["Score"]("m", seed, "", kind, value, question, right)
        for seed, kind, value, question, right in (
            ("0", "fps", 8.0, "how", 0.25),
            ("1", "fps", 8.0, "how", 0.5),
            ("0", "fps", 4.0, "what", 0.75),
            ("0", "frames", 9.0, "how", 1.0),
        )
    ]
    table = scope["table"](scores, "fps", "how")
    assert [column.header for column in table.columns] == ["model", "8"]
    assert [list(column.cells) for column in table.columns] == [["m"], ["37.5 (25–50)"]]


def test_a_checkpoint_is_named_by_the_nearest_folder_and_is_of_embedded_data(
    sweep, tmp_path: Path
) -> None:
    paths, main = sweep
    stored = torch.load(paths[0], weights_only=True)
    own = tmp_path / "sweep-7" / "M-RoPE-12" / "version_0" / "best.ckpt"
    own.parent.mkdir(parents=True)
    torch.save(stored, own)
    assert main.__globals__["Trained"](own).name == ("M-RoPE", "12")
    stored["datamodule_hyper_parameters"]["source"] = "folder"
    torch.save(stored, own)
    with pytest.raises(ValueError, match="was not trained on the embedded data"):
        main.__globals__["Trained"](own)
