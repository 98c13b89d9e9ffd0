"""Language models: losses against direct computations, runs, processes."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mmpos
from mmpos.frequencies import DynamicNTK, LongRoPE, PositionInterpolation
from mmpos.models import Transformer
from mmpos.positions import sequence
from tasks import LanguageModel
from tasks.data import Text
from tasks.data.tokens import Bytes, Rows
from tasks.optim import parameter_groups

END = 256
ENCODER = partial(Transformer, size="nano", depth=2, causal=True, rotary=mmpos.RotaryEncoding)


def make(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    task = LanguageModel(**{"vocabulary": 257, "context": 16, "transformer": ENCODER, **options})
    with torch.no_grad():
        for parameter in task.network.parameters():  # a model that has opinions
            if parameter.ndim > 1:
                parameter.mul_(5)
    return task


def quiet(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )


TEXTS = [b"one", b"a longer document of text", b"x", "größer €".encode(), b"12345678901"]


def rows(texts: list[bytes], context: int) -> Rows:
    return Rows([Bytes().encode("", text) for text in texts], context, END)


def direct(task: LanguageModel, texts: list[bytes]) -> tuple[float, int, int]:
    """Nats, targets and bytes of whole documents, each by itself."""
    nats, targets = 0.0, 0
    for text in texts:
        ids = torch.tensor([[END, *text, END]])
        positions = torch.arange(len(text) + 1)[:, None]
        with torch.no_grad():
            logits = task.network(ids[:, :-1], positions)
        chances = logits[0].double().log_softmax(-1)
        nats -= chances[range(len(text) + 1), ids[0, 1:]].sum().item()
        targets += len(text) + 1
    return nats, targets, sum(map(len, texts))


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_products_with_the_embedding_or_a_head(tied: bool) -> None:
    task = make(tied=tied).eval()
    tokens = torch.randint(257, (2, 16))
    embedding = task.network.tokens.weight
    matrix = embedding if tied else task.network.head.weight
    encoded = task.network.transformer(embedding[tokens], sequence(16))
    torch.testing.assert_close(task(tokens), encoded @ matrix.T)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_validation_is_that_of_separate_documents(
    batch_size: int, tied: bool, tmp_path: Path
) -> None:
    """Packed in rows that no document is cut by, the last one padded: rows of unequal targets."""
    task = make(tied=tied, context=32).eval()
    data = rows(TEXTS, 32)
    starts = set(data.starts.tolist())
    assert {32} <= starts and data.total % 32, "a row ends with a document"
    loader = DataLoader(data, batch_size=batch_size)
    (found,) = quiet(tmp_path).validate(task, loader, verbose=False)
    nats, targets, count = direct(task, TEXTS)
    assert found["val/loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    assert found["val/bits_per_byte"] == pytest.approx(nats / count / math.log(2), rel=1e-5)


def test_bytes_of_a_target_are_what_the_data_says(tmp_path: Path) -> None:
    task = make()
    batches = []
    for seed, bytes_each in ((1, 3), (2, 5)):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(257, (2, 17), generator=draw)
        targets = ids[:, 1:].clone()
        targets[:, seed * 4 :] = -100
        batches.append(
            {
                "tokens": ids[:, :-1],
                "targets": targets,
                "positions": sequence(16).expand(2, -1, -1),
                "segments": torch.zeros(2, 16, dtype=torch.long),
                "bytes": torch.full((2, 16), bytes_each),
            }
        )
    loader: Any = DataLoader(batches, batch_size=None)
    (found,) = quiet(tmp_path).test(task, loader, verbose=False)
    nats = 0.0
    for batch in batches:
        with torch.no_grad():
            logits = task.eval()(batch["tokens"])
        nats += cross_entropy(logits.mT, batch["targets"], reduction="sum").item()
    assert found["test/loss"] == pytest.approx(nats / (8 + 16), rel=1e-5)
    text = 8 * 3 + 16 * 5
    assert found["test/bits_per_byte"] == pytest.approx(nats / text / math.log(2), rel=1e-5)
    for batch in batches:
        del batch["bytes"]
    (found,) = quiet(tmp_path).test(task, loader, verbose=False)
    assert found["test/bits_per_byte"] == pytest.approx(nats / 24 / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"transformer": Transformer}, ValueError, r"needs a causal transformer.* causal to true"),
        ({"transformer": partial(ENCODER, registers=2)}, ValueError, r"no class and register"),
        ({"transformer": lambda axes: torch.nn.Linear(4, 4)}, TypeError, r"makes a Linear, expec"),
        ({"transformer": ENCODER((16,))}, TypeError, r"got a Transformer that is made: give its"),
        ({"context": 10**20}, ValueError, r"context is at most 2\*\*53, to count .* got 1000"),
        ({"transformer": None}, TypeError, r"1 required positional argument: 'transformer'"),
        ({"vocabulary": 0}, ValueError, r"vocabulary and context are 1 or more, got 0 and 16"),
        ({"context": 0}, ValueError, r"got 257 and 0"),
        ({"temperature": math.nan}, ValueError, r"temperature of 0 or more"),
        ({"ema": 2.0}, ValueError, r"ema is a decay"),
    ],
)
@pytest.mark.filterwarnings("ignore:Attribute 'transformer' is an instance of")
def test_bad_options(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_a_tokenizer_of_another_vocabulary(tmp_path: Path) -> None:
    loader = DataLoader(rows([bytes([9, 70, 8])], 4), batch_size=1)  # type: ignore[var-annotated]
    with pytest.raises(ValueError, match=r"the data has a token 256, the model has 100 tokens"):
        quiet(tmp_path).fit(make(vocabulary=100), loader, loader)
    torch.save(make().network.state_dict(), tmp_path / "other.pt")
    message = r"do not fit the model: tokens.weight is 257 × 64 there and 300 × 64 here"
    with pytest.raises(ValueError, match=message):
        quiet(tmp_path).fit(make(vocabulary=300, weights=tmp_path / "other.pt"), loader, loader)


def test_layers_learn_at_rates_of_their_own() -> None:
    for tied in (True, False):
        groups = parameter_groups(make(tied=tied), 0.05, 0.5)
        rates = {name: g["lr_scale"] for g in groups for name in g["param_names"]}
        assert rates["network.tokens.weight"] == 0.125
        for layer, rate in ((0, 0.25), (1, 0.5)):
            part = f"network.transformer.layers.{layer}."
            assert {r for name, r in rates.items() if name.startswith(part)} == {rate}
        assert rates["network.transformer.norm.weight"] == 1.0
        assert rates.get("network.head.weight", 1.0) == 1.0
        assert ("network.head.weight" in rates) is not tied


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    """Options of data that can be learned: one line, over and over."""
    (tmp_path / "lines.txt").write_text("the same line of text, again and again\n" * 120)
    return {"source": "files", "root": tmp_path / "lines.txt", "context": 16, "batch_size": 8}


def test_training_lowers_the_loss(tmp_path: Path, text: dict) -> None:
    torch.manual_seed(0)
    task = LanguageModel(257, 16, ENCODER, lr=1e-2)
    trainer = quiet(tmp_path, max_epochs=4)
    trainer.fit(task, datamodule=Text(**text))
    assert float(trainer.callback_metrics["val/bits_per_byte"]) < 1.5


class StopAfter(L.Callback):
    """Ends a run early, as if it had been killed after this epoch's checkpoint."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("options", [{}, {"ema": 0.9, "freeze": ["transformer.layers.0"]}])
