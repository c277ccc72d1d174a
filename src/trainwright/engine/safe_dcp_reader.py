"""Safe reader of torch's distributed checkpoints: nothing that it reads can run code.

Torch unpickles the metadata (`.metadata`) and all entries that are no tensors. A checkpoint may come from a stranger,
so here the metadata may name only the classes that it consists of, and entries are read as plain tensors and numbers.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from trainwright._types import StateDict
from trainwright.errors import CheckpointError

DESCRIPTION = ".metadata"
MAX_DESCRIPTION_BYTES = 1 << 30
# Modules and names that the metadata consists of.
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


def read(folder: Path, *, under: str, into: StateDict | None = None) -> StateDict:
    """Reads the entry `under` of a checkpoint's folder of the model or of the optimizer. Each process reads for itself.

    Returns `into`, tensors, perhaps sharded, that take what is read; None: new whole tensors on the CPU. What cannot be
    read, or lacks something, is a CheckpointError.
    """
    try:
        reader = SafeReader(folder)
        state: StateDict = {under: _places(reader.read_metadata(), under) if into is None else into}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
            load(state, storage_reader=reader, planner=SafePlanner(), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch and the unpickler raise all kinds of errors
        raise CheckpointError(f"{folder} cannot be read as a distributed checkpoint: {error}") from error
    return state[under]  # type: ignore[no-any-return]


def pieces(folder: Path, *, under: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields the file, the name and the values of each piece of the tensors of an entry, one in memory at a time."""
    metadata = SafeReader(folder).read_metadata()
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            with (folder / info.relative_path).open("rb") as file:
                file.seek(info.offset)
                content = io.BytesIO(file.read(info.length))
            values = torch.load(content, map_location="cpu", weights_only=True)
            yield info.relative_path, index.fqn.removeprefix(f"{under}."), values


class SafeReader(FileSystemReader):
    """Reads metadata without loading any other class than those of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # Any: as torch's method
        """Reads the metadata; a CheckpointError where it names another class, or a file outside of the checkpoint."""
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
    """Reads entries that are no tensors as plain numbers and strings."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads an entry that is no tensor."""
        plain = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], plain)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was written; unused
        raise CheckpointError(f"its description names {module}.{name}, which is no part of one")


def _places(metadata: Metadata, under: str) -> StateDict:
    """Returns empty tensors for all tensors of an entry; names keep their dots."""
    found: StateDict = {}
    for name, one in metadata.state_dict_metadata.items():
        if name.startswith(f"{under}.") and isinstance(one, TensorStorageMetadata):
            found[name.removeprefix(f"{under}.")] = torch.empty(one.size, dtype=one.properties.dtype)
    return found
