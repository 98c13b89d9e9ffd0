"""Soft labels: smoothing, mixed images; in training only, and the same after resuming."""

import math
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader, IterableDataset

from mmpos.models import Transformer
from tasks import ImageClassification

ANSWERS = ["a", "b", "c"]


def make(**options) -> ImageClassification:
    encoder = partial(Transformer, size="nano", depth=1)
    options = {"classes": ANSWERS, "transformer": encoder} | options
    return ImageClassification(image_size=(8, 12), patch_size=(4, 4), channels=1, **options)


def items(count: int, seed: int = 0) -> list[tuple[Tensor, int]]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, 8, 12, generator=draw), index % 3) for index in range(count)]


def loader(count: int = 16, size: int = 4, seed: int = 0, **options) -> DataLoader:
    return DataLoader(items(count, seed), batch_size=size, **options)


def quiet(folder: Path, **options) -> L.Trainer:
    return L.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )


class Seen(L.Callback):
    """What the network was given, what it answered, and the loss, by step."""

    def __init__(self) -> None:
        self.images: dict[str, list[Tensor]] = {"train": [], "val": []}
        self.logits: list[Tensor] = []
        self.losses: list[float] = []
        self.given: list[Tensor] = []

    def on_fit_start(self, trainer, pl_module) -> None:
        def note(module, inputs, outputs) -> None:
            stage = "train" if trainer.training else "val"
            self.images[stage].append(inputs[0].detach().clone())
            if trainer.training:
                self.logits.append(outputs["class"].detach().clone())

        self.hook = pl_module.network.register_forward_hook(note)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.batch = batch[0]
        self.given.append(batch[0].clone())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        assert torch.equal(self.batch, self.given[-1]), "the batch itself was changed"
        self.losses.append(float(outputs["loss"]))

    def on_fit_end(self, trainer, pl_module) -> None:
        self.hook.remove()


def smoothed(logits: Tensor, shares: Tensor, smoothing: float) -> float:
    shares = (1 - smoothing) * shares + smoothing / shares.shape[-1]
    return float(-(shares.double() * logits.double().log_softmax(-1)).sum(-1).mean())


def test_smoothing_is_for_training_only(tmp_path: Path) -> None:
    seen, task = Seen(), make(label_smoothing=0.3)
    trainer = quiet(tmp_path, callbacks=[seen])
    trainer.fit(task, loader(), loader(seed=1))
    labels = torch.tensor([0, 1, 2, 0])
    assert seen.losses[0] == pytest.approx(
        smoothed(seen.logits[0], one_hot(labels, 3), 0.3), rel=1e-5
    )
    images = torch.stack([image for image, _ in items(16, 1)])
    labels = torch.tensor([label for _, label in items(16, 1)])
    with torch.no_grad():
        plain = cross_entropy(task.eval()(images)["class"], labels).item()
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(plain, rel=1e-5)
    (tested,) = trainer.test(task, loader(seed=1), verbose=False)
    assert tested["test/loss"] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_images_have_mixed_labels(smoothing: float, tmp_path: Path) -> None:
    """x' = λ x + (1 − λ) x̄, y' alike, where x̄ is the batch in reverse."""
    seen = Seen()
    task = make(mixup=0.8, label_smoothing=smoothing)
    quiet(tmp_path, callbacks=[seen]).fit(task, loader(), loader(seed=1))
    shares = []
    for step, (given, mixed) in enumerate(zip(seen.given, seen.images["train"], strict=True)):
        other = given.flip(0)
        share = ((mixed - other) * (given - other)).sum() / (given - other).square().sum()
        torch.testing.assert_close(mixed, share * given + (1 - share) * other)
        labels = one_hot(torch.tensor([(4 * step + i) % 3 for i in range(4)]), 3).float()
        labels = share * labels + (1 - share) * labels.flip(0)
        wanted = smoothed(seen.logits[step], labels, smoothing)
        assert seen.losses[step] == pytest.approx(wanted, rel=1e-4)
        shares.append(float(share))
    assert len({round(share, 4) for share in shares}) == 4 and all(0 <= s <= 1 for s in shares)


def test_a_pasted_part_counts_by_its_area(tmp_path: Path) -> None:
    seen = Seen()
    quiet(tmp_path, callbacks=[seen], max_epochs=3).fit(make(cutmix=1.0), loader(), loader(seed=1))
    pasted = 0
    for step, (given, mixed) in enumerate(zip(seen.given, seen.images["train"], strict=True)):
        own, other = mixed == given, mixed == given.flip(0)
        assert (own | other).all()
        share = own.float().mean()
        labels = one_hot(torch.tensor([(4 * (step % 4) + i) % 3 for i in range(4)]), 3).float()
        labels = share * labels + (1 - share) * labels.flip(0)
        assert seen.losses[step] == pytest.approx(smoothed(seen.logits[step], labels, 0), rel=1e-4)
        pasted += 0 < share < 1
    assert pasted > 3


