"""Reads a directory of torch's distributed checkpoint without letting it run code.

Torch unpickles its description (`.metadata`) and whatever in it is no tensor. A checkpoint may come from a stranger, so
here the description may name the few classes that it is made of, and the rest is read as plain tensors and numbers.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from trainwright.errors import CheckpointError

DESCRIPTION = ".metadata"
MAX_DESCRIPTION_BYTES = 1 << 30
# Modules and names that a description consists of.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def read(folder: Path, *, under: str, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """The entry `under` of a checkpoint: what `into` has places for, or all of it, as whole tensors on the CPU.

    Each process reads for itself; the tensors of `into` may be parts.

    Raises:
        CheckpointError: it cannot be read, or it lacks something.
    """
    try:
        reader = SafeReader(folder)
        state: dict[str, Any] = {under: _places(reader.read_metadata(), under) if into is None else into}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
            load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever torch and the unpickler raise, it is of no use
        raise CheckpointError(f"{folder} cannot be read as a distributed checkpoint: {error}") from error
    return state[under]  # type: ignore[no-any-return]


class SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description, of which no class is loaded that it has no use for."""
        content = (Path(self.path) / DESCRIPTION).read_bytes()
        if len(content) > MAX_DESCRIPTION_BYTES:
            raise CheckpointError(f"its description has {len(content)} bytes")
        metadata: Metadata = _Unpickler(io.BytesIO(content)).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"it names {info.relative_path!r}, which lies outside of it")
        metadata.storage_meta = None
        return metadata


class SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """What is no tensor: numbers and words."""
        plain = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was written; nobody reads it
        raise CheckpointError(f"its description names {module}.{name}, which is no part of one")


def _places(metadata: Metadata, under: str) -> dict[str, Any]:
    """Empty tensors for all that is below an entry; names keep their dots."""
    found: dict[str, Any] = {}
    for name, one in metadata.state_dict_metadata.items():
        if name.startswith(f"{under}.") and isinstance(one, TensorStorageMetadata):
            found[name.removeprefix(f"{under}.")] = torch.empty(one.size, dtype=one.properties.dtype)
    return found
