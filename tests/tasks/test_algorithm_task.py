"""Language models on algorithmic tasks: exact match by length, processes, the shipped job."""

import csv
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics.functional.classification import multiclass_exact_match

import mmpos
from mmpos.models import Transformer
from tasks import LanguageModel, cli
from tasks.data import Algorithms, Text
from tasks.metrics import ExactMatch

ENCODER = partial(Transformer, size="nano", depth=2, causal=True, rotary=mmpos.RotaryEncoding)


def opinionated(data: Algorithms, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    task = LanguageModel(data.vocabulary, data.context, ENCODER, **options)
    with torch.no_grad():
        for parameter in task.network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return task


def quiet(folder: Path, max_epochs: int = 1, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=max_epochs,
        **options,
    )


@pytest.mark.parametrize("batch", [1, 4, 30])
def test_exact_match_is_that_of_torchmetrics_by_length(batch: int) -> None:
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (30, 4), generator=draw)
    predicted = targets.clone()
    predicted[::3, 1] = (predicted[::3, 1] + 1) % 3
    targets[:, :1] = targets[::6, 1:2].repeat_interleave(6, 0).fill_(-100)
    targets[::9, 1] = -100  # some of the wrong ones are not asked for
    lengths = torch.randint(5, 8, (30,), generator=draw)
    metric = ExactMatch()
    for _ in range(2):  # again after a reset
        for begin in range(0, 30, batch):
            part = slice(begin, begin + batch)
            metric.update(predicted[part], targets[part], lengths[part])
        whole, by_length = metric.compute()
        rows = multiclass_exact_match(
            predicted, targets, 3, multidim_average="samplewise", ignore_index=-100
        ).float()
        assert 0 < rows.mean() < 1 and whole == pytest.approx(float(rows.mean()))
        assert sorted(by_length) == sorted(set(lengths.tolist())) == [5, 6, 7]
        for length, found in by_length.items():
            assert found == pytest.approx(float(rows[lengths == length].mean()))
        metric.reset()


def test_a_row_is_right_where_greedy_decoding_is(tmp_path: Path) -> None:
    """Answers that greedy decoding gives, some of them spoilt in one place."""
    task = opinionated(Algorithms()).eval()
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(12, (20, 5), generator=draw)
    whole = task.generate(prompts, 6, temperature=0)
    asked = whole.clone()
    for row in range(10):
        place = 5 + row % 6
        asked[row, place] = (asked[row, place] + 1) % 12
    targets = asked[:, 1:].clone()
    targets[:, :4] = -100
    predicted = task(asked[:, :-1]).argmax(-1)
    metric = ExactMatch()
    metric.update(predicted, targets, torch.arange(20))
    assert [float(right) for right in metric.compute()[1].values()] == [0.0] * 10 + [1.0] * 10


def measured(folder: Path, task: LanguageModel, data: Algorithms) -> dict[str, float]:
    (found,) = quiet(folder).test(task, datamodule=data, verbose=False)
    return dict(found)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_padding_and_rows_beyond_the_context_change_nothing(
    batch_size: int, tmp_path: Path
) -> None:
    """Loss and exact match against one row at a time, without padding and segments."""
    options: dict = {"length": 3, "symbols": 6, "eval_samples": 12, "test_lengths": [1, 9, 2]}
    data = Algorithms("flip_flop", batch_size=batch_size, **options)
    task = opinionated(data, lr=3e-3)
    quiet(tmp_path).fit(task, datamodule=Algorithms("flip_flop", train_samples=1280, **options))
    found = measured(tmp_path, task.eval(), data)
    nats, count, right = 0.0, 0, {1: 0, 9: 0, 2: 0}
    for batch in Algorithms("flip_flop", batch_size=1, **options).test_dataloader():
        (n,) = batch["length"].tolist()
        assert batch["tokens"].shape[-1] == 2 * n + 2 and (n == 9) == (2 * n + 2 > data.context)
        with torch.no_grad():
            chances = task.network(batch["tokens"], batch["positions"])[0].double().log_softmax(-1)
        asked = [(i, t) for i, t in enumerate(batch["targets"][0].tolist()) if t >= 0]
        nats -= sum(float(chances[i, t]) for i, t in asked)
        count += len(asked)
        right[n] += all(int(chances[i].argmax()) == t for i, t in asked)
    assert found["test/loss"] == pytest.approx(nats / count, rel=1e-5)
    for n, rows in right.items():
        assert found[f"test/exact_match_{n}"] == pytest.approx(rows / 12)
    assert found["test/exact_match"] == pytest.approx(sum(right.values()) / 36)
    assert 0 < sum(right.values()) < 36
    assert len(found) == 3 + 1 + 3


