"""Model and optimizer whose parts are in several processes: written as parts, put together, taken apart again.

The files are those of torch's distributed checkpoints, in the places where accelerate has them. They are read on any
number of processes, sharded or whole. Nothing in them is unpickled but plain tensors and numbers, and descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainwright.engine.safe_dcp_reader import read
from trainwright.tensor_tree import map_nested

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def save(folder: Path, model: nn.Module, optimizer: Any | None, *, put: Callable[..., None], group: Any) -> None:
    """Every process writes its part, when `put` has it so. Without an optimizer the weights alone.

    Args:
        put: `put(tree, write, shared=True)` calls `write` with the tensors of the tree as they are now.
        group: of all processes, for no other work than this.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    states: dict[str, Any] = {MODEL: {"model": get_model_state_dict(model, options=_options(model))}}
    if optimizer is not None:
        states[OPTIMIZER] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dressed: list[torch.Tensor] = []

    def undress(leaf: Any) -> Any:
        """The local part of a tensor, which can be copied."""
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
    """A tensor that is part of the same whole as `outer`, with other values; they may lie on another device."""
    if not isinstance(outer, DTensor):
        return local
    kind: Any = type(outer)  # torch's own way to take such a tensor apart and build it again has no types
    names, context = kind.__tensor_flatten__(outer)
    within = {name: local if name == "_local_tensor" else getattr(outer, name) for name in names}
    dressed: torch.Tensor = kind.__tensor_unflatten__(within, context, outer.size(), outer.stride())
    return dressed


def _write(state: dict[str, Any], folder: Path, group: Any) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save as write

    try:
        write(state, storage_writer=FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:  # torch's is no Exception; what failed first is, in all processes
        first, _ = next(iter(error.failures.values()))
        raise first from None


def has_weights(folder: Path) -> bool:
    return (folder / MODEL / ".metadata").is_file()


def has_optimizer(folder: Path) -> bool:
    return (folder / OPTIMIZER / ".metadata").is_file()


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in parts, whole, in this process."""
    return read(folder / MODEL, under="model")


def load_optimizer(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Reads what this process needs of an optimizer's state, whichever processes wrote it."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    state = get_optimizer_state_dict(model, optimizer)
    read(folder / OPTIMIZER, under="optimizer", into=state)
    set_optimizer_state_dict(model, optimizer, state)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, on the CPU of the main process; empty in the others. All processes call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    weights: Any = get_model_state_dict(model, options=_options(model, whole=True))
    return weights  # type: ignore[no-any-return]


def load_whole_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
    """Each process has all weights and keeps its part of them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, strict=False)
    return set_model_state_dict(model, dict(weights), options=options)


def whole_optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state as one process alone has it, parameters by number; empty in all but the main process."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    named: Any = get_optimizer_state_dict(model, optimizer, options=_options(model, whole=True))
    if not named:
        return {}
    names = [name for group in named["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in named["param_groups"]]
    return {"state": {numbers[name]: value for name, value in named["state"].items()}, "param_groups": groups}


def load_whole_optimizer_state(model: nn.Module, optimizer: Any, state: Mapping[str, Any]) -> None:
    """The reverse: each process has the whole state and keeps its part.

    Raises:
        ValueError: it has another number of parameters.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

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
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    is_adapter = hasattr(model, "peft_config")
    return StateDictOptions(
        full_state_dict=whole, cpu_offload=whole and dist.get_world_size() > 1, ignore_frozen_params=is_adapter
    )
