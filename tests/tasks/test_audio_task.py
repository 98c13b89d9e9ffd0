"""Classification of sound: the task, its job, its predictions, and several processes."""

import csv
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import soundfile
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import mmpos
from mmpos.models import FrameEmbedding, SpectrogramPatches, Transformer
from tasks import AudioClassification, cli
from tasks.data import Audio
from tasks.data.features import Features
from tasks.data.sounds import Sound
from tasks.metrics import MeanAveragePrecision

RATE = 8000
FEATURES = Features(rate=RATE, bins=20)
SINUSOIDAL = partial(Transformer, size="nano", depth=1, additive=mmpos.SinusoidalEncoding)
ROPE = partial(Transformer, size="nano", depth=1, rotary=mmpos.RotaryEncoding)
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


def silence(draw: np.random.Generator) -> np.ndarray:
    return np.zeros(round(draw.uniform(0.06, 0.12) * RATE))


@pytest.fixture
def tones(tmp_path: Path) -> Path:
    """Two tones with silence around each, the higher one last in ``up`` and first in ``down``, and
    a table of these and of what is ``high``.
    """
    draw = np.random.default_rng(0)
    rows = []
    for label, order in (("up", 1), ("down", -1)):
        (tmp_path / "tones" / label).mkdir(parents=True)
        for k in range(60):
            pitches = sorted(draw.uniform(300, 3000, 2))[::order]
            parts = [silence(draw)]
            for pitch in pitches:
                ticks = np.arange(round(draw.uniform(0.1, 0.25) * RATE))
                parts += [np.sin(2 * np.pi * pitch * ticks / RATE), silence(draw)]
            sound = np.concatenate(parts)
            soundfile.write(tmp_path / "tones" / label / f"{k}.wav", sound * 0.5, RATE)
            marks = [label, *(["high"] if max(pitches) > 2000 else [])]
            rows.append(f"{label}/{k}.wav,{';'.join(marks)}")
    for split, part in (("train", rows[:40] + rows[60:100]), ("val", rows[40:45] + rows[100:])):
        text = "\n".join(["file,labels", *part, ""])
        (tmp_path / "tones" / f"{split}.csv").write_text(text)
    return tmp_path / "tones"


def make(**options) -> AudioClassification:
    settings = {"transformer": SINUSOIDAL, "classes": ["down", "up"], "bins": 20, "frames": 101}
    return AudioClassification(**settings | options)


def sounds(root: Path, source: str = "folder", **options) -> Audio:
    return Audio(source, root, **{"features": FEATURES, "seconds": 1.0, "batch_size": 8} | options)


