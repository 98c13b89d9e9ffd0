"""A run that goes on with other numbers of processes, or of samples in a batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


def batch_of_all(trainer: Trainer) -> int | None:
    """Samples of a training batch in all processes together; None for data that does not say."""
    size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    return size * trainer.world_size if isinstance(size, int) else None


def rescale(checkpoint: dict[str, Any], samples: int | None) -> None:
    """Make a stored run's count of batches one of batches of so many ``samples``.

    The order of samples depends on the seed and the epoch alone, so as many samples of the epoch
    are left as were. The steps of the optimizer stay what they were.

    Raises: ValueError within an epoch where its samples so far do not make whole batches.
    """
    old = checkpoint.get("mmpos_samples")
    if old is None or samples is None or old == samples or "loops" not in checkpoint:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    ready = progress["current"]["ready"]
    if progress["is_last_batch"]:  # no fewer than an epoch has of the new ones
        batches = -(-(ready + 1) * old // samples)
    else:
        batches, rest = divmod(ready * old, samples)
        if rest:
            raise ValueError(
                f"the checkpoint was saved {ready * old} samples into an epoch, in batches of "
                f"{old} over all processes, and now there are {samples}: choose "
                "--data.batch_size and --trainer.devices so that they divide these, or go on from "
                "the end of an epoch"
            )
    for counts in (progress["current"], progress["total"]):
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += batches - ready
