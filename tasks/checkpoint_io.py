"""Checkpoint files that are whole or not there, and are checked before they are trusted."""

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH

from tasks.shards import consolidated, is_sharded


class CheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written to a file beside and moved when that is on disk.

    A run that ends while it saves leaves the checkpoint of before, whole, and perhaps a file that
    ends in ``.part``. What is read is checked against the checksums in it, and holds tensors and
    plain data alone unless ``weights_only=False`` is asked for; a folder of shards is read as one
    checkpoint. Paths that are not of this machine are Lightning's.

    Raises: OSError for a file that cannot be written, with its reason; ValueError for one that is
    damaged.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint`` to ``path``, which until then is what it was."""
        if storage_options is not None or "://" in str(path):
            return super().save_checkpoint(checkpoint, path, storage_options)
        target = Path(path)
        part = target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            replace(part, target)
            _sync(target.parent)
        except (OSError, RuntimeError) as error:  # torch's writer hides what the system told
            part.unlink(missing_ok=True)
            reason = _system_error(error)
            if reason is None:
                raise
            kept = "; the one saved there before is kept" if target.exists() else ""
            raise OSError(
                reason.errno, f"cannot save the checkpoint {path}: {reason.strerror}{kept}"
            ) from error

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """What is in ``path``."""
        if is_sharded(path):
            return consolidated(path)
        if Path(path).is_file():
            check(path)
        return super().load_checkpoint(path, map_location, weights_only is not False)


def replace(new: Path, target: Path) -> None:
    """Moves a file or folder to where another is; a folder is removed when the new one is there."""
    old = target.with_name(f"{target.name}.old")
    if target.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        target.replace(old)
    new.replace(target)
    shutil.rmtree(old, ignore_errors=True)


def check(path: _PATH) -> None:
    """Raises ValueError for a file that is not as `torch.save` left it."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (OSError, zipfile.BadZipFile, ZlibError, EOFError, NotImplementedError) as error:
        raise ValueError(f"{path} is not a checkpoint, or a damaged one ({error})") from error
    if wrong is not None:
        raise ValueError(f"{path} is a damaged checkpoint: {wrong} is not what was written")


def _sync(folder: Path) -> None:
    """So that the new name outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None