def test_validation_sees_the_images_as_they_are(tmp_path: Path) -> None:
    seen = Seen()
    task = make(mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    trainer = quiet(tmp_path, callbacks=[seen])
    trainer.fit(task, loader(), loader(7, seed=1))  # an odd rest is none of mixing's business
    images = torch.cat(seen.images["val"][-2:])
    assert torch.equal(images, torch.stack([image for image, _ in items(7, 1)]))
    with torch.no_grad():
        logits = task.eval()(images)["class"]
    plain = cross_entropy(logits, torch.tensor([i % 3 for i in range(7)])).item()
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(plain, rel=1e-5)


class StopAfter(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_mixes_as_an_uninterrupted_one(tmp_path: Path) -> None:
    def run(folder: str, ckpt_path: str | None = None, *callbacks: L.Callback):
        torch.manual_seed(3)
        np.random.seed(len(folder))  # the global state is not what decides
        encoder = partial(Transformer, size="nano", depth=2, drop_path=0.5)
        task = make(mixup=0.8, cutmix=1.0, transformer=encoder, lr=1e-2)
        trainer = quiet(
            tmp_path / folder, max_epochs=4, enable_checkpointing=True, callbacks=list(callbacks)
        )
        trainer.fit(task, loader(), loader(seed=1), ckpt_path=ckpt_path)
        return task.state_dict(), trainer.checkpoint_callback.best_model_path

    whole, _ = run("whole")
    _, path = run("half", None, StopAfter())
    rest, _ = run("the rest", path)
    for name, value in whole.items():
        assert torch.equal(rest[name], value), name


def test_others_draw_from_numpy_undisturbed(tmp_path: Path) -> None:
    class Draws(L.Callback):
        def __init__(self) -> None:
            self.drawn: list[float] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            self.drawn.append(np.random.rand())

    found = []
    for options in ({}, {"mixup": 0.8}):
        np.random.seed(5)
        draws = Draws()
        quiet(tmp_path, callbacks=[draws]).fit(make(**options), loader(), loader(seed=1))
        found.append(draws.drawn)
    assert found[0] == found[1] and len(set(found[0])) == 4


def test_each_batch_of_an_accumulated_step_has_noise_of_its_own(tmp_path: Path) -> None:
    seen = Seen()
    trainer = quiet(tmp_path, callbacks=[seen], accumulate_grad_batches=4)
    trainer.fit(make(mixup=0.8), DataLoader(items(4) * 4, batch_size=4), loader(seed=1))
    assert trainer.global_step == 1
    assert not any(
        torch.equal(seen.images["train"][0], image) for image in seen.images["train"][1:]
    )


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_every_precision_takes_soft_labels(precision: str, tmp_path: Path) -> None:
    trainer = quiet(tmp_path, precision=precision)
    trainer.fit(make(mixup=0.8, label_smoothing=0.1), loader(), loader(seed=1))
    assert math.isfinite(float(trainer.callback_metrics["train/loss"]))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(items(7))


@pytest.mark.parametrize(
    ("data", "size"),
    [(loader(size=5), 5), (loader(7), 3), (DataLoader(Stream(), batch_size=4), 3)],
    ids=["odd batches", "an odd rest", "an odd rest that no one foretells"],
)
def test_odd_batches_are_refused(data: DataLoader, size: int, tmp_path: Path) -> None:
    seen = Seen()
    with pytest.raises(ValueError, match=rf"in pairs, and a batch has {size}: choose an even"):
        quiet(tmp_path, callbacks=[seen]).fit(make(mixup=0.8), data, loader(seed=1))
    assert len(seen.losses) == isinstance(data.dataset, IterableDataset), "before the first step"


@pytest.mark.parametrize(
    ("data", "options"),
    [(loader(7, drop_last=True), {}), (loader(7), {"limit_train_batches": 1}), (loader(6), {})],
)
def test_even_batches_are_not(data: DataLoader, options: dict, tmp_path: Path) -> None:
    quiet(tmp_path, **options).fit(make(cutmix=0.8), data, loader(seed=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": -1.0}, r"0 or more and finite, got -1.0 and 0.0"),
        ({"cutmix": math.inf}, r"0 or more and finite, got 0.0 and inf"),
        ({"label_smoothing": 1.0}, r"label_smoothing is a share below 1, got 1.0"),
        (
            {"mixup": 0.8, "classes": {"what": ANSWERS, "where": ["l", "r"]}},
            r"a single question, the data has what, where",
        ),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_smoothing_serves_several_questions(tmp_path: Path) -> None:
    classes = {"what": ANSWERS, "where": ["left", "right"]}
    task = make(classes=classes, label_smoothing=0.2)
    batch = (
        torch.randn(4, 1, 8, 12),
        {"what": torch.tensor([0, 1, 2, 0]), "where": torch.ones(4).long()},
    )
    task.log = lambda *_, **__: None
    loss = task.training_step(batch, 0)
    logits = {q: answers.detach() for q, answers in task(batch[0]).items()}
    wanted = [smoothed(logits[q], one_hot(batch[1][q], len(a)), 0.2) for q, a in classes.items()]
    assert loss.item() == pytest.approx(sum(wanted), rel=1e-5)
