"""From an exception of building, training or reading data to one line for the user."""

import re
from traceback import walk_tb

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tasks import configs
from tasks.configs import CommandError, Given
from tasks.errors import chain

WRITERS = ("tasks.checkpoint_io", "tasks.sharding", "tasks.runs")
WRITERS += ("lightning.fabric.loggers.csv_logs",)
MISTAKES = (ValueError, TypeError, OSError, MisconfigurationException)


def early(error: Exception, given: list[Given]) -> CommandError | None:
    """One line for an error before the first batch, or None for what is no user's mistake."""
    told = next((e for e in chain(error) if isinstance(e, CommandError)), None)
    if told:
        return told
    if isinstance(error, RuntimeError) and "loading state_dict" in str(error):
        lines = [line.strip() for line in str(error).splitlines()[1:3]]
        return CommandError(
            f"the checkpoint does not fit the model: {' '.join(lines)} (leave out the settings in "
            "which they differ, or begin a new run from its weights: --model.weights)"
        )
    # jsonargparse wraps what a constructor raises in a list of all that the type might have been
    raised = (e for e in chain(error) if not _modules_of(e)[-1].startswith("jsonargparse"))
    cause = next(raised, error)
    if isinstance(cause, ImportError) and "pip install" in str(cause):  # of an extra
        return CommandError(_message(cause))
    if isinstance(cause, RuntimeError) and "stateful callback" in str(cause):
        return CommandError(
            "two callbacks of one class keep their state under one name: two ModelCheckpoints need "
            "another monitor, every_n_epochs or every_n_train_steps"
        )
    if isinstance(cause, KeyError) and "contains only the model" in str(cause):
        return CommandError(
            "the checkpoint holds weights alone (save_weights_only), which no run goes on from: "
            "begin a new one with them, --model.weights FILE"
        )
    if not isinstance(cause, MISTAKES):
        return None
    accelerator = configs.last("trainer.accelerator", given)
    asked = accelerator.value if accelerator else "auto"
    if isinstance(cause, MisconfigurationException) and asked not in ("auto", "cpu"):
        reason = str(cause).rstrip("!. ")
        return CommandError(f"{reason}; without a GPU use --trainer.accelerator cpu")
    return CommandError(_message(cause))


def _modules_of(error: BaseException) -> list[str]:
    """The modules that ``error`` came through, from the outermost to the one that raised it."""
    frames = walk_tb(error.__traceback__)
    return [frame.f_globals.get("__name__", "") for frame, _ in frames] or [""]


def stopped(stop: SystemExit, way_on: str) -> CommandError | None:
    """One line for a run that a signal ended, with the status that a shell gives it."""
    if isinstance(stop, SIGTERMException):
        how, status = "SIGTERM", 143
    elif isinstance(stop.__context__, KeyboardInterrupt):  # Lightning's exit
        how, status = "Ctrl-C", 130
    else:
        return None
    return CommandError(f"stopped by {how}" + (f"; to go on: {way_on}" if way_on else ""), status)


def during(error: BaseException, way_on: str) -> CommandError | None:
    """One line for bad data, a dead loader process, a full disk or a loss that is not finite, met
    after the first batch, and how to go on; None for any other error.
    """
    reading = any(name.startswith("torch.utils.data") for name in _modules_of(error))
    saving = any(name in WRITERS for name in _modules_of(error))
    dead = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")
    known = (
        (isinstance(error, ValueError | OSError) and (reading or saving))
        or isinstance(error, FloatingPointError)
        or dead
    )
    if not known:
        return None
    told = _message(error)
    if dead:
        told = (
            f"{told.rstrip('. ')}; where it was out of memory, fewer --data.num_workers or a "
            "smaller --data.batch_size help"
        )
    return CommandError(told + (f"; to go on: {way_on}" if way_on else ""))


def _message(error: BaseException) -> str:
    text = str(error).strip()
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        text = error.strerror
    if text.startswith("Caught ") and " in DataLoader worker " in text.partition("\n")[0]:
        # a worker process sends its traceback as text
        text = re.sub(r"\A[\w.]+: ", "", text.splitlines()[-1])
    return text or type(error).__name__
