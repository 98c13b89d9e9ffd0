"""A run's folder: what it was made of, and the newest whole checkpoint in it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from mmpos import __version__
from tasks import checkpoints, configs
from tasks.configs import CommandError, Given

PACKAGES = ("lightning", "torch", "torchvision", "torchaudio", "timm", "torchmetrics", "einops")


class Environment(Callback):
    """Writes ``environment.json`` into the run's folder: an entry for each start of the run.

    Each has the command, when, the seed, the step it went on from, versions, devices and
    processes, and the commit of the git repository in the current folder, and whether files there
    departed from it (null where there is none).
    """

    def __init__(self, seed: int | bool | None = None) -> None:
        self.seed = seed

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the entry; the first process writes it."""
        folder = trainer.log_dir  # a collective call
        if folder is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = Path(folder) / "environment.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        starts = []
        if path.is_file():
            try:
                starts = json.loads(path.read_text("utf-8"))
            except ValueError:  # of a start that was ended as it wrote
                path.replace(path.with_suffix(".damaged"))
        starts.append(described(trainer, self.seed))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(starts, indent=2) + "\n", "utf-8")
        part.replace(path)


def described(trainer: Trainer, seed: int | bool | None) -> dict[str, Any]:
    """What a run is made of, as plain data."""
    device = trainer.strategy.root_device
    return {
        "command": shlex.join(["mmpos", *sys.argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "step": trainer.global_step,
        "git": _git(),
        "mmpos": __version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": trainer.world_size,
        "nodes": trainer.num_nodes,
        "threads": torch.get_num_threads(),
        "precision": trainer.precision,
        "strategy": type(trainer.strategy).__name__,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


def _git() -> dict[str, Any] | None:
    commit = _told_by_git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_told_by_git("status", "--porcelain", "-uno"))}


def _told_by_git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def keep_metrics(folder: str | os.PathLike) -> Path | None:
    """Sets aside ``metrics.csv`` of an earlier start in the same folder, which a logger would
    delete: as ``metrics.1.csv``, the next number that is free. Returns its place, if there was one.
    """
    path = Path(folder) / "metrics.csv"
    if not path.is_file():
        return None
    number = 1
    while (free := path.with_name(f"metrics.{number}.csv")).exists():
        number += 1
    return path.rename(free)


def last(given: list[Given], tell: Callable[[str], None]) -> str | None:
    """The newest checkpoint that is whole of the runs that a job writes: below its logger's folder
    (``save_dir/name/version`` as far as they are given, else ``runs``), and where its callbacks
    save.

    None, for a job of SLURM that starts again before it had saved one. Those passed over, since
    they are damaged, are told.
    Raises: CommandError if there is none.
    """
    folders = _folders(given)
    kept = ("*.ckpt", "*.ckpt.old")  # a folder of shards, while another takes its place
    found = {path for folder in folders for name in kept for path in folder.rglob(name)}
    ages = {path: path.stat().st_mtime for path in found if path.exists()}  # not a link to nothing
    for path in sorted(ages, key=lambda path: ages[path], reverse=True):
        if fault := checkpoints.fault(str(path)):
            tell(f"--ckpt_path last: passed over {fault}")
            continue
        tell(f"--ckpt_path last: {path}")
        return str(path)
    where = " or ".join(map(str, folders))
    if os.environ.get("SLURM_RESTART_COUNT"):
        tell(f"--ckpt_path last: no whole checkpoint below {where} yet, the job begins anew")
        return None
    raise CommandError(
        f"--ckpt_path last: there is no last checkpoint to go on with below {where}: give its "
        "file, or leave --ckpt_path out to begin anew"
    )


def version(path: str, given: list[Given]) -> str | None:
    """The version of the run that a checkpoint is of, for it to go on in the same folder; None
    where one is given, or the job's logger writes elsewhere.
    """
    logger = _logger(given)
    if not logger or logger.get("version"):
        return None
    run = Path(path).parent.parent
    own = run.parent == Path(*filter(None, map(logger.get, ("save_dir", "name"))))
    return run.name if own and Path(path).parent.name == "checkpoints" else None


def _folders(given: list[Given]) -> list[Path]:
    own = [each.value for each in given if each.path == "trainer.callbacks.dirpath" and each.value]
    setting = configs.last("trainer.default_root_dir", given)
    root = Path(setting.value if setting and setting.value != "null" else ".")
    logger = _logger(given)
    if logger is None:
        folders = [root / "lightning_logs", root / "checkpoints"]
        if setting is None and not any(each.path == "model" for each in given):  # no job
            folders = [Path("runs")]
    elif not logger:
        folders = [root / "checkpoints"]
    else:
        number = logger.get("version", "")
        number = f"version_{number}" if number.isdigit() else number
        name = logger.get("name", "lightning_logs")
        folders = [Path(logger.get("save_dir") or root, *filter(None, (name, number)))]
    return [*folders, *map(Path, own)]


def _logger(given: list[Given]) -> dict[str, str] | None:
    """The settings of the logger that checkpoints lie with, the first of several; empty for none;
    None where nothing is said of one.
    """
    found: dict[str, str] | None = None
    number, several = 0, False
    for each in given:
        if each.path == "trainer.logger":
            if each.value.startswith("["):
                found, number, several = {}, 0, True
            elif each.value.lower() == "false":
                found, several = {}, False
            elif each.value.lower() in ("null", "true"):
                found, several = {"name": "lightning_logs"}, False
            elif each.value:
                number += 1
                found = found or {"class_path": each.value}
        elif each.path.startswith("trainer.logger.") and (number < 2 or not several):
            value = "" if each.value == "null" else each.value
            found = {**(found or {}), each.path.removeprefix("trainer.logger."): value}
    return found
