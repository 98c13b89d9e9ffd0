"""A run that goes on: where it was, with other numbers of processes, or of samples in a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage

from tasks.data.module import DataModule

COUNTS = ("ready", "started", "processed", "completed")


class Shares(NamedTuple):
    """How training data is shared out."""

    samples: int | None = None
    """Of a batch in all processes together; None for data that does not say."""
    parts: tuple[int, int] | None = None
    """Processes, and loader processes of each, where a stream is read in parts of theirs."""
    buckets: int | None = None
    """Batches that are sorted at a time."""

    @classmethod
    def of(cls, trainer: Trainer) -> Shares:
        """Those of a trainer's data."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, DataModule):
            return cls()
        processes, workers = trainer.world_size, data.num_workers
        parts = (processes, workers) if getattr(data, "streaming", False) else None
        return cls(data.batch_size * processes, parts, data.buckets)


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


def rescale(checkpoint: dict[str, Any], now: Shares) -> None:
    """Make a stored run's count of batches one of batches as they are ``now``.

    The order of samples depends on the seed and the epoch alone, so as many samples of the epoch
    are left as were; but for a stream, whose parts go on from one epoch to the next, and buckets,
    which are sorted by batches. The steps of the optimizer stay what they were.

    Raises: ValueError within an epoch where what is left cannot be told, or its samples so far do
    not make whole batches.
    """
    then = Shares(**checkpoint.get("mmpos_shares", {}))
    old, samples = then.samples, now.samples
    if old is None or samples is None or "loops" not in checkpoint:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    ready, total = progress["current"]["ready"], progress["total"]["ready"]
    if now.parts and then.parts and tuple(then.parts) != now.parts and total:
        raise ValueError(
            f"a stream is read in parts, by {then.parts[0]} processes with {then.parts[1]} loader "
            f"processes each, and now there are {now.parts[0]} with {now.parts[1]}: go on with as "
            "many"
        )
    within = ready and not progress["is_last_batch"]
    if within and (then.buckets != now.buckets or (now.buckets and old != samples)):
        raise ValueError(
            f"the order within an epoch is that of {then.buckets} buckets of {old} samples over "
            f"all processes, and now there are {now.buckets} of {samples}: keep them, or go on "
            "from the end of an epoch"
        )
    if old == samples:
        return
    batches, rest = divmod(ready * old, samples)
    if progress["is_last_batch"]:  # no fewer than an epoch has of the new ones
        batches, rest = -(-(ready + 1) * old // samples), 0
    if rest or (now.parts and total * old % samples):
        seen, of = (total * old, "the stream") if now.parts else (ready * old, "an epoch")
        raise ValueError(
            f"the checkpoint was saved {seen} samples into {of}, in batches of {old} over all "
            f"processes, and now there are {samples}: choose --data.batch_size and "
            "--trainer.devices so that they divide these"
            + ("" if now.parts else ", or go on from the end of an epoch")
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
    count = seen if trainer.check_val_every_n_epoch is not None else loop.batch_progress.total.ready
    due = isinstance(every, int) and seen > 0 and count % every == 0
    if loop.restarted_on_train_batch_end and due and not whole:
        loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        loop._batches_that_stepped -= 1  # it is counted again after the validation