def trainer(folder: Path, **options) -> L.Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False} | options
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def alone(task: AudioClassification, data: Audio, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of each clip by itself, and labels."""
    samples = data.samples(split)
    items = [samples[i] for i in range(len(samples))]
    with torch.no_grad():
        logits = [
            torch.stack([task(window[None])["class"][0] for window in own]).mean(0)
            for own, _ in items
        ]
    return torch.stack(logits), torch.stack([torch.as_tensor(each["class"]) for _, each in items])


@pytest.mark.parametrize("longer", ["raise", "windows"])
def test_metrics_are_those_of_each_clip_alone(tones: Path, tmp_path: Path, longer) -> None:
    data = sounds(tones, batch_size=5, longer=longer, seconds=1.0 if longer == "raise" else 0.2)
    task = make().eval()
    (found,) = trainer(tmp_path).test(task, datamodule=data, verbose=False)
    logits, labels = alone(task, data, "test")
    assert len(labels) == 12
    assert found["test/loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)
    right = (logits.argmax(-1) == labels).float().mean()
    assert found["test/class_accuracy"] == pytest.approx(float(right))
    longest = max(len(data.samples("test")[i][0]) for i in range(12))
    assert (longest > 1) == (longer == "windows")


def test_any_number_of_labels_is_scored_by_average_precision(tones: Path, tmp_path: Path) -> None:
    data = sounds(tones, "table", batch_size=7)
    assert data.multilabel and data.classes == {"class": ["down", "high", "up"]}
    task = make(classes=data.classes, multilabel=True).eval()
    (found,) = trainer(tmp_path).validate(task, datamodule=data, verbose=False)
    logits, labels = alone(task, data, "val")
    assert len(labels) == 25 and set(labels.sum(-1).tolist()) == {1, 2}
    mean = binary_cross_entropy_with_logits(logits, labels)
    assert found["val/loss"] == pytest.approx(float(mean), rel=1e-5)
    precision = [one_average_precision(logits[:, c], labels[:, c] == 1) for c in range(3)]
    assert found["val/mAP"] == pytest.approx(sum(precision) / 3, abs=1e-6)


def test_a_class_that_never_occurs_has_no_precision_and_large_logits_are_told_apart() -> None:
    metric = MeanAveragePrecision(3)
    logits = torch.tensor([[20.0, 3.0, 1.0], [25.0, 0.0, 2.0], [30.0, 1.0, 3.0], [-3.0, 2.0, 4.0]])
    labels = torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 0], [1, 0, 0]])
    metric.update(logits[:2], labels[:2])
    metric.update(logits[2:], labels[2:])
    each = [one_average_precision(logits[:, c], labels[:, c] == 1) for c in (0, 1)]
    assert each[0] == pytest.approx(0.75)
    assert float(metric.compute()) == pytest.approx(sum(each) / 2)
    metric.reset()
    metric.update(logits, torch.zeros_like(labels))
    assert metric.compute().isnan()


def one_average_precision(scores: torch.Tensor, right: torch.Tensor) -> float:
    """The mean precision at each right answer, the likeliest first."""
    hits = right[scores.argsort(descending=True)].float()
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / hits.sum())


def test_several_labels_are_learned(tones: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = sounds(tones, "table")
    task = make(classes=data.classes, multilabel=True, lr=3e-3)
    run = trainer(tmp_path, max_epochs=8)
    run.fit(task, datamodule=data)
    assert run.validate(task, datamodule=data, verbose=False)[0]["val/mAP"] > 0.8


@pytest.mark.parametrize(
    ("tokens", "options", "epochs"),
    [
        (FrameEmbedding, {}, 10),
        (
            partial(SpectrogramPatches, patch_size=(8, 4), stride=(6, 3)),
            {"class_token": True, "registers": 1},
            16,
        ),
    ],
    ids=["frames", "patches"],
)
def test_order_is_learned_with_positions_alone(tones, tmp_path, tokens, options, epochs) -> None:
    reached = []
    for encoding in ({"additive": mmpos.SinusoidalEncoding}, {}):
        torch.manual_seed(0)
        encoder = partial(Transformer, dim=32, depth=2, heads=2, **options, **encoding)
        task = make(transformer=encoder, tokens=tokens, lr=3e-3)
        run = trainer(tmp_path, max_epochs=epochs)
        run.fit(task, datamodule=sounds(tones))
        reached.append(run.callback_metrics["val/class_accuracy"])
    assert reached[0] >= 0.9 and reached[0] > reached[1] + 0.15


def test_in_seconds_a_clip_is_the_same_whatever_the_hop() -> None:
    """Frames that say the same at 10 and 20 ms: tokens then stand at the same moments."""
    torch.manual_seed(0)
    frames = torch.randn(2, 20, 30)
    token = partial(FrameEmbedding, kernels=(1,), strides=(1,))
    slow = Sound(frames, torch.ones(2, 30, dtype=torch.bool), 0.02)
    fast = Sound(frames, torch.ones(2, 30, dtype=torch.bool), 0.01)
    for ticks, same in ((None, True), (50.0, False)):
        model = make(transformer=ROPE, tokens=token, ticks=ticks).double().eval()
        torch.nn.init.normal_(model.network.transformer.layers[0].attention.qkv.weight, std=0.3)
        a, b = (model(s.values.double(), s.mask, s.step)["class"] for s in (slow, fast))
        assert torch.allclose(a, b) == same
    counted = make(transformer=ROPE, tokens=token).eval()
    timed = make(transformer=ROPE, tokens=token, ticks=50.0).eval()
    timed.load_state_dict(counted.state_dict())
    torch.testing.assert_close(timed(*slow), counted(*slow))
    with pytest.raises(ValueError, match="50 positions in a second: give the step"):
        timed(frames)


def test_windows_of_a_clip_share_its_logits() -> None:
    torch.manual_seed(0)
    task = make().eval()
    values = torch.randn(150, 20, 11)
    owner = torch.tensor([0] * 100 + [1] + [2] * 49)
    mask = torch.rand(150, 1) * 11 > torch.arange(11)
    with torch.no_grad():
        each = task(values, mask)["class"]
        averaged = task(values, mask, None, owner)["class"]
    expected = torch.stack([each[owner == clip].mean(0) for clip in range(3)])
    torch.testing.assert_close(averaged, expected)


def test_a_tokeniser_that_is_none_is_one_line() -> None:
    with pytest.raises(TypeError, match=r"tokens makes a tokeniser of sound .*got Linear, which"):
        make(tokens=torch.nn.Linear)


class Record(L.Callback):
    """Writes each process's weights and metrics to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save(
            (pl_module.network.state_dict(), metrics), self.folder / f"{trainer.global_rank}.pt"
        )


