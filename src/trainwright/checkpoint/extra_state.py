"""State of modules that is no tensor (`get_extra_state`): a file of its own beside the weights.

A tensor that a module returns is among the weights. Other values must be plain: files are read without running code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.deferred_io import FileSink
from trainwright.checkpoint.training_state import check_plain_state, load_plain
from trainwright.errors import ArgumentError, CheckpointError, ModelError

EXTRA_STATE_NAME = "extra_state.pt"


def extra_states(model: nn.Module) -> dict[str, Any]:  # Any: the modules' own types
    """Returns the extra states that are no tensors, by name of the module."""
    own = (
        name for name, module in model.named_modules() if type(module).get_extra_state is not nn.Module.get_extra_state
    )
    states = {name: model.get_submodule(name).get_extra_state() for name in own}
    return {name: state for name, state in states.items() if not isinstance(state, torch.Tensor)}


def check_extra_states(model: nn.Module) -> None:
    """Raises ModelError for an extra state that a checkpoint cannot hold."""
    for name, state in extra_states(model).items():
        try:
            check_plain_state(state, f"get_extra_state() of {name or type(model).__name__}")
        except ArgumentError as error:
            raise ModelError(f"{error} Or set save_strategy='no'.") from error


def tensors_only(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns a state without the entries that are no tensors."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def save_extra_states(model: nn.Module, folder: Path, *, sink: FileSink) -> None:
    """Writes the extra states that are no tensors, if there are any."""
    states = extra_states(model)
    if states:
        check_extra_states(model)
        sink.put(copy.deepcopy(states), lambda copied: torch.save(copied, folder / EXTRA_STATE_NAME))


def load_extra_states(model: nn.Module, folder: Path) -> set[str]:
    """Restores the extra states of a directory; returns the names under which a `state_dict` would have them.

    Raises CheckpointError if a module is missing, or does not take its state.
    """
    if not (folder / EXTRA_STATE_NAME).is_file():
        return set()
    states = load_plain(folder / EXTRA_STATE_NAME)
    modules = dict(model.named_modules())
    for name, state in states.items():
        try:
            modules[name].set_extra_state(state)
        except Exception as error:  # the module's own code
            raise CheckpointError(
                f"The extra state of {name!r} in {folder} does not fit this model: {error!r}."
            ) from error
    return {f"{name}._extra_state" if name else "_extra_state" for name in states}
