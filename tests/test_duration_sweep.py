"""The sweep over durations, hops and rates: each score against a plain computation."""

import csv
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks import AudioClassification, cli
from tasks.data.audio_files import resample
from tasks.data.features import Features
from tasks.data.spoken import SpokenDigits

SCRIPTS = Path(__file__).parents[1] / "scripts"
COUNT = 30
FEW = ["--data.train_samples=32", "--data.eval_samples=4", "--trainer.max_epochs=1"]
FEW += ["--model.transformer.depth=1", "--model.transformer.dim=32"]
FEW += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
OPTIONS = ["--digits", "24", "--hops", "0.02", "--rates", "16000", "--sequences", str(COUNT)]
TABLE = "network.transformer.additive.table"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Callable[..., None]]:
    """Two models as ``--train`` makes them, and the script's main."""
    folder = tmp_path_factory.mktemp("durations")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(SCRIPTS)
        for name, over in (("sinusoidal-0", []), ("learned-0", ["--config", "encoding/learned"])):
            run = [f"--trainer.logger.name={name}"]
            assert cli.main(["fit", "--config", "audio", *over, *FEW, *run]) == 0
        main = runpy.run_path(str(SCRIPTS / "duration_sweep.py"))["main"]
    paths = [
        folder / "runs" / name / "version_0" / "checkpoints" / "best.ckpt"
        for name in ("sinusoidal-0", "learned-0")
    ]
    for path in paths:  # so few steps give every clip the same answer
        stored = torch.load(path, weights_only=True)
        torch.manual_seed(0)
        for name, weight in stored["state_dict"].items():
            if name.startswith("network") and name != TABLE and weight.ndim > 1:
                weight.normal_(std=0.5)
        torch.save(stored, path)
    return paths, main


def plainly(
    task: AudioClassification,
    digits: tuple[int, int],
    features: Features,
    ticks: float | None = None,
    window: int | None = None,
) -> float:
    """The part of right answers, clip by clip, in windows that share a half."""
    task.ticks = ticks
    said = SpokenDigits("test", COUNT, digits)
    right = 0
    for index in range(COUNT):
        sound, labels = said[index]
        sound = resample(sound, 8000, features.rate)
        parts = [sound]
        if window and len(sound) > window:
            last = len(sound) - window
            starts = [*range(0, last, window // 2), last]
            parts = [sound[start : start + window] for start in starts]
        with torch.no_grad():
            logits = [task(features(part)[None], None, features.step) for part in parts]
        for question, label in labels.items():
            mean = torch.stack([each[question][0] for each in logits]).mean(0)
            right += int(mean.argmax() == label)
    return right / COUNT / 2


def test_scores_are_those_of_a_plain_computation(sweep, tmp_path: Path) -> None:
    paths, main = sweep
    main([*map(str, paths), *OPTIONS, "--output", str(tmp_path)])
    with (tmp_path / "durations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (tmp_path / "durations.png").stat().st_size > 10_000
    found = {(r["model"], r["kind"], float(r["value"]), r["way"]): r for r in rows}
    assert len(found) == len(rows) == 12
    task = AudioClassification.load_from_checkpoint(paths[0], map_location="cpu").eval()
    own = Features(rate=8000, bins=40, per_bin=True)
    slow = Features(rate=8000, bins=40, per_bin=True, hop=0.02, high=4000.0)
    high = Features(rate=16000, bins=40, per_bin=True, high=4000.0)
    expected = {
        ("digits", 0, ""): plainly(task, (7, 10), own),
        ("digits", 24, ""): plainly(task, (24, 24), own),
        ("digits", 24, "windows"): plainly(task, (24, 24), own, window=80000),
        ("hop", 0.02, ""): plainly(task, (7, 10), slow),
        ("hop", 0.02, "seconds"): plainly(task, (7, 10), slow, ticks=25.0),
        ("rate", 16000, ""): plainly(task, (7, 10), high),
    }
    for key, value in expected.items():
        assert float(found["sinusoidal", *key]["right"]) == pytest.approx(value, abs=1e-6), key
    said = SpokenDigits("test", COUNT, (24, 24))
    seconds = sum(said.utterance(i).samples for i in range(COUNT)) / 8000 / COUNT
    assert float(found["learned", "digits", 24, "copies"]["seconds"]) == pytest.approx(seconds)
    assert {way for model, kind, _, way in found if (model, kind) == ("learned", "digits")} == {
        *("", "resized", "copies", "windows")
    }


def test_a_table_goes_on_as_its_way_says(sweep) -> None:
    paths, main = sweep
    trained = main.__globals__["Trained"](paths[1])
    ways = main.__globals__["TABLES"]
    stored = torch.load(paths[1], weights_only=True)["state_dict"][TABLE]
    assert stored.shape == (251, 32) and trained.ticks == 25
    resized, copies = (
        trained.model(2001, ways[way]).network.transformer.additive.table.data
        for way in ("resized", "copies")
    )
    assert resized.shape == copies.shape == (501, 32)
    assert torch.equal(copies[:251], stored) and torch.equal(copies[251:], stored[:250])
    plain = torch.nn.functional.interpolate(stored.T[None], 501, mode="linear")[0].T
    torch.testing.assert_close(resized, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name checkpoints, or give --train"),
        (["x.ckpt", "--data.bins=3"], "unrecognized arguments: --data.bins=3"),
        (["nothing.ckpt"], "nothing.ckpt is no checkpoint of a classifier of sound"),
    ],
)
def test_what_cannot_be_swept_is_one_line(sweep, arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        sweep[1](arguments)
    assert message in capsys.readouterr().err
