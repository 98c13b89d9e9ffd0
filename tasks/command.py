"""``mmpos fit``, ``validate``, ``test`` and ``predict``: from arguments to a run."""

import logging
import warnings
from contextlib import nullcontext

from mmpos.interop.timm.backbone import blank
from tasks import checkpoints, configs, errors, faults, runs, summary
from tasks.callbacks import FirstBatch
from tasks.configs import CommandError
from tasks.errors import LINKED
from tasks.lightning_cli import Command, leave_group


def run(command: str, files: list[str], others: list[str]) -> None:
    """Runs a sub-command on config files, in order, with typed arguments laid over them.

    Raises: CommandError for a user's mistake; what fails after the first batch is left as it is.
    """
    _silence(command)
    given = [setting for file in files for setting in configs.read(file)]
    given += configs.typed(others)
    configs.check_sections(given)
    recorded = None
    asked = configs.last("ckpt_path", given)
    path = asked.value if asked and asked.value != "null" else ""
    going_on = path == "last"
    if going_on:
        path = runs.last(given, lambda line: summary.tell([line])) or ""
        others = [*others, f"--ckpt_path={path or 'null'}"]
        given += configs.typed(others[-1:])
    trusted = configs.last("weights_only", given)  # then Python objects may stand in for settings
    if checkpoints.is_file(path) and not (trusted and trusted.value.lower() == "false"):
        recorded = checkpoints.recorded(path, LINKED, trainer=command == "fit")
        given = [*configs.settings(recorded.text, f"recorded in {path}"), *given]
    if going_on and path and command == "fit" and (version := runs.version(path, given)):
        others = [*others, f"--trainer.logger.version={version}"]
        given += configs.typed(others[-1:])
    weights = configs.find("model.weights", given)
    architecture = checkpoints.architecture(weights.value) if weights and not path else ""
    first_batch = FirstBatch()
    try:
        args = [f"--config={file}" for file in files] + others
        with blank() if path else nullcontext():  # a checkpoint has the weights of its backbone
            Command(command, args, given, recorded, architecture, first_batch)
        leave_group()
    except errors.ParseError as error:
        raise CommandError(errors.describe(error, given, command, others), 2) from error
    except Exception as error:
        mistake = None if first_batch.reached else faults.early(error, given)
        if mistake is None or mistake is error:
            raise
        if not path and not architecture and "argument: 'transformer'" in str(mistake):
            reason = (
                f"{mistake}, since {weights.value} is missing or records no settings"
                if weights
                else f"{mistake}: give one, or --model.weights FILE to go on from a checkpoint's"
            )
            mistake = CommandError(reason, 2)
        raise mistake from error


def _silence(command: str) -> None:
    """Leaves out advertisements, and warnings that a user of the command can do nothing about."""
    for name in ("pytorch.utilities.rank_zero", "fabric.utilities.seed"):
        logging.getLogger(f"lightning.{name}").addFilter(_tells_something)
    warnings.filterwarnings("ignore", ".*there is no last checkpoint available")  # our own error
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", "Precision .* is not supported by the model summary")
    if command != "fit":  # which asks the checkpoint for weights only
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks used")
        warnings.filterwarnings("ignore", "The dirpath has changed from")


def _tells_something(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "💡 Tip" not in message and "Seed set to" not in message
