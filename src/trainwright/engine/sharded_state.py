"""Sharded state of model and optimizer: written and read as torch's distributed checkpoints, gathered, scattered.

The files lie where accelerate writes them. They are read on any number of processes, sharded or whole. Nothing in them
is unpickled but plain tensors and numbers, and the metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from trainwright._types import Optimizer, StateDict
from trainwright.engine.safe_dcp_reader import pieces, read
from trainwright.tensor_tree import map_nested

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def save(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    put: Callable[..., None],
    group: dist.ProcessGroup | None,
) -> None:
    """Writes this process's part of a sharded model, and of its optimizer unless that is None. All processes call it.

    `put` is that of `Engine.save_parts`; `group` is of all processes, for no other work than this.
    """
    states: dict[str, Any] = {MODEL: {"model": get_model_state_dict(model, options=_options(model))}}
    if optimizer is not None:
        states[OPTIMIZER] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
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
    within = {name: local if name == "_local_tensor" else getattr(outer, name) for name in names}
    dressed: torch.Tensor = kind.__tensor_unflatten__(within, context, outer.size(), outer.stride())
    return dressed


def _write(state: StateDict, folder: Path, group: dist.ProcessGroup | None) -> None:
    try:
        save_shards(state, storage_writer=FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:  # torch's is no Exception; the first failure is, in all processes
        first, _ = next(iter(error.failures.values()))
        raise first from None


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


def load_optimizer(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Loads the part of an optimizer's state that this process needs, whichever processes wrote it."""
    state = get_optimizer_state_dict(model, optimizer)
    read(folder / OPTIMIZER, under="optimizer", into=state)
    set_optimizer_state_dict(model, optimizer, state)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gathers whole tensors on the CPU in the main process; none in the others. All processes call it."""
    weights: Any = get_model_state_dict(model, options=_options(model, whole=True))
    return weights  # type: ignore[no-any-return]


def load_whole_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
    """Loads whole weights, which all processes have; each keeps its part. Returns torch's unmatched keys."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    return set_model_state_dict(model, dict(weights), options=options)


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer) -> StateDict:
    """Gathers the state of a sharded optimizer as one process alone would have it, with parameters by number.

    All processes call it; it is empty in all but the main process.
    """
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
    set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))


def _options(model: nn.Module, *, whole: bool = False) -> Any:
    is_adapter = hasattr(model, "peft_config")
    return StateDictOptions(
        full_state_dict=whole, cpu_offload=whole and dist.get_world_size() > 1, ignore_frozen_params=is_adapter
    )
