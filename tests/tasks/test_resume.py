"""A resumed run ends with the weights of one that was not interrupted, bit for bit."""

import runpy
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from tasks.checkpoint_io import CheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
JOBS = runpy.run_path(str(Path(__file__).with_name("small_jobs.py")))
job: Callable = JOBS["job"]
TRAINER = ("accumulate_grad_batches", "callbacks", "limit_val_batches", "max_epochs")
TRAINER += ("val_check_interval", "check_val_every_n_epoch", "overfit_batches", "precision")
EPOCHS, STEPS = 2, 5  # of 32 samples, of 160 an epoch


class Seen(Callback):
    """Losses of the steps."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])


def fit(
    name: str, folder: Path, start: str | None = None, batch: int = 32, seed: int = 0, **options
) -> tuple[L.Trainer, dict[str, Tensor], dict[int, float]]:
    """A run that saves after each step, and after each validation."""
    trainer_options = {n: options.pop(n) for n in TRAINER if n in options}
    epochs = trainer_options.pop("max_epochs", EPOCHS)
    L.seed_everything(seed, verbose=False)
    task, data = job(name, batch, folder / "texts", **{"drop_path": 0.3} | options)
    seen = Seen()
    names = {"dirpath": folder / ("again" if start else "run"), "save_top_k": -1}
    names["auto_insert_metric_name"] = False
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[
            seen,
            *trainer_options.pop("callbacks", ()),
            ModelCheckpoint(filename="step{step}", every_n_train_steps=1, **names),
            ModelCheckpoint(filename="epoch{step}", every_n_epochs=1, **names),
        ],
        plugins=[CheckpointIO()],
        num_sanity_val_steps=0,
        limit_val_batches=trainer_options.pop("limit_val_batches", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    trainer.fit(task, datamodule=data, ckpt_path=start)
    return trainer, dict(task.network.state_dict()), seen.losses


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("name", JOBS["NAMES"])
def test_resumed_within_an_epoch_at_its_last_step_and_at_its_end(
    name: str, options: dict, tmp_path: Path
) -> None:
    if options and name not in ("image", "audio"):
        pytest.skip("averages and loader processes are the same for all")
    _, whole, losses = fit(name, tmp_path, **options)
    assert len(losses) == EPOCHS * STEPS and len(set(losses.values())) == EPOCHS * STEPS
    for saved in ("step2", "step5", "epoch5", "step8"):
        start = str(tmp_path / "run" / f"{saved}.ckpt")
        trainer, resumed, rest = fit(name, tmp_path, start, seed=9, **options)
        assert trainer.global_step == EPOCHS * STEPS
        assert rest == {step: loss for step, loss in losses.items() if step > int(saved[-1])}
        same(resumed, whole)


def test_another_number_of_samples_in_a_batch_goes_on_with_those_that_were_left(
    tmp_path: Path,
) -> None:
    """As when a run of two processes is resumed in one: the same samples a step, twice the batches,
    or other steps.
    """
    kind = {"drop_path": 0.0}
    _, whole, _ = fit("image", tmp_path, **kind)
    for saved in ("step2", "step5", "epoch5"):
        start = str(tmp_path / "run" / f"{saved}.ckpt")
        trainer, resumed, _ = fit(
            "image", tmp_path, start, batch=16, accumulate_grad_batches=2, **kind
        )
        assert trainer.global_step == EPOCHS * STEPS
        for name, value in whole.items():
            torch.testing.assert_close(resumed[name], value, atol=2e-4, rtol=0)
        trainer, _, rest = fit("image", tmp_path, start, batch=16, **kind)
        batches = 2 * (EPOCHS * STEPS - int(saved[-1]))  # and one step for each
        assert len(rest) == batches and trainer.global_step == int(saved[-1]) + batches
        assert rest.keys() == set(range(int(saved[-1]) + 1, trainer.global_step + 1))
    start = str(tmp_path / "run" / "step3.ckpt")
    with pytest.raises(ValueError, match=r"saved 96 samples into an epoch, in batches of 32 .* 80"):
        fit("image", tmp_path, start, batch=80, **kind)
    start = str(tmp_path / "run" / "step5.ckpt")
    _, _, rest = fit("image", tmp_path, start, batch=80, **kind)
    assert list(rest) == [6, 7]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"limit_val_batches": 0},
        {"val_check_interval": 0.4},
        {"check_val_every_n_epoch": 2},
        {"accumulate_grad_batches": 2},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_a_resumed_run_that_is_resumed_again(options: dict, tmp_path: Path) -> None:
    """Each time from the last step of an epoch, or from one before a validation that is due."""
    steps = STEPS if "accumulate_grad_batches" not in options else 3
    _, whole, _ = fit("image", tmp_path, max_epochs=3, **options)
    for chain in ((steps, 2 * steps - 1), (2, steps, 2 * steps), (4, steps + 2), (2, 2)):
        folder = "run"
        for path in (tmp_path / "again").glob("*"):
            path.unlink()
        for step in chain:
            (tmp_path / "from").mkdir(exist_ok=True)
            start = tmp_path / "from" / "start.ckpt"
            saved = tmp_path / folder / f"step{step}.ckpt"
            start.write_bytes(saved.read_bytes() if saved.exists() else start.read_bytes())
            trainer, resumed, _ = fit("image", tmp_path, str(start), max_epochs=3, **options)
            folder = "again"
            assert trainer.global_step == 3 * steps and trainer.current_epoch == 3
            same(resumed, whole)


@pytest.mark.parametrize("name", ["image", "algorithm"])
def test_what_is_saved_between_two_steps_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """Begins with the first batch whose gradient is in no step."""
    options = {"accumulate_grad_batches": 3, "val_check_interval": 0.4}

    class Save(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            trainer.save_checkpoint(tmp_path / "often" / f"{number}.ckpt", weights_only=False)

    _, whole, _ = fit(name, tmp_path, callbacks=[Save()], **options)
    for number in range(1, 2 * STEPS):
        trainer, resumed, _ = fit(
            name, tmp_path, str(tmp_path / "often" / f"{number}.ckpt"), **options
        )
        assert trainer.global_step == 4
        same(resumed, whole)


class Validated(Callback):
    """The steps at which validations ended."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize("interval", [1.0, 0.4, 4])
