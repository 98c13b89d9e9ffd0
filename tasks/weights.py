"""Starting from weights in a file."""

from __future__ import annotations

import pickle
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

_PREFIX = "network."


def load_weights(network: nn.Module, path: str | PathLike) -> None:
    """Load the weights in ``path`` into ``network``, all of them or none.

    The file is a checkpoint of a task, a state dict of the task or of its network, or safetensors.
    Raises: FileNotFoundError if it is not there; ValueError if it holds no weights, or weights of
    another shape or of other names, with both named.
    """
    state = _read(Path(path))
    if any(name.startswith(_PREFIX) for name in state):
        state = {
            name.removeprefix(_PREFIX): value
            for name, value in state.items()
            if name.startswith(_PREFIX)
        }
    here = network.state_dict()
    faults = [
        f"{name} is {_shape(state[name])} there and {_shape(here[name])} here"
        for name in here
        if name in state and state[name].shape != here[name].shape
    ]
    faults += [f"{name} is missing there" for name in here if name not in state]
    faults += [f"{name} is unknown here" for name in state if name not in here]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(
            f"the weights in {path} do not fit the model: {faults[0]}{more}; "
            "build the model with their width, depth, encoding and classes"
        )
    network.load_state_dict(state)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"no file with weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"cannot read weights from {path}: {reason}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else {}
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no weights: expected a checkpoint or a state dict")
    return state


def _shape(tensor: Tensor) -> str:
    return " × ".join(map(str, tensor.shape)) or "a number"
