import math
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import mmpos
from mmpos.models import Transformer
from tasks import ImageClassification

CLASSES = {"what": ["a", "b", "c"], "where": ["left", "right"]}


def make(**options) -> ImageClassification:
    options = {
        "classes": CLASSES,
        "transformer": partial(Transformer, size="nano", depth=1),
    } | options
    return ImageClassification(image_size=(8, 12), patch_size=(4, 4), channels=1, **options)


def batches(count: int = 4, size: int = 4, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    items = [
        (
            torch.randn(1, 8, 12, generator=draw),
            {q: torch.randint(len(a), (), generator=draw) for q, a in CLASSES.items()},
        )
        for _ in range(count * size)
    ]
    return DataLoader(items, batch_size=size)


def quiet(folder: Path, **options) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )


def test_every_question_is_answered_from_the_training_grid() -> None:
    task = make()
    assert {q: tuple(v.shape) for q, v in task(torch.zeros(5, 1, 8, 12)).items()} == {
        "what": (5, 3),
        "where": (5, 2),
    }
    assert tuple(task.network.transformer.axes) == (2, 3)


def test_validation_is_exact_whatever_the_batches(tmp_path: Path) -> None:
    """Metrics over batches of 4, 4 and 3 equal those over all 11 samples at once."""
    task = make()
    images, labels = (
        torch.randn(11, 1, 8, 12),
        {q: torch.randint(len(a), (11,)) for q, a in CLASSES.items()},
    )
    items = [(images[i], {q: labels[q][i] for q in labels}) for i in range(11)]
    (found,) = quiet(tmp_path).validate(task, DataLoader(items, batch_size=4), verbose=False)
    with torch.no_grad():
        logits = task.eval()(images)
    for question, answers in logits.items():
        right = (answers.argmax(-1) == labels[question]).double().mean().item()
        assert found[f"val/{question}_accuracy"] == pytest.approx(right)
    losses = [torch.nn.functional.cross_entropy(logits[q], labels[q]) for q in logits]
    assert found["val/loss"] == pytest.approx(sum(losses).item(), rel=1e-5)


def test_one_question_takes_plain_labels(tmp_path: Path) -> None:
    task = make(classes=["cat", "dog"])
    items = [(torch.randn(1, 8, 12), i % 2) for i in range(4)]
    trainer = quiet(tmp_path)
    trainer.fit(task, DataLoader(items, batch_size=2), DataLoader(items, batch_size=2))
    assert "val/class_accuracy" in trainer.callback_metrics


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = make(
        lr=1e-2, transformer=partial(Transformer, size="nano", depth=1, rotary=mmpos.RotaryEncoding)
    )
    loader = batches()
    before = quiet(tmp_path).validate(task, loader, verbose=False)[0]["val/loss"]
    quiet(tmp_path, max_epochs=20).fit(task, loader, loader)
    after = quiet(tmp_path).validate(task, loader, verbose=False)[0]["val/loss"]
    assert after < 0.5 * before


def test_predict_names_the_likeliest_answer_and_its_probability() -> None:
    task = make().eval()
    images = torch.randn(3, 1, 8, 12)
    with torch.no_grad():
        answers = task.predict_step((images, ["x", "y", "z"]), 0)
        shares = task(images)["what"].softmax(-1)
    assert answers["file"] == ["x", "y", "z"]
    assert torch.equal(answers["what"]["label"], shares.argmax(-1))
    assert torch.equal(answers["what"]["probability"], shares.max(-1).values)


def test_checkpoint_records_the_version(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(make(), batches(), batches(seed=1))
    stored = torch.load(next(tmp_path.rglob("*.ckpt")), weights_only=True)
    assert stored["mmpos_version"] == mmpos.__version__


@pytest.mark.parametrize("option", [{"lr": math.inf}, {"lr": -1.0}, {"weight_decay": -0.1}])
def test_rates_that_are_no_rates(option: dict) -> None:
    with pytest.raises(ValueError, match="must be 0 or more and finite"):
        make(**option)


def test_a_question_by_a_name_that_a_module_cannot_have() -> None:
    for name in ("type", "a.b", ""):
        with pytest.raises(ValueError, match=r"plain name and 1 answer or more"):
            make(classes={name: ["x", "y"]})


def test_a_callable_transformer_must_be_given_again_at_loading(tmp_path: Path) -> None:
    """It is not stored, and an encoding without parameters would be lost without a word."""
    trainer = quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(make(), batches(), batches(seed=1))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'transformer'"):
        ImageClassification.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)


