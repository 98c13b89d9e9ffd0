"""Starting from weights in a file."""

from __future__ import annotations

from collections.abc import Container, Sequence
from os import PathLike
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmpos.additive import TableEncoding
from mmpos.bias import RelativePositionBias
from mmpos.interop.timm import Backbone
from tasks.inflation import inflated
from tasks.shards import consolidated, is_sharded

_PREFIXES = ("_orig_mod.", "module.", "network.")  # of compiled, distributed and our modules


def load_weights(network: nn.Module, path: str | PathLike, leave_out: Sequence[str] = ()) -> str:
    """Load the weights in ``path`` into ``network``, all of them or none; returns a report.

    The file is a checkpoint of a task, a state dict of the task or of its network, or safetensors.
    Tables of another grid are resized, and weights of a network for images inflated for clips
    (`tasks.inflation.inflated`); names that begin with one of ``leave_out`` keep their
    initial values; the report names both.
    Raises: FileNotFoundError if it is not there; ValueError if it holds no weights, or weights of
    another shape or of other names, with both named.
    """
    here = network.state_dict()
    state = _without_prefixes(_read(Path(path)), here)
    if isinstance(leave_out, str) or not all(leave_out):
        raise ValueError(f"leave_out is a list of names such as ['heads'], got {leave_out!r}")
    unknown = [part for part in leave_out if not any(name.startswith(part) for name in here)]
    if unknown:
        raise ValueError(
            f"nothing to leave out is called {unknown[0]!r}: the parts are "
            + ", ".join(name for name, _ in network.named_children())
        )
    kept = [name for name in here if name.startswith(tuple(leave_out))]
    state = {name: v for name, v in state.items() if not name.startswith(tuple(leave_out))}
    state, told = inflated(network, state)
    tables = {
        f"{name}.{own}": (part, own)
        for name, part in network.named_modules()
        if isinstance(part, TableEncoding | RelativePositionBias)
        for own in part.tables
    }
    moved = {
        f"{path}.{table}"
        for path, part in network.named_modules()
        if isinstance(part, Backbone)
        for size in [part.stored_size(state, f"{path}.")]
        if size is not None
        for table in part.resized_from(size)
    }
    faults, resized = [], []
    for name, value in here.items():
        if name in kept:
            continue
        if name not in state:
            faults.append(f"{name} is missing there")
        elif state[name].shape == value.shape:
            continue
        elif name in moved:
            resized.append(f"{name} {_shape(state[name].shape)} → {_shape(value.shape)}")
        elif name in tables and tables[name][0].fits(state[name], tables[name][1]):
            grids = f"{_shape(state[name].shape[:-1])} → {_shape(value.shape[:-1])}"
            resized.append(f"{name} {grids} ({tables[name][0].resampling})")
        else:
            faults.append(
                f"{name} is {_shape(state[name].shape)} there and {_shape(value.shape)} here"
            )
    faults += [f"{name} is unknown here" for name in state if name not in here]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(
            f"the weights in {path} do not fit the model: {faults[0]}{more}; build the model with "
            "their width, depth, encoding, patch and classes, or name the parts to leave out "
            "(--model.leave_out+=heads)"
        )
    network.load_state_dict(state, strict=False)
    made = f"inflated: {', '.join(told)}; " if told else ""
    return (
        f"weights: {len(state)} tensors of {path}; "
        f"resized: {', '.join(resized) or 'none'}; {made}left out: {', '.join(kept) or 'none'}"
    )


def _read(path: Path) -> dict[str, Tensor]:
    if path.is_dir() and not is_sharded(path):
        raise IsADirectoryError(f"{path} is a folder, expected a file with weights")
    if not path.exists():
        raise FileNotFoundError(f"no file with weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.is_dir():
            content = consolidated(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file of something else, these raise anything
        raise ValueError(
            f"cannot read weights from {path}: expected a checkpoint, a state dict or safetensors; "
            "this is not one, or a damaged one"
        ) from error
    state = content.get("state_dict", content) if isinstance(content, dict) else {}
    plain = isinstance(state, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    )
    if not state or not plain:
        raise ValueError(f"{path} holds no weights: expected a checkpoint or a state dict")
    return state


def _without_prefixes(state: dict[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """The entries below what wraps the network, by their names in it."""
    while not any(name in names for name in state):
        prefix = next((p for p in _PREFIXES if any(n.startswith(p) for n in state)), None)
        if prefix is None:
            break
        state = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
    return state


def _shape(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes)) or "a number"