def test_a_validation_that_was_due_is_not_left_out(interval: float, tmp_path: Path) -> None:
    """So that stopping early and the best checkpoint are what they would have been. Four batches
    are counted over epochs.
    """
    whole = Validated()
    often = {"val_check_interval": interval}
    often |= {"check_val_every_n_epoch": None} if interval == 4 else {}
    fit("image", tmp_path, callbacks=[whole], **often)
    for step in range(1, 2 * STEPS):
        start = str(tmp_path / "run" / f"step{step}.ckpt")
        again = Validated()
        fit("image", tmp_path, start, callbacks=[again], **often)
        assert again.steps == [each for each in whole.steps if each >= step], step


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfitting_cannot_be_resumed_within_an_epoch(tmp_path: Path) -> None:
    fit("image", tmp_path, overfit_batches=4)
    with pytest.raises(ValueError, match="overfit_batches cannot go on within an epoch"):
        fit("image", tmp_path, str(tmp_path / "run" / "step2.ckpt"), overfit_batches=4)


@pytest.mark.parametrize("kind", ["LearningRateFinder", "StochasticWeightAveraging"])
@pytest.mark.filterwarnings("ignore")
def test_callbacks_that_train_in_other_ways(kind: str, tmp_path: Path) -> None:
    options = (
        {"swa_lrs": 1e-2} if kind == "StochasticWeightAveraging" else {"num_training_steps": 3}
    )
    callback = getattr(L.pytorch.callbacks, kind)(**options)
    trainer, _, _ = fit("image", tmp_path, callbacks=[callback])
    assert trainer.global_step == EPOCHS * STEPS
