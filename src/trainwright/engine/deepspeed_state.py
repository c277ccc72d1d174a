"""State of DeepSpeed's ZeRO: gathered from the processes as one process would have it, and partitioned again.

So a checkpoint is the same whatever engine wrote it, and is resumed with any engine and number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainwright._types import Optimizer, StateDict

Groups = list[list[nn.Parameter]]
OF_OPTIMIZERS = ("_z3_optimizer", "_hp_mapping")  # attributes of a parameter that an optimizer has in fp32


def inner(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside of ZeRO's, whose groups have the learning rates; without ZeRO, the optimizer."""
    return getattr(optimizer, "optimizer", optimizer)


def is_partitioned(module: nn.Module) -> bool:
    """Returns True if parameters are partitioned over processes (ZeRO-3)."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def whole_weights(module: nn.Module, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Gathers weights, in fp32 where they are trained, to the CPU; none unless `keeps`. All processes call it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    whole: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        is_trained = parameter.requires_grad and any(hasattr(parameter, link) for link in OF_OPTIMIZERS)
        value = safe_get_full_fp32_param(parameter) if is_trained else None
        if value is None:
            held = [parameter] if hasattr(parameter, "ds_id") else []
            with deepspeed.zero.GatheredParameters(held):
                value = parameter.detach().clone()
        if keeps:
            whole[name] = value.detach().cpu().clone()
    lasting = {name for name in module.state_dict() if name not in whole}
    if keeps:
        whole |= {name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name in lasting}
    return whole


def set_weights(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
    """Loads whole weights, which all processes have, into parameters that may be partitioned. All processes call it.

    Returns the keys that did not match, as torch's `load_state_dict` does; a tensor of another shape is a RuntimeError.
    """
    import deepspeed
    from torch.nn.modules.module import _IncompatibleKeys

    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in tensors.items():
        if name not in weights:
            continue
        value = weights[name].to(tensor.device)
        shape = getattr(tensor, "ds_shape", tensor.shape)
        if value.shape != shape:
            raise RuntimeError(f"{name} is of shape {list(value.shape)} there and {list(shape)} in the model")
        with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else [], modifier_rank=0):
            tensor.data.copy_(value)
    own = module.state_dict()
    lacking = [name for name in tensors if name not in weights and name in own]
    return _IncompatibleKeys(lacking, [name for name in weights if name not in own])


def set_masters(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
    """Loads whole weights as `set_weights` does, and into the optimizer's fp32 copies of them."""
    result = set_weights(module, weights)
    for name, parameter in module.named_parameters():
        if name in weights and parameter.requires_grad:
            _spread(parameter, weights[name].to(parameter.device).float(), None)
    return result


def whole_optimizer_state(optimizer: Optimizer, groups: Groups, *, keeps: bool) -> StateDict:
    """Gathers the state of ZeRO's optimizer as one process alone would have it, with parameters by number.

    The inner optimizer got its parameters in these groups. All processes call it; without `keeps` it returns none.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    _link(optimizer)
    flats = _flat_parts(optimizer)
    states: Any = inner(optimizer).state
    spread, single = _names(states.get(flats[0], {}), flats[0])
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for group in groups:
        for parameter in group:
            one = {name: _copy(value) for name, value in single.items()}  # one object would be counted up for each
            for name in spread:
                value = safe_get_full_optimizer_state(parameter, name)
                if keeps:
                    one[name] = value.detach().cpu().clone()
            state[number] = one
            number += 1
    if not keeps:
        return {}
    starts = [sum(len(group) for group in groups[:i]) for i in range(len(groups))]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbered = [
        {**one, "params": [start + i for i in range(len(group))]}
        for one, start, group in zip(settings, starts, groups, strict=True)
    ]
    return {"state": state if spread or single else {}, "param_groups": numbered}


def load_whole_optimizer_state(optimizer: Optimizer, groups: Groups, state: Mapping[str, Any]) -> None:
    """Loads a state of `whole_optimizer_state`, of which each keeps its part; ValueError where groups differ."""
    if [len(g["params"]) for g in state["param_groups"]] != [len(group) for group in groups]:
        raise ValueError("its parameters are grouped otherwise")
    for mine, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine.update({key: value for key, value in saved.items() if key != "params"})
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group]
    if not state["state"]:
        return
    first = state["state"][numbers[0]]
    shape = tuple(getattr(parameters[0], "ds_shape", parameters[0].shape))
    spread = [name for name, value in first.items() if isinstance(value, torch.Tensor) and tuple(value.shape) == shape]
    for flat in _flat_parts(optimizer):
        single = {name: _copy(value) for name, value in first.items() if name not in spread}
        inner(optimizer).state[flat] = {**single, **{name: torch.zeros_like(flat) for name in spread}}
    _link(optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        for name in spread:
            _spread(parameter, state["state"][number][name].to(parameter.device), name)


def _spread(parameter: Any, whole: torch.Tensor, name: str | None) -> None:
    """Sets a state of a parameter (without a name, its weights in fp32), of which each process keeps its partition."""
    import torch.distributed as dist
    from deepspeed import utils

    if not hasattr(parameter, "ds_tensor"):
        set_state, set_weights = utils.safe_set_full_optimizer_state, utils.safe_set_full_fp32_param
    else:  # stage 3 has equal partitions; DeepSpeed's own function fails where the last one is shorter
        size = parameter.ds_tensor.numel()
        padding = size * dist.get_world_size() - whole.numel()
        whole = nn.functional.pad(whole.flatten(), (0, padding)).narrow(0, size * dist.get_rank(), size)
        set_state, set_weights = utils.safe_set_local_optimizer_state, utils.safe_set_local_fp32_param
    set_weights(parameter, whole) if name is None else set_state(parameter, whole, name)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _names(state: Mapping[str, Any], flat: torch.Tensor) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of states that each parameter has, and the states that all share."""
    spread = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == flat.shape]
    return spread, {name: _copy(value) for name, value in state.items() if name not in spread}


def _flat_parts(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns this process's partition of the parameters, flat, as the inner optimizer has it."""
    of_stage_3 = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return list(of_stage_3 if of_stage_3 is not None else optimizer.single_partition_of_fp32_groups)


def _link(optimizer: Optimizer) -> None:
    """Links parameters to their states anew: stages 1 and 2 do it once, when there may be none yet."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
