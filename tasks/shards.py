"""Checkpoints in folders of shards, as `torch.distributed.checkpoint` writes them.

Torch unpickles what describes the shards and what is no tensor in them, whatever that executes;
here both are read as tensors and plain data, or not at all.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

_FILES = (".metadata", "meta.pt")  # torch's and Lightning's, which is written last
_DESCRIBES = {
    "torch.distributed.checkpoint.metadata": (
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
}


def is_sharded(path: str | PathLike) -> bool:
    """Whether ``path`` is a whole checkpoint in a folder of shards."""
    return all((Path(path) / name).is_file() for name in _FILES)


def consolidated(folder: str | PathLike) -> dict[str, Any]:
    """The checkpoint in a folder of shards as one, as a trainer writes it without sharding.

    It is read in whole, by this process alone, and nothing in it is executed.
    Raises: ValueError for what is no such checkpoint, a damaged one, or one with Python objects.
    """
    folder = Path(folder)
    if not is_sharded(folder):
        raise ValueError(f"{folder} is no folder of shards, which has {' and '.join(_FILES)} in it")
    check_shards(folder)
    content, reader = rest(folder), Reader(folder)
    state: dict[str, Any] = {}
    with reading(folder):
        reader.read_metadata()
        _load_state_dict(state, reader, planner=_WholePlanner(), no_dist=True)
    content |= state
    names = [key for key in content if key.startswith("optimizer_") and key[10:].isdecimal()]
    if names:
        states = [_numbered(content.pop(name)) for name in sorted(names, key=lambda n: int(n[10:]))]
        content["optimizer_states"] = states
    return content


def check_shards(folder: str | PathLike) -> None:
    """Raises ValueError where files of the shards are missing, cut, or not what was written."""
    reader = Reader(folder)
    with reading(Path(folder)):
        for stored in reader.read_metadata().storage_data.values():
            file = Path(folder) / stored.relative_path
            with file.open("rb") as content:
                content.seek(stored.offset)
                item = content.read(stored.length)
            if len(item) < stored.length:
                raise EOFError(f"{file} is cut")
            if zipfile.ZipFile(BytesIO(item)).testzip() is not None:
                raise ValueError(f"{file} is not what was written")


def rest(folder: Path) -> dict[str, Any]:
    """What a checkpoint has beside weights and moments."""
    with reading(folder):
        return torch.load(folder / "meta.pt", map_location="cpu", weights_only=True)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raises ValueError for shards that cannot be read, of which torch raises anything."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"cannot read the shards in {folder}: expected a checkpoint of tensors and plain "
            "settings; this is another, or a damaged one"
        ) from error


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameters' numbers, as it was by their names."""
    numbers: dict[str, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(name, len(numbers)) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    moments = {numbers[name]: own for name, own in state.get("state", {}).items()}
    return {"state": moments, "param_groups": groups}


class _Unpickler(pickle.Unpickler):
    """Makes what describes shards, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _DESCRIBES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not describe shards")


class Reader(FileSystemReader):
    """Reads a folder of shards."""

    def read_metadata(self, *args: Any, **named: Any) -> Metadata:
        """What describes the shards, which lie in this folder."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        for stored in metadata.storage_data.values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise pickle.UnpicklingError(f"{stored.relative_path} is no shard")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """Takes tensors and plain data from shards."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Take what is no tensor."""
        plain = BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _WholePlanner(Planner, _EmptyStateDictLoadPlanner):
    """Takes all that there is."""
