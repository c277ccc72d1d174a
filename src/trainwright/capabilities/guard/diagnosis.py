"""Finds causes that skipping steps cannot cure: weights, optimizer state or learning rates that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from trainwright._types import Optimizer
from trainwright.support.tensor_tree import has_finite_values

WEIGHTS = "the weights"
STATE = "the optimizer state"
RATE = "the learning rate"


def find_bad_parts(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Checks trained weights, the state of the optimizer and its learning rates once, each on its device.

    Infinity in the state of an optimizer is valid: some optimizers begin with it.

    Args:
        model: the model; of sharded weights, this process's part is checked.
        optimizer: optimizer of the run.

    Returns:
        The keys among `WEIGHTS`, `STATE` and `RATE` that are not finite, each with a description; empty if all are
        finite.
    """
    named = {parameter: name for name, parameter in model.named_parameters()}
    found = {
        WEIGHTS: [
            name for parameter, name in named.items() if parameter.requires_grad and not has_finite_values(parameter)
        ],
        STATE: list(_bad_states(named, optimizer)),
        RATE: list(_bad_rates(optimizer)),
    }
    return {part: _join_first(names) for part, names in found.items() if names}


def find_bad_parts_anywhere(
    model: nn.Module, optimizer: Optimizer, gather: Callable[[dict[str, str]], list[dict[str, str]]]
) -> dict[str, str]:
    """Returns the findings of `find_bad_parts` in this process, or else in the first process that has any.

    All processes must call it together, even if they hold parts of one model: none decides alone.

    Args:
        model: the model.
        optimizer: optimizer of the run.
        gather: gathers a value from each process, in rank order.
    """
    own = find_bad_parts(model, optimizer)
    everybodys = gather(own)
    if own:
        return own
    for rank, found in enumerate(everybodys):
        if found:
            return {part: f"{names}, in process {rank}" for part, names in found.items()}
    return {}


def _bad_states(named: dict[nn.Parameter, str], optimizer: Optimizer) -> Iterator[str]:
    for parameter, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and not has_finite_values(value, allows_infinity=True):
                yield f"{key} of {named.get(parameter, 'a parameter')}"


def _bad_rates(optimizer: Optimizer) -> Iterator[str]:
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    yield from (str(rate) for rate in rates if not math.isfinite(rate))


def _join_first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
