"""Networks divided among processes: fully sharded data parallelism (FSDP2)."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard

from mmpos.interop.timm import Backbone
from mmpos.models import Modalities
from tasks.optim import POSITIONS
from tasks.shards import (
    Planner,
    Reader,
    check_shards,
    consolidated,
    is_sharded,
    reading,
    rest,
)

__all__ = ["FullySharded", "consolidated", "is_sharded", "materialize", "shard"]

_WHOLE = (*POSITIONS, Modalities)
"""Parts whose layers are not divided one by one: they are read in other ways than by a call of each
layer, or not by all processes in each step. They go with the rest of the network, which is gathered
before its first layer.
"""


def shard(task: L.LightningModule) -> None:
    """Divide a task's network among processes, if its trainer's strategy is a
    `ModelParallelStrategy`: each layer, then the rest. A network that is divided stays as it is.

    What the network has on the meta device gets memory and its initial values here, layer by layer,
    in whole, so that processes of one seed draw the numbers that one process would.

    Raises: ValueError for a strategy with tensor parallelism, together with an average of the
    weights, for parameters of no dimension, or as `materialize`.
    """
    trainer = task._trainer
    strategy = None if trainer is None else trainer.strategy
    if trainer is None or not isinstance(strategy, ModelParallelStrategy):
        return
    name = type(strategy).__name__
    callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    if any(isinstance(callback, WeightAveraging) for callback in callbacks):
        raise ValueError(
            f"an average of the weights is of whole weights, and {name} divides them: leave "
            "--model.ema out, or train with --trainer.strategy ddp"
        )
    mesh = strategy.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"{name} has tensor_parallel_size={mesh['tensor_parallel'].size()}, and networks are "
            "divided as data_parallel_size says: make it the number of all processes, as "
            "--config trainer/fsdp does"
        )
    network = task.network
    assert isinstance(network, nn.Module)
    if isinstance(network, FSDPModule):
        return
    for layer in [*_layers(network), network]:
        materialize(layer, strategy.root_device)
        fully_shard(layer, mesh=mesh["data_parallel"])


def gather(network: nn.Module, *, whole: bool) -> None:
    """Keep a divided network whole in each process, which then need not run it equally often; or
    divide it again.
    """
    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(not whole, recurse=False)
            if whole:
                part.unshard()
            else:
                part.reshard()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers in lists of equal ones, the inner ones first."""
    for child in module.children():
        if isinstance(child, _WHOLE):
            continue
        yield from _layers(child)
        if isinstance(child, nn.ModuleList | nn.Sequential):
            alike = len({type(layer) for layer in child}) == 1
            if alike and all(any(True for _ in layer.children()) for layer in child):
                yield from child


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give what ``module`` has on the meta device memory and the values it would begin with.

    Raises: ValueError for a part that does not say how it begins, by ``reset_parameters``.
    """
    for part in module.modules():
        if isinstance(part, Backbone) and any(weight.is_meta for weight in part.parameters()):
            raise ValueError(
                "a timm backbone begins with values that timm sets when it is made: make the task "
                "without torch.device('meta')"
            )
        owned = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in owned):
            continue
        reset = getattr(part, "reset_parameters", None)
        if not callable(reset):
            raise ValueError(
                f"{type(part).__name__} has no reset_parameters() to begin with after the meta "
                "device: make the task without torch.device('meta')"
            )
        part.to_empty(device=device, recurse=False)
        reset()


class FullySharded(ModelParallelStrategy):
    """Each process has its part of all weights, gradients and moments (FSDP2; ZeRO's third stage,
    arXiv:1910.02054, sec. 5).

    It is `ModelParallelStrategy` over all processes that there are, and differs in its checkpoints:
    one takes the place of that before when it is whole, with what is under way in a folder that
    ends in ``.part``; nothing that is read is executed; and a run goes on from a folder of shards
    or a single file, of any number of processes, by the settings of the optimizer that it is given
    now.

    Args:
        save_distributed_checkpoint: whether a checkpoint is a folder to which each process writes
            its shards; else it is a file, for which the first one gathers all.
        process_group_backend: by default NCCL on CUDA and gloo on the CPU.
        timeout: of a process that waits for another.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Begin a group of all processes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | PathLike, storage_options: Any = None
    ) -> None:
        """Write a checkpoint to ``filepath``, which until it is whole is what it was."""
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part, old = (path.with_name(f"{path.name}.{end}") for end in ("part", "old"))
        if self.global_rank == 0:
            _remove(part)
        self.barrier()
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
        except CheckpointException as error:
            raise OSError(
                errno.EIO, f"cannot save the checkpoint {path}: {_reason(error)}"
            ) from error
        self.barrier()
        if self.global_rank == 0:
            _remove(old)
            if path.exists():
                path.replace(old)
            part.replace(path)
            _remove(old)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | PathLike, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load weights and moments into the model and its optimizers; returns the rest.

        Raises: ValueError for weights of other names or shapes, or for what is no checkpoint.
        """
        path = Path(self.broadcast(checkpoint_path))
        return self._load_shards(path) if path.is_dir() else self._load_file(path)

    def _load_shards(self, path: Path) -> dict[str, Any]:
        assert self.model is not None
        fault = ""
        if self.global_rank == 0:
            try:
                check_shards(path)
            except ValueError as error:
                fault = str(error)
        if fault := self.broadcast(fault):
            raise ValueError(fault)
        content, reader, start = rest(path), Reader(path), "state_dict."
        with reading(path):
            stored = reader.read_metadata().state_dict_metadata.items()
        self._check(
            path,
            {
                key.removeprefix(start): tuple(value.size)
                for key, value in stored
                if key.startswith(start) and isinstance(value, TensorStorageMetadata)
            },
        )
        weights = {"state_dict": get_model_state_dict(self.model)}
        with reading(path):
            load(weights, storage_reader=reader, planner=Planner(allow_partial_load=True))
        self.model.load_state_dict(weights["state_dict"], strict=False)
        for index, optimizer in enumerate(self.optimizers):
            own = get_optimizer_state_dict(self.model, optimizer)
            moments = {f"optimizer_{index}": {"state": own["state"]}}
            with reading(path):
                load(moments, storage_reader=reader, planner=Planner(allow_partial_load=True))
            set_optimizer_state_dict(self.model, optimizer, own)
        return content

    def _load_file(self, path: Path) -> dict[str, Any]:
        assert self.model is not None
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        weights = content.pop("state_dict")
        self._check(path, _shapes(weights))
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(self.model, weights, options=options)
        states = content.pop("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            own: Any = get_optimizer_state_dict(self.model, optimizer, options=options)
            stored = _by_name(state)
            own["state"] |= {name: stored.get(name, v) for name, v in own["state"].items()}
            set_optimizer_state_dict(self.model, optimizer, own, options=options)
        return content

    def _check(self, path: Path, there: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError for weights that do not fit."""
        assert self.model is not None and self.lightning_module is not None
        here = _shapes(self.model.state_dict())
        known = here.keys() | there.keys()
        if not self.lightning_module.strict_loading:
            known = here.keys() & there.keys()
        for name in sorted(known):
            if there.get(name) != here.get(name):
                raise ValueError(
                    f"the checkpoint {path} is of another network: {name} is "
                    f"{there.get(name, 'missing')} there and {here.get(name, 'unknown')} here; to "
                    "begin with its weights use --model.weights"
                )


def _reason(error: CheckpointException) -> str:
    """What went wrong in the first of the processes."""
    failures = [failure[0] for failure in error.failures.values()]
    return str(failures[0]).splitlines()[0] if failures else "shards cannot be written"


def _remove(folder: Path) -> None:
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink(missing_ok=True)


def _shapes(weights: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(v.shape) for name, v in weights.items() if isinstance(v, Tensor)}


def _by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """The moments in an optimizer's state by parameters' names."""
    names = {
        number: name
        for group in state["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {names[number]: own for number, own in state["state"].items()}
