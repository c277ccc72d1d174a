"""Sharded state of model and optimizer: written and read as torch's distributed checkpoints, gathered, scattered.

The files are in the places of accelerate. They are read on any number of processes, sharded or whole. Torch unpickles
their metadata and all entries that are no tensors, and a checkpoint may come from a stranger. So the reader lets the
metadata name only the classes that it consists of, and reads entries as plain tensors and numbers: no code can run.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright._types import Optimizer, StateDict
from trainwright.distributed.collectives import Group
from trainwright.errors import CheckpointError
from trainwright.support.door import read_bytes
from trainwright.support.tensor_tree import iterate_tensors, map_nested

MODEL = "pytorch_model_fsdp_0"
OPTIMIZER = "optimizer_0"
DESCRIPTION = ".metadata"
MAX_DESCRIPTION_BYTES = 1 << 30
# Modules and names that the metadata consists of.
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}

# Where older versions of torch had two of these classes, and their names now.
OLDER_PLACE = "sharded_tensor.metadata"
OLDER_NAMES = {"TensorProperties": "TensorProperties", "MEM_FORMAT_ENCODING": "_MEM_FORMAT_ENCODING"}


def save(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, *, put: Callable[..., None], group: Group
) -> None:
    """Writes this process's part of a sharded model, and of its optimizer unless that is None. All processes call it.

    `put` is that of `Engine.save_parts`; `group` is of all processes, for no other work than this.
    """
    weights = map_nested(_in_one_piece, get_model_state_dict(model, options=_options(model)))
    states: dict[str, Any] = {MODEL: {"model": weights}}
    if optimizer is not None:
        states[OPTIMIZER] = {"optimizer": map_nested(_in_one_piece, get_optimizer_state_dict(model, optimizer))}
    dressed: list[torch.Tensor] = []

    def undress(leaf: Any) -> Any:
        """Returns the local shard of a tensor, which can be copied."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        dressed.append(leaf)
        return leaf.to_local().detach() if isinstance(leaf, DTensor) else leaf

    def write(locals_: Any) -> None:
        outer = iter(dressed)
        parts = map_nested(lambda leaf: _dress(next(outer), leaf) if isinstance(leaf, torch.Tensor) else leaf, locals_)
        for name, state in parts.items():
            _write(state, folder / name, group)

    put(map_nested(undress, states), write, shared=True)


