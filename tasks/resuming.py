"""A run that goes on: where it was, with other numbers of processes, or of samples in a batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage

COUNTS = ("ready", "started", "processed", "completed")


def batch_of_all(trainer: Trainer) -> int | None:
    """Samples of a training batch in all processes together; None for data that does not say."""
    size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    return size * trainer.world_size if isinstance(size, int) else None


def open_batches(trainer: Trainer) -> int:
    """Batches whose gradients are accumulated, and are in no step of the optimizer yet."""
    loop = trainer.fit_loop.epoch_loop
    if not loop._should_accumulate():
        return 0
    return loop.batch_progress.current.ready % trainer.accumulate_grad_batches


def rewind(checkpoint: dict[str, Any]) -> None:
    """Go back to the first of the batches that were accumulated as it was saved: their gradients,
    which a checkpoint has not, are of the same weights.
    """
    batches = checkpoint.get("mmpos_open", 0)
    if batches and "loops" in checkpoint:
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for name in COUNTS:
            progress["current"][name] -= batches
            progress["total"][name] -= batches


def rescale(checkpoint: dict[str, Any], samples: int | None, *, endless: bool = False) -> None:
    """Make a stored run's count of batches one of batches of so many ``samples``.

    The order of samples depends on the seed and the epoch alone, so as many samples of the epoch
    are left as were; ``endless`` is data that goes on from one epoch to the next. The steps of the
    optimizer stay what they were.

    Raises: ValueError within an epoch where its samples so far do not make whole batches.
    """
    old = checkpoint.get("mmpos_samples")
    if old is None or samples is None or old == samples or "loops" not in checkpoint:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    ready, total = progress["current"]["ready"], progress["total"]["ready"]
    batches, rest = divmod(ready * old, samples)
    if progress["is_last_batch"]:  # no fewer than an epoch has of the new ones
        batches, rest = -(-(ready + 1) * old // samples), 0
    if rest or (endless and total * old % samples):
        seen, of = (total * old, "the stream") if endless else (ready * old, "an epoch")
        raise ValueError(
            f"the checkpoint was saved {seen} samples into {of}, in batches of {old} over all "
            f"processes, and now there are {samples}: choose --data.batch_size and "
            "--trainer.devices so that they divide these"
            + ("" if endless else ", or go on from the end of an epoch")
        )
    for name in COUNTS:
        progress["current"][name] += batches - ready
        progress["total"][name] += total * old // samples - total


def finish_epoch(checkpoint: dict[str, Any]) -> None:
    """Let a run that was saved at the last step of an epoch, before the validation after it, go on
    with that validation; Lightning would leave it out, and count the epoch in part.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if not loops:
        return
    batches = loops["epoch_loop.batch_progress"]
    total = batches["total"]
    if not batches["is_last_batch"] or total["completed"] != total["processed"] - 1:
        return
    validation = loops["epoch_loop.val_loop.batch_progress"]
    for counts in (batches["current"], total):
        counts["completed"] += 1
    for counts in (validation["current"], validation["total"]):
        counts.update(ready=1, started=1, processed=0, completed=0)  # as within it


def validate_first(trainer: Trainer) -> None:
    """Let a run that was saved within an epoch, before a validation that was due, go on with it.

    Raises: ValueError within an epoch for ``overfit_batches``, whose order nothing goes on with.
    """
    loop = trainer.fit_loop.epoch_loop
    seen = loop.batch_progress.current.ready
    whole = seen >= trainer.num_training_batches
    if trainer.overfit_batches and seen and not whole:  # type: ignore[attr-defined]
        raise ValueError(
            "a run with overfit_batches cannot go on within an epoch: begin it anew, or from the "
            "end of an epoch"
        )
    every = trainer.val_check_batch
    due = isinstance(every, int) and seen > 0 and seen % every == 0
    if loop.restarted_on_train_batch_end and due and not whole:
        loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        loop._batches_that_stepped -= 1  # it is counted again after the validation
