"""What a run came to, in a few lines."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console


def print_fit(metrics: Mapping[str, float], checkpoint: str, log_dir: str | None) -> None:
    """Prints test metrics (accuracies in percent), where things lie, and the next command."""
    lines = [
        (name, f"{100 * value:.1f} %" if name.endswith("accuracy") else f"{value:.4g}")
        for name, value in metrics.items()
    ]
    if checkpoint:
        lines.append(("checkpoint", relative(checkpoint)))
    if log_dir:
        lines.append(("logs", relative(log_dir)))
    if checkpoint:
        lines.append(("next", command("test", checkpoint)))
    width = max((len(name) for name, _ in lines), default=0)
    console = Console(highlight=False, markup=False, soft_wrap=True)  # paths stay whole
    console.print()
    for name, text in lines:
        console.print(f"{name:{width}}  {text}", style="bold" if name in metrics else None)


def command(name: str, checkpoint: str) -> str:
    """The command that uses a checkpoint, as a user would type it."""
    return f"mmpos {name} --ckpt_path {shlex.quote(relative(checkpoint))}"


def relative(path: str | Path) -> str:
    """``path`` as seen from the current folder, if it lies below."""
    full = Path(path).resolve()
    here = Path.cwd()
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)