def _dress(outer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns a shard of the same tensor as `outer`, with other values, which may be on another device."""
    if not isinstance(outer, DTensor):
        return local
    kind: Any = type(outer)  # torch's own way to take such a tensor apart and build it again has no types
    names, context = kind.__tensor_flatten__(outer)
    within = {name: getattr(outer, name) for name in names}  # the local shard and its mesh
    within = {name: local if isinstance(part, torch.Tensor) else part for name, part in within.items()}
    dressed: torch.Tensor = kind.__tensor_unflatten__(within, context, outer.size(), outer.stride())
    return dressed


def whole_tensor(outer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor distributed over the processes like `outer`, from the part `local` of this process."""
    if not isinstance(outer, DTensor):
        return local
    dressed: Any = _dress(outer, local.to(outer.device))
    whole: torch.Tensor = dressed.full_tensor()
    return whole


def take_tensor_part(outer: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Returns the part of a whole tensor that this process has of `outer`."""
    if not isinstance(outer, DTensor):
        return whole
    # Without a source rank nothing is sent: each process has the whole tensor.
    on_device = whole.to(outer.device)
    return distribute_tensor(on_device, outer.device_mesh, outer.placements, src_data_rank=None).to_local()


# A dimension that tensor parallelism and FSDP both cut is cut by FSDP within the cuts of the other: a process then has
# several stretches of it. Torch's checkpoints describe a part as one stretch, so parts are exchanged to be one.


def _in_one_piece(leaf: Any) -> Any:
    """Returns a tensor whose parts are stretches of it; other leaves, and tensors that are so already, as they are."""
    given: list[Any] = list(leaf.placements) if isinstance(leaf, DTensor) else []  # torch's class has no public name
    if not any(hasattr(one, "split_factor") for one in given):
        return leaf
    placements = [Shard(one.dim) if hasattr(one, "split_factor") else one for one in given]
    return leaf.redistribute(placements=placements)


def _laid_out_as(own: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Undoes `_in_one_piece`."""
    if not isinstance(leaf, DTensor) or not isinstance(own, DTensor) or own.placements == leaf.placements:
        return leaf
    return leaf.redistribute(placements=own.placements)


def _write(state: StateDict, folder: Path, group: Group) -> None:
    try:
        save_shards(state, storage_writer=FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:  # torch's is no Exception; the first failure is, in all processes
        raise next(iter(error.failures.values()))[0] from None


def has_weights(folder: Path) -> bool:
    """Returns True if a checkpoint has a sharded model."""
    return (folder / MODEL / ".metadata").is_file()


def has_optimizer(folder: Path) -> bool:
    """Returns True if a checkpoint has a sharded optimizer."""
    return (folder / OPTIMIZER / ".metadata").is_file()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a sharded checkpoint, in this process alone: whole tensors on the CPU, by name."""
    return read(folder / MODEL, under="model")


def weights_in(folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields the pieces of the weights of a sharded checkpoint: file in the directory, name of the tensor, values."""
    if has_weights(folder):
        yield from ((f"{MODEL}/{file}", name, values) for file, name, values in pieces(folder / MODEL, under="model"))


def optimizer_in(folder: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields the pieces of the optimizer's state of a sharded checkpoint, as `weights_in` does for the weights."""
    if has_optimizer(folder):
        for file, name, values in pieces(folder / OPTIMIZER, under="optimizer"):
            yield f"{OPTIMIZER}/{file}", name, values


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Loads the part of an optimizer's state that this process needs, whichever processes wrote it."""
    own = get_optimizer_state_dict(model, optimizer)
    state = map_nested(_in_one_piece, own)
    read(folder / OPTIMIZER, under="optimizer", into=state)
    parts = iterate_tensors(own)
    laid_out = map_nested(
        lambda leaf: _laid_out_as(next(parts), leaf) if isinstance(leaf, torch.Tensor) else leaf, state
    )
    set_optimizer_state_dict(model, optimizer, laid_out)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers whole tensors on the CPU in the main process; none in the others. All processes call it."""
    return get_model_state_dict(model, options=_options(model, whole=True))  # type: ignore[return-value]


def load_whole_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
    """Loads whole weights, which all processes have; each keeps its part. Returns torch's unmatched keys."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    return set_model_state_dict(model, dict(weights), options=options)


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """Gathers into the main process the state as one process would have it, by number; all processes call it."""
    named: Any = get_optimizer_state_dict(model, optimizer, options=_options(model, whole=True))
    if not named:
        return {}
    names = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[name]: value for name, value in named["state"].items()}, "param_groups": groups}


def load_whole_optimizer_state(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a state of `whole_optimizer_state`, of which each keeps its part; ValueError where groups differ."""
    mine: Any = get_optimizer_state_dict(model, optimizer)
    names = [name for group in mine["param_groups"] for name in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if [len(g["params"]) for g in mine["param_groups"]] != [len(g["params"]) for g in state["param_groups"]]:
        raise ValueError(f"it has {len(numbers)} parameters, grouped otherwise than the {len(names)} here")
    by_number = dict(zip(numbers, names, strict=True))
    named: Any = {
        "state": {by_number[number]: value for number, value in state["state"].items()},
        "param_groups": [{**g, "params": [by_number[n] for n in g["params"]]} for g in state["param_groups"]],
    }
    # Torch looks for the device in the tensors, and fails if there are none, as with SGD without momentum.
    has_tensors = any(tensor.ndim > 0 for tensor in iterate_tensors(named["state"]))
    set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=has_tensors))


def _options(model: nn.Module, *, whole: bool = False) -> StateDictOptions:
    offload = whole and dist.get_world_size() > 1
    is_adapter = hasattr(model, "peft_config")
    return StateDictOptions(full_state_dict=whole, cpu_offload=offload, ignore_frozen_params=is_adapter)


# -- the safe reader --------------------------------------------------------------------------------------------------


def read(folder: Path, *, under: str, into: StateDict | None = None) -> StateDict:
    """Reads the entry `under` of a checkpoint's folder of the model or of the optimizer. Each process reads for itself.

    Returns `into`, tensors, perhaps sharded, for the values; None: new whole tensors on the CPU. What cannot be
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
    """Reads metadata and refuses to load any class that is not part of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # Any: as torch's method
        """Reads the metadata; a CheckpointError if it names another class, or a file outside of the checkpoint."""
        try:
            content = read_bytes(Path(self.path) / DESCRIPTION, max_bytes=MAX_DESCRIPTION_BYTES)
        except ValueError as error:
            raise CheckpointError(f"its description cannot be read: {error}") from error
        metadata: Metadata = _Unpickler(io.BytesIO(content)).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(f"it names {info.relative_path!r}, which is outside of it")
        metadata.storage_meta = None
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Reads entries that are no tensors as plain numbers and strings."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        *way, last = self.mappings[read_item.dest_index.fqn]
        container: Any = self.original_state_dict  # dicts and lists, as `load` was given them
        for key in way:
            container = container[key]
        container[last] = plain


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.") and module.endswith(OLDER_PLACE) and name in OLDER_NAMES:
            return super().find_class("torch.distributed.checkpoint.metadata", OLDER_NAMES[name])
        if name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # the path it was written to; unused
        raise CheckpointError(f"its description names {module}.{name}, which is not part of one")


def _places(metadata: Metadata, under: str) -> StateDict:
    """Returns empty tensors for all tensors of an entry; names keep their dots."""
    return {
        name.removeprefix(f"{under}."): torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in metadata.state_dict_metadata.items()
        if name.startswith(f"{under}.") and isinstance(one, TensorStorageMetadata)
    }
