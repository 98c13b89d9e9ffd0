"""What else a measurement depends on: versions, the device, the state of the code."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmpos


def environment(device: torch.device) -> dict[str, Any]:
    """Versions of all that computes, the device, and the commit of this package.

    >>> environment(torch.device("cpu"))["versions"]["torch"] == torch.__version__
    True
    """
    cuda = device.type == "cuda"
    library = sys.modules.get("transformers")
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "mmpos": mmpos.__version__,
    }
    if library is not None:
        versions["transformers"] = library.__version__
    return {
        "versions": versions,
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the package's own sources, with ``+`` where they were changed since.

    None where they are not in a repository, or there is no git.
    """
    folder = Path(__file__).parent.parent
    tracked = _git(folder, "ls-files", "--error-unmatch", "__init__.py")
    head = _git(folder, "rev-parse", "HEAD") if tracked else None
    if not head:
        return None
    return f"{head}+" if _git(folder, "status", "--porcelain", ".") else head


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
