"""Adapters that make optimizers of other packages savable and resumable; applied to an instance.

A checkpoint holds plain tensors and numbers, and restores exactly the optimizer that it was made from. GaLore and
APOLLO keep objects in their state, GrokAdamW keeps it under the parameters themselves, AdaLomo outside of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

State = dict[str, Any]  # as torch's `state_dict`
Convert = Callable[[State], State]
Foreign = Any  # an object of an optional package: its attributes are read and replaced
PROJECTORS = (
    "galore_torch.galore_projector:GaLoreProjector",
    "apollo_torch.svd_projector:GaLoreProjector",
    "apollo_torch.random_projector:GradientProjector",
)


def adapt(optimizer: Foreign, model: nn.Module) -> None:
    """Adapts an optimizer of any package in place, if its package needs that."""
    if (complete := ADAPTERS.get(type(optimizer).__module__.partition(".")[0])) is not None:
        complete(optimizer, model)


def _saves_as(
    optimizer: Foreign, encode: Convert, decode: Callable[[State], None], loadable: Convert = lambda state: state
) -> None:
    """Replaces saving by `encode`, and loading by a load of the `loadable` part and `decode` of the rest."""
    save, load = optimizer.state_dict, optimizer.load_state_dict

    def load_state_dict(state_dict: State) -> None:
        load(loadable(state_dict))
        decode(state_dict)

    optimizer.state_dict = lambda: encode(save())
    optimizer.load_state_dict = load_state_dict


# -- GaLore, APOLLO: each parameter's state has a projector object --------------------------------------------------


def _plain_projectors(optimizer: Foreign, model: nn.Module) -> None:
    def encode(state_dict: State) -> State:
        states = {key: dict(state) for key, state in state_dict["state"].items()}
        for state in states.values():
            if "projector" in state:
                kind = type(state["projector"])
                state["projector"] = {**vars(state["projector"]), "class": f"{kind.__module__}:{kind.__name__}"}
        return {**state_dict, "state": states}

    def loadable(state_dict: State) -> State:  # torch would take the projectors' texts apart
        states = state_dict["state"].items()
        return {**state_dict, "state": {k: {n: v for n, v in s.items() if n != "projector"} for k, s in states}}

    def decode(state_dict: State) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for parameter, key in zip(parameters, keys, strict=True):
            packed = state_dict["state"].get(key, {}).get("projector")
            if packed is not None:
                optimizer.state[parameter]["projector"] = _unpacked(packed, parameter.device)

    _saves_as(optimizer, encode, decode, loadable)


def _unpacked(packed: State, device: torch.device) -> Foreign:
    kind = packed["class"]
    if kind not in PROJECTORS:
        raise ValueError(f"{kind!r} is no projector of GaLore or APOLLO")
    module, _, name = kind.partition(":")
    cls = getattr(importlib.import_module(module), name)
    projector = cls.__new__(cls)
    vars(projector).update({name: _on(device, value) for name, value in packed.items() if name != "class"})
    return projector


def _on(device: torch.device, value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, inner) for inner in value] if isinstance(value, list) else value


# -- GrokAdamW: its state is in the groups, by parameter ------------------------------------------------------------


def _plain_groups(optimizer: Foreign, model: nn.Module) -> None:
    def encode(state_dict: State) -> State:
        pairs = zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
        packed = [{**shown, "state": [own.get("state", {}).get(p) for p in own["params"]]} for shown, own in pairs]
        return {**state_dict, "param_groups": packed}

    def decode(state_dict: State) -> None:
        for group in optimizer.param_groups:
            saved = group.get("state", {})
            # transformers' checkpoints have it by parameter, in the order of the parameters
            states = list(saved.values()) if isinstance(saved, dict) else saved
            pairs = zip(group["params"], states, strict=False)
            group["state"] = {p: state for p, state in pairs if state is not None}

    _saves_as(optimizer, encode, decode)


# -- LOMO: the update is part of the backward pass ------------------------------------------------------------------


def _fused_backward(optimizer: Foreign, model: nn.Module) -> None:
    """Makes `step()` do nothing: the engine calls `fused_backward(loss, lr)` in place of `loss.backward()`."""
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)
    kept = [name for name in ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "step_num") if hasattr(optimizer, name)]

    def encode(state_dict: State) -> State:
        return {**state_dict, "adalomo": {name: getattr(optimizer, name) for name in kept}} if kept else state_dict

    def decode(state_dict: State) -> None:
        for name, value in state_dict.get("adalomo", {}).items():
            if not isinstance(value, dict):
                setattr(optimizer, name, value)
            else:
                for key, tensor in value.items():
                    getattr(optimizer, name)[key].copy_(tensor)

    _saves_as(optimizer, encode, decode)


def release_lomo_hooks(model: nn.Module) -> None:
    """Removes the hooks of earlier LOMO optimizers from the parameters, which they would still update."""
    for parameter in model.parameters():
        hooks = parameter._backward_hooks or {}
        for key in [key for key, hook in hooks.items() if hook.__module__.startswith("lomo_optim")]:
            del hooks[key]


# -- bitsandbytes: embeddings keep states of 32 bits -----------------------------------------------------------------


def _embeddings_in_32_bits(optimizer: Foreign, model: nn.Module) -> None:
    """Sets 32-bit states for embeddings, in a manager of this optimizer alone: the package's is shared by all."""
    if getattr(optimizer, "args", None) is None or optimizer.args.optim_bits != 8:
        return
    own: Foreign = object.__new__(type(optimizer.mng))
    settings = vars(optimizer.mng).items()
    own.__dict__.update({name: value.copy() if hasattr(value, "copy") else value for name, value in settings})
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            own.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.mng = own


ADAPTERS: dict[str, Callable[[Foreign, nn.Module], None]] = {
    "apollo_torch": _plain_projectors,
    "bitsandbytes": _embeddings_in_32_bits,
    "galore_torch": _plain_projectors,
    "grokadamw": _plain_groups,
    "lomo_optim": _fused_backward,
}
