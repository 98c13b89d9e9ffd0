"""Classification of texts and sequences: the task, its job, and several processes."""

import csv
import random
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy

import mmpos
from mmpos.models import Transformer
from tasks import TextClassification, cli
from tasks.data import LabelledText

ROPE = partial(Transformer, size="nano", depth=1, rotary=mmpos.RotaryEncoding)
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.fixture
def order(tmp_path: Path) -> Path:
    """Sequences of 6 to 30 symbols of two kinds: G before T, or T before G."""
    draw = random.Random(0)
    (tmp_path / "order").mkdir()
    for name, (first, second) in {"GT": "GT", "TG": "TG"}.items():
        gaps = [["AC"[draw.random() < 0.5] * draw.randint(2, 9) for _ in "012"] for _ in range(200)]
        rows = [f">{name}{i}\n{a}{first}{b}{second}{c}\n" for i, (a, b, c) in enumerate(gaps)]
        (tmp_path / "order" / f"{name}.fna").write_text("".join(rows))
    return tmp_path / "order"


def make(**options) -> TextClassification:
    return TextClassification(["GT", "TG"], 256, 32, **{"transformer": ROPE, **options})


def trainer(folder: Path, **options) -> L.Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False} | options
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def test_metrics_are_those_of_each_text_alone(order: Path, tmp_path: Path) -> None:
    data = LabelledText("files", order, context=32, batch_size=7)
    task = make(label_smoothing=0.3).eval()
    (found,) = trainer(tmp_path).test(task, datamodule=data, verbose=False)
    samples = [data._data["test"][i] for i in range(len(data._data["test"]))]
    with torch.no_grad():
        logits = torch.cat([task(tokens[None])["class"] for tokens, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    assert len(labels) == 40 and len({len(tokens) for tokens, _ in samples}) > 5
    assert found["test/loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-5)
    right = (logits.argmax(-1) == labels).float().mean()
    assert found["test/class_accuracy"] == pytest.approx(float(right))


@pytest.mark.parametrize("pool", ["mean", "token"])
def test_order_is_learned_with_positions_alone(order: Path, tmp_path: Path, pool) -> None:
    reached = []
    for options in ({"rotary": mmpos.RotaryEncoding}, {}):
        torch.manual_seed(0)
        encoder = partial(Transformer, dim=32, depth=2, heads=2, class_token=pool == "token")
        task = make(lr=4e-3, pool=pool, transformer=partial(encoder, **options))
        data = LabelledText("files", order, context=32, batch_size=16)
        run = trainer(tmp_path, max_epochs=12)
        run.fit(task, datamodule=data)
        reached.append(run.test(task, datamodule=data, verbose=False)[0]["test/class_accuracy"])
    assert reached[0] > 0.9 and reached[1] < 0.75


class Record(L.Callback):
    """Writes each process's weights and metrics to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer, pl_module) -> None:
        state = {k: v.clone() for k, v in pl_module.network.state_dict().items()}
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        torch.save((state, metrics), self.folder / f"{trainer.global_rank}.pt")


def test_two_processes_are_one_with_twice_the_batch(order: Path, tmp_path: Path) -> None:
    """Although the rows of their batches are padded to other lengths."""
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        torch.manual_seed(0)
        run = trainer(
            folder,
            devices=processes,
            strategy=DDPStrategy(start_method="fork", process_group_backend="gloo")
            if processes > 1
            else "auto",
            precision="64-true",
            max_steps=8,
            max_epochs=None,
            val_check_interval=8,
            num_sanity_val_steps=0,
            callbacks=[Record(folder)],
        )
        data = LabelledText("files", order, context=24, batch_size=8 // processes)
        run.fit(make(), datamodule=data)
        found += [torch.load(folder / f"{rank}.pt") for rank in range(processes)]
    (weights, metrics), *others = found
    for state, numbers in others:
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)
        for name in ("val/loss", "val/class_accuracy"):
            assert numbers[name] == pytest.approx(metrics[name], rel=1e-5)


def test_the_job_fits_tests_and_predicts(
    order: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["--data.source=files", f"--data.root={order}", "--data.context=32", *QUIET]
    few = ["--data.train_samples=64", "--trainer.max_epochs=1"]
    assert cli.main(["fit", "--config", "text_classification", *own, *few]) == 0
    assert "test/class_accuracy" in capsys.readouterr().out
    best = "runs/text_classification/version_0/checkpoints/best.ckpt"
    stored = torch.load(best, weights_only=True)["hyper_parameters"]
    assert (stored["classes"], stored["vocabulary"]) == ({"class": ["GT", "TG"]}, 256)
    assert stored["context"] == 32
    assert cli.main(["test", "--ckpt_path", best, *QUIET]) == 0
    for path in order.iterdir():
        path.rename(tmp_path / path.name)  # what was trained on need not be at hand
    order.rmdir()
    (tmp_path / "new.fa").write_text(">first\nAAGCCT\n>second\nTAGAAAAAAAAAAAAA\n")
    new = [f"--data.predict_path={tmp_path / 'new.fa'}", *QUIET]
    assert cli.main(["predict", "--ckpt_path", best, *new]) == 0
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["new.fa:first", "new.fa:second"]
    assert all(row["class"] in ("GT", "TG") and float(row["probability"]) >= 0.5 for row in rows)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--model.transformer.causal=true", "this one is causal: set causal to false"),
        ("--model.context=64", "model.context comes from the data: use --data.context 64"),
        ("--model.pool=token", "pool='token' reads a class token"),
        ("--data.root=x", "add --data.source files"),
        ("--data.train_samples=99999999", "train_samples is 99999999; expected 8 (one a class)"),
    ],
)
def test_mistakes_are_one_line(
    given: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "text_classification", given, *QUIET]) != 0
    told = [t for t in capsys.readouterr().err.splitlines() if "mmpos: error: " in t]
    assert len(told) == 1 and line in told[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"transformer": None}, TypeError, "missing 1 required positional argument: 'transformer'"),
        ({"transformer": partial(ROPE, causal=True)}, ValueError, "set causal to false"),
        ({"classes": ["one"]}, ValueError, "question 'class' needs two answers or more"),
        ({"vocabulary": 0}, ValueError, "vocabulary and context are 1 or more, got 0 and 32"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing is a share below 1, got 1.0"),
    ],
)
def test_bad_options(options: dict, error: type[Exception], message: str) -> None:
    given = {"classes": ["a", "b"], "vocabulary": 9, "context": 32, "transformer": ROPE}
    with pytest.raises(error, match=message):
        TextClassification(**{**given, **options})