def test_starting_weights_are_loaded_once_and_not_over_a_resumed_run(tmp_path: Path) -> None:
    donor = make()
    torch.save(donor.network.state_dict(), tmp_path / "start.pt")
    task = make(weights=tmp_path / "start.pt", lr=1e-12)
    trainer = quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(task, batches(), batches(seed=1))
    weight = "network.heads.what.weight"
    torch.testing.assert_close(task.state_dict()[weight], donor.state_dict()[weight])
    with torch.no_grad():
        task.network.heads["what"].weight.fill_(7.0)
    quiet(tmp_path).validate(task, batches(), verbose=False)
    assert task.network.heads["what"].weight.eq(7.0).all()

    resumed = make(weights=tmp_path / "start.pt", lr=0.1)
    quiet(tmp_path, enable_checkpointing=True).validate(
        resumed, batches(), ckpt_path=trainer.checkpoint_callback.best_model_path, verbose=False
    )
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert torch.equal(resumed.state_dict()[weight], saved["state_dict"][weight])


def test_the_average_is_what_is_saved(tmp_path: Path) -> None:
    task = make(ema=0.5, lr=1e-2)
    trainer = quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(task, batches(), batches(seed=1))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    raw, average = saved["current_model_state"], saved["state_dict"]
    assert any(not torch.equal(raw[name], average[name]) for name in average)
    assert torch.equal(
        task.state_dict()["network.heads.what.weight"], average["network.heads.what.weight"]
    )


class StopAfter(L.Callback):
    """Ends a run early, as if it had been killed after this epoch's checkpoint."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == self.epoch


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("drop_path", [0.0, 0.5])
def test_resuming_equals_an_uninterrupted_run(drop_path: float, tmp_path: Path) -> None:
    """Dropped paths too: the noise of a step follows from the step."""
    encoder = partial(Transformer, size="nano", depth=2, drop_path=drop_path)

    def run(folder: str, ckpt_path: str | None = None, *callbacks: L.Callback):
        torch.manual_seed(3)
        task = make(warmup=0.25, lr=1e-2, transformer=encoder)
        trainer = quiet(
            tmp_path / folder,
            max_epochs=4,
            enable_checkpointing=True,
            callbacks=list(callbacks),
        )
        trainer.fit(task, batches(), batches(seed=1), ckpt_path=ckpt_path)
        return task, trainer.checkpoint_callback.best_model_path

    whole, _ = run("whole")
    half, ckpt_path = run("half", None, StopAfter(1))
    rest, _ = run("rest", ckpt_path)
    for name, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value), name
    assert not torch.equal(half.network.heads["what"].weight, whole.network.heads["what"].weight)


class Rates(L.Callback):
    """The rate and decay of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group["weight_decay"]))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_obeys_the_rate_decay_and_length_it_is_given(tmp_path: Path) -> None:
    first = quiet(tmp_path / "first", max_epochs=2, enable_checkpointing=True)
    first.fit(make(warmup=0.0, lr=0.1), batches(), batches(seed=1))
    ckpt_path = first.checkpoint_callback.best_model_path
    rates = Rates()
    rest = quiet(tmp_path / "rest", max_epochs=4, enable_checkpointing=True, callbacks=[rates])
    task = make(warmup=0.0, lr=0.2, weight_decay=0.3)
    rest.fit(task, batches(), batches(seed=1), ckpt_path=ckpt_path)
    wanted = [0.1 * (1 + math.cos(math.pi * step / 16)) for step in range(8, 16)]
    assert [rate for rate, _ in rates.seen] == pytest.approx(wanted)
    assert {decay for _, decay in rates.seen} == {0.3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": {"what": ["only"]}}, r"question 'what' needs two answers or more"),
        ({"ema": 1.5}, r"decay between 0 and 1.* got 1.5"),
        ({"pool": "token"}, r"pool='token' reads a class token"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_an_image_that_patches_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"\(8, 12\) cannot be cut into patches of \(5, 4\)"):
        ImageClassification(CLASSES, (8, 12), (5, 4), 1, Transformer)


def test_labels_beyond_the_answers(tmp_path: Path) -> None:
    task = make(classes={"what": ["a", "b"], "where": ["left", "right"]})
    with pytest.raises(ValueError, match=r"label 2 for 'what', the model has 2 answers"):
        quiet(tmp_path).fit(task, batches(), batches(seed=1))


@pytest.mark.parametrize("wrong", [-1, 3])
def test_a_wrong_label_in_a_later_batch(wrong: int, tmp_path: Path) -> None:
    loader = batches()
    loader.dataset[-1][1]["what"].fill_(wrong)
    with pytest.raises(ValueError, match=rf"label {wrong} for 'what', the model has 3 answers"):
        quiet(tmp_path).fit(make(), loader, batches(seed=1))


def test_other_questions_than_the_data_answers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"questions \['what'\], the data answers"):
        quiet(tmp_path).fit(make(classes={"what": ["a", "b", "c"]}), batches(), batches(seed=1))


def test_an_endless_run_has_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pass --trainer.max_epochs or --trainer.max_steps"):
        quiet(tmp_path, max_epochs=-1).fit(make(), batches(), batches(seed=1))
