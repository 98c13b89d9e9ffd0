"""What a run came to, in a few lines."""

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch import nn

from tasks.optim import POSITIONS


@rank_zero_only
def tell(lines: Iterable[str]) -> None:
    """Prints lines beside the results, by the first process."""
    for line in lines:
        print(line, file=sys.stderr)


def positions(network: nn.Module) -> Iterator[str]:
    """A line for each encoding of a network: where it is, its class, and its parameters by name."""
    found = False
    for name, part in network.named_modules():
        if isinstance(part, POSITIONS):
            found = True
            own = [
                f"{own} {' × '.join(map(str, parameter.shape))}"
                for own, parameter in part.named_parameters()
            ]
            total = sum(parameter.numel() for parameter in part.parameters())
            learned = f"{', '.join(own)}: {total:,} parameters" if own else "no parameters"
            yield f"positions: {name} {type(part).__name__}, {learned}"
    if not found:
        yield "positions: no encoding of mmpos"


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