@pytest.mark.parametrize("source", ["folder", "table"])
def test_two_processes_are_one_with_twice_the_batch(tones: Path, tmp_path: Path, source) -> None:
    results = []
    for name, devices, batch in (("two", 2, 4), ("one", 1, 8)):
        (tmp_path / name).mkdir()
        data = sounds(tones, source, batch_size=batch)
        torch.manual_seed(0)
        task = make(classes=data.classes, multilabel=source == "table").double()
        strategy = DDPStrategy(process_group_backend="gloo", start_method="fork")
        trainer(
            tmp_path,
            devices=devices,
            strategy=strategy if devices == 2 else "auto",
            precision="64-true",
            callbacks=[Record(tmp_path / name)],
            max_epochs=1,
            use_distributed_sampler=False,
        ).fit(task, datamodule=data)
        results.append(torch.load(tmp_path / name / "0.pt", weights_only=True))
    (two_weights, two_metrics), (one_weights, one_metrics) = results
    for name, weight in one_weights.items():
        torch.testing.assert_close(two_weights[name], weight, atol=1e-8, rtol=1e-5)
    scores = {"val/loss", "val/mAP" if source == "table" else "val/class_accuracy"}
    for name in scores:
        assert two_metrics[name] == pytest.approx(one_metrics[name], abs=1e-6)


def job(root: Path, *more: str) -> list[str]:
    return [
        *("fit", "--config", "audio", *QUIET, "--trainer.max_epochs=2"),
        *("--data.source=folder", f"--data.root={root}", "--data.features.bins=20"),
        *("--data.seconds=1", "--data.batch_size=8", *more),
    ]


def test_the_job_on_a_folder_and_its_predictions(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(job(tones, "--model.ticks=25")) == 0
    checkpoint = next(Path("runs").rglob("best.ckpt"))
    content = torch.load(checkpoint, weights_only=True)
    assert content["datamodule_hyper_parameters"]["features"]["bins"] == 20
    assert content["hyper_parameters"]["ticks"] == 25
    capsys.readouterr()
    predict = ["predict", f"--ckpt_path={checkpoint}", *QUIET]
    assert cli.main([*predict, f"--data.predict_folder={tones / 'up'}"]) == 0
    with Path("predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and {row["class"] for row in rows} <= {"up", "down"}
    assert sorted(Path(row["file"]).name for row in rows) == sorted(f"{k}.wav" for k in range(60))
    assert cli.main(["test", f"--ckpt_path={checkpoint}", *QUIET, "--data.features.hop=0.02"]) == 0
    long = tmp_path / "long"
    long.mkdir()
    soundfile.write(long / "x.wav", np.zeros(3 * RATE) + 0.1, RATE)
    capsys.readouterr()
    assert cli.main([*predict, "--data.predict_folder=long"]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "mmpos: error" in x]
    assert "x.wav is 3.00 seconds long, and the model is made for 1" in line
    assert cli.main([*predict, "--data.predict_folder=long", "--data.longer=windows"]) == 0


def test_predictions_of_several_labels_have_a_column_each(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(job(tones, "--data.source=table", "--trainer.max_epochs=1")) == 0
    checkpoint = next(Path("runs").rglob("best.ckpt"))
    folder = f"--data.predict_folder={tones / 'down'}"
    assert cli.main(["predict", f"--ckpt_path={checkpoint}", *QUIET, folder]) == 0
    with Path("predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "down", "high", "up"] and len(rows) == 60
    assert all(0 < float(row["high"]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"transformer": None}, TypeError, "missing 1 required positional argument: 'transformer'"),
        ({"frames": 0}, ValueError, "bins and frames are 1 or more, got 20 and 0"),
        ({"ticks": 0.0}, ValueError, "ticks are positions in a second"),
        ({"classes": ["up", "up"]}, ValueError, "has the answer 'up' twice"),
        ({"multilabel": True, "label_smoothing": 0.1}, ValueError, "no label_smoothing"),
        (
            {"multilabel": True, "classes": {"a": ["x", "y"], "b": ["x", "y"]}},
            ValueError,
            "take one question",
        ),
        (
            {"tokens": partial(SpectrogramPatches, patch_size=(32, 4), stride=None)},
            ValueError,
            "20 bins is",
        ),
    ],
)
def test_refusals(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_labels_of_another_form_are_refused() -> None:
    task = make(multilabel=True)
    sound = Sound(torch.zeros(2, 20, 9), torch.ones(2, 9, dtype=torch.bool), 0.01)
    for labels in (torch.tensor([0, 1]), torch.ones(2, 3), torch.full((2, 2), 0.5)):
        with pytest.raises(ValueError, match=r"labels of multilabel inputs are 0 and 1 \[batch, 2"):
            task._evaluate((sound, {"class": labels}), 0, "val")