def test_resuming_equals_an_uninterrupted_run(options: dict, tmp_path: Path, text: dict) -> None:
    """Dropped paths and the order of documents too."""

    def run(folder: str, ckpt_path: str | None = None, *callbacks: L.Callback):
        torch.manual_seed(3)
        encoder = partial(ENCODER, drop_path=0.3)
        task = LanguageModel(257, 16, encoder, lr=1e-2, warmup=0.25, **options)
        trainer = quiet(
            tmp_path / folder, max_epochs=4, enable_checkpointing=True, callbacks=list(callbacks)
        )
        trainer.fit(task, datamodule=Text(**text), ckpt_path=ckpt_path)
        return task.state_dict(), trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]

    whole, _ = run("whole")
    half, ckpt_path = run("half", None, StopAfter())
    rest, _ = run("rest", ckpt_path)
    for name, value in whole.items():
        assert torch.equal(rest[name], value), name
    assert not torch.equal(half["network.tokens.weight"], whole["network.tokens.weight"])


class Record(L.Callback):
    """Writes each process's losses, weights and metrics to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.losses = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"].detach().clone()
        self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))

    def on_fit_end(self, trainer, pl_module) -> None:
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
        torch.save((self.losses, metrics), self.folder / f"{trainer.global_rank}.pt")


def test_two_processes_are_one_with_twice_the_batch(tmp_path: Path, text: dict) -> None:
    """In validation too, where one of them has a row less, and a padded one."""

    def run(processes: int) -> list[tuple[list[float], dict[str, float]]]:
        folder = tmp_path / str(processes)
        folder.mkdir()
        torch.manual_seed(0)
        data = Text(**{**text, "batch_size": 8 // processes, "eval_tokens": 16 * 8 + 3})
        assert data.train_dataloader() and len(data._data["val"]) == 9
        strategy = DDPStrategy(start_method="fork", process_group_backend="gloo")
        trainer = quiet(
            folder,
            devices=processes,
            strategy=strategy if processes > 1 else "auto",
            precision="64-true",
            callbacks=[Record(folder)],
            num_sanity_val_steps=0,
        )
        trainer.fit(LanguageModel(257, 16, ENCODER, lr=1e-2), datamodule=data)
        return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]

    ((losses, metrics),) = run(1)
    for found, others in run(2):
        assert found == pytest.approx(losses, rel=1e-5) and len(set(losses)) == len(losses) > 20
        for name in ("val/loss", "val/perplexity", "val/bits_per_byte"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-5), name


@pytest.mark.parametrize(
    "extension",
    [
        DynamicNTK(original_length=8),
        LongRoPE(short_factor=[1] * 8, long_factor=[4] * 8, original_length=8, factor=4),
    ],
)
def test_an_extension_takes_the_length_of_the_longest_document_of_each_row(extension: Any) -> None:
    rotary = partial(mmpos.RotaryEncoding, extension=extension)
    task = make(transformer=partial(ENCODER, rotary=rotary)).eval()
    data = rows([b"long enough to be beyond", b"short", b"as"], 25)
    batch = next(iter(DataLoader(data, batch_size=len(data))))
    with torch.no_grad():
        both = task(batch["tokens"], batch["positions"], batch["segments"])
        for row, length in ((0, 25), (1, 6)):
            one = {name: value[row : row + 1] for name, value in batch.items()}
            given = task.network(
                one["tokens"], one["positions"], segments=one["segments"], length=length
            )
            torch.testing.assert_close(both[row], given[0])
        other = task.network(one["tokens"], one["positions"], segments=one["segments"], length=25)
    assert not torch.allclose(both[1], other[0], atol=1e-4)


def test_one_extension_goes_to_all_rotary_encodings() -> None:
    pattern = [partial(mmpos.RotaryEncoding, base=50), torch.nn.Identity]
    own = partial(ENCODER, rotary=pattern)
    task = make(transformer=own, extension=PositionInterpolation(factor=4)).eval()
    plain = make(transformer=own).eval()
    tokens = torch.randint(257, (2, 16))
    longer = plain(tokens, sequence(16) / 4)
    torch.testing.assert_close(task(tokens), longer)
    with pytest.raises(ValueError, match=r"changes the frequencies of RoPE.*has none"):
        make(transformer=partial(ENCODER, rotary=None), extension=PositionInterpolation(factor=4))