def test_text_has_no_exact_match(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("the same line of text, again and again\n" * 120)
    data = Text("files", tmp_path / "lines.txt", context=16, batch_size=8)
    trainer = quiet(tmp_path)
    trainer.fit(LanguageModel(257, 16, ENCODER), datamodule=data)
    names = {f"val/{name}" for name in ("loss", "perplexity", "bits_per_byte")}
    assert set(trainer.callback_metrics) == names | {"train/loss"}


def test_training_learns_and_begins_each_validation_anew(tmp_path: Path) -> None:
    data = Algorithms(
        "copy", 2, symbols=3, test_lengths=[2, 3], train_samples=4096, eval_samples=20
    )
    torch.manual_seed(0)
    task = LanguageModel(data.vocabulary, data.context, ENCODER, lr=3e-3)
    trainer = quiet(tmp_path, max_epochs=3)
    trainer.fit(task, datamodule=data)
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    names = ("val/exact_match", "val/exact_match_1", "val/exact_match_2")
    assert [found[name] for name in names] == [1.0, 1.0, 1.0]
    assert "val/exact_match_3" not in found
    tested = measured(tmp_path, task, data)
    assert tested["test/exact_match_2"] == 1.0 and "test/exact_match_1" not in tested


class Record(L.Callback):
    """Writes each process's losses, weights and metrics to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer, pl_module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"].detach().clone()
        self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))

    def on_fit_end(self, trainer, pl_module) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        task: Any = pl_module
        state = {k: v.clone() for k, v in task.network.state_dict().items()}
        torch.save((self.losses, metrics, state), self.folder / f"{trainer.global_rank}.pt")


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    """With other numbers of targets in each, and lengths in validation that only one sees."""

    def run(processes: int) -> list[tuple[list[float], dict[str, float], dict]]:
        folder = tmp_path / str(processes)
        folder.mkdir()
        torch.manual_seed(0)
        data = Algorithms(
            "flip_flop",
            5,
            symbols=5,
            batch_size=16 // processes,
            train_samples=160,
            eval_samples=1,
        )
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
        trainer = quiet(
            folder,
            devices=processes,
            strategy=strategy if processes > 1 else "auto",
            precision="64-true",
            callbacks=[Record(folder)],
            num_sanity_val_steps=0,
            max_epochs=2,
        )
        task = opinionated(data, lr=3e-3)
        trainer.fit(task, datamodule=data)
        return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]

    ((losses, metrics, weights),) = run(1)
    by_length = [f"val/exact_match_{n}" for n in range(1, 6)]
    assert len({metrics[name] for name in by_length}) == 2, "some are right, some are not"
    for found, others, state in run(2):
        assert found == pytest.approx(losses, rel=1e-5) and len(set(losses)) == len(losses) == 20
        assert set(others) == set(metrics)
        for name in ("val/loss", "val/exact_match", *by_length):
            assert others[name] == pytest.approx(metrics[name], rel=1e-5), name
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


FEW = ["--data.train_samples=256", "--data.eval_samples=3", "--trainer.accelerator=cpu"]
FEW += ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]


def table(folder: Path) -> dict[str, float]:
    with (folder / "version_0" / "metrics.csv").open() as file:
        return {k: float(v) for row in csv.DictReader(file) for k, v in row.items() if v}


@pytest.mark.parametrize("encoding", ["rope", "learned"])
def test_the_shipped_job_tests_by_length(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    over = ["--config", "algorithm", "--config", f"encoding/{encoding}"]
    assert cli.main(["fit", *over, *FEW]) == 0
    found = table(tmp_path / "runs" / "algorithm")
    shown = capsys.readouterr().out
    for n in (20, 24, 28, 40):
        assert f"test/exact_match_{n}" in shown and f"test/exact_match_{n}" in found
    best = str(tmp_path / "runs" / "algorithm" / "version_0" / "checkpoints" / "best.ckpt")
    stored = torch.load(best, weights_only=True)["hyper_parameters"]
    assert (stored["vocabulary"], stored["context"]) == (12, 82)
    longer = ["--data.test_lengths=[20,25]", *FEW[1:3]]
    assert cli.main(["test", "--ckpt_path", best, *longer]) == 0
    assert "test/exact_match_25" in capsys.readouterr().out


def test_two_processes_through_the_command(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    command = [sys.executable, "-W", "ignore", "-m", "mmpos", "fit", "--config", "algorithm", *FEW]
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.task=missing_duplicate"]
    run = subprocess.run(
        [*command, *two], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = table(tmp_path / "runs" / "algorithm")
    assert {f"test/exact_match_{n}" for n in (20, 24, 28, 40)} <= set(found)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--data.task=sort", "data.task"),
        ("--model.context=64", "model.context comes from the data: use --data.context 64"),
        ("--data.length=50", "context is 82, and training examples of length 50 have 102 tokens"),
        ("--data.test_lengths=[]", "test_lengths is []"),
        ("--data.batch_size=500", "train_samples 256 makes 256 train examples, and 500 are needed"),
    ],
)
def test_mistakes_are_one_line(
    given: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "algorithm", *FEW, given]) != 0
    told = [t for t in capsys.readouterr().err.splitlines() if "mmpos: error: " in t]
    assert len(told) == 1 and line in told[0]
