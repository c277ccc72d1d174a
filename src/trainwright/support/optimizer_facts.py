"""Facts about an optimizer: which tensors it updates, and whether updates of 16-bit weights round to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trainwright._types import Optimizer

CONTAINERS = (list, tuple, set, frozenset)


def held_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the tensors that an optimizer refers to, in whatever structure.

    Optimizers keep the parameters of a model in their groups, and beside them where the groups hold something else: a
    dict of one optimizer for each parameter, a list of optimizers, the model itself, parameters of which the groups
    have a copy.
    """
    seen: set[int] = set()
    pending: list[Any] = [optimizer]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, nn.Module):
            pending += value.parameters()
        elif isinstance(value, Mapping):
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, CONTAINERS):
            pending += value
        elif hasattr(value, "param_groups"):
            pending += value.param_groups
            pending += getattr(value, "__dict__", {}).values()


def trained_parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of models that get gradients."""
    return [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]


def shown_parameters(optimizer: Optimizer, models: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Returns the tensors in an optimizer's own groups that get gradients, or are parameters of models, frozen or not.

    Some optimizers have a placeholder there, which is neither.
    """
    own = {id(parameter) for model in models for parameter in model.parameters()}
    members = [one for group in optimizer.param_groups for one in group["params"]]
    return [one for one in members if one.requires_grad or id(one) in own]


def may_train(held: Iterable[torch.Tensor], shown: Iterable[torch.Tensor], trained: Iterable[torch.Tensor]) -> bool:
    """Returns False if an optimizer certainly updates none of the trained parameters of a model.

    Args:
        held: tensors that the optimizer refers to.
        shown: parameters in its groups. None of them: what it updates cannot be seen.
        trained: parameters of the model.
    """
    shown = list(shown)
    trained = list(trained)
    wanted = {*map(id, trained)}
    if not shown or not wanted or any(id(tensor) in wanted for tensor in held):
        return True
    # Copies in fp32 of a model in half precision are copied back by whoever made them.
    is_half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in trained)
    return is_half and all(parameter.dtype == torch.float32 for parameter in shown)


def keeps_small_updates(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer keeps the part of an update that a 16-bit weight cannot hold, or rounds by chance.

    Ours and torchao's have attributes that say so; optimi's and torchdistx's have settings: Kahan summation, which is
    optimi's default for such weights.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    defaults = getattr(inner, "defaults", {})
    has_kahan = defaults.get("kahan_sum", False) is not False or defaults.get("use_kahan_summation", False)
    return bool(has_kahan or getattr(inner, "bf16_stochastic_round", False) or hasattr(inner, "keeps_small_updates"))
