"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from trainwright.errors import ModelError

Options: TypeAlias = dict[str, Any]  # keywords of torch's or transformers' checkpointing
Forward: TypeAlias = Callable[..., object]


@contextmanager
def checkpointed_activations(model: nn.Module, options: Options | None) -> Iterator[None]:
    """Turns checkpointing on for a run and off after it, unless the user had turned it on already.

    Args:
        model: one with transformers' methods for it; of any other module the layers in its ModuleLists (or
            Sequentials, if it has no list) are checkpointed.
        options: `every_n_layers`, `offload`, and arguments of `torch.utils.checkpoint.checkpoint`.

    Raises:
        ModelError: a plain module without a list of layers.
    """
    spelling = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    was_on = getattr(model, f"is_{spelling}_checkpointing", False)  # asking by the older name warns
    rest = dict(options or {})
    layers, offload = rest.pop("every_n_layers", 1), rest.pop("offload", False)
    if hasattr(model, "activation_checkpointing_enable"):
        name, extras = "activation", {"every_n_layers": layers, "offload": offload}
    elif hasattr(model, "gradient_checkpointing_enable"):
        if layers != 1 or offload:
            raise ModelError(
                f"every_n_layers={layers} and offload={offload} in activation_checkpointing_kwargs need models of "
                "transformers 5.23 or newer. Upgrade transformers, or leave them out."
            )
        name, extras = "gradient", {}
    else:
        with _checkpointed_layers(model, rest, every_n_layers=layers, offload=offload):
            yield
        return
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": rest or None}, **extras)
    try:
        yield
    finally:
        if not was_on:
            getattr(model, f"{name}_checkpointing_disable")()


@contextmanager
def _checkpointed_layers(model: nn.Module, options: Options, *, every_n_layers: int, offload: bool) -> Iterator[None]:
    layers = _layers_of(model)[::every_n_layers]
    if not layers:
        raise ModelError(
            f"activation_checkpointing=True, and {type(model).__name__} has no ModuleList or Sequential whose layers "
            "could be checkpointed. Keep its layers in one, or set activation_checkpointing=False."
        )
    options = {"use_reentrant": False, **options}
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, options, offload=offload)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _checkpointed(forward: Forward, options: Options, *, offload: bool) -> Forward:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: Any) -> object:  # keywords of the layer
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
            return checkpoint(forward, *args, **options, **kwargs)

    return run


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of layers."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [module for module in model.modules() if type(module) is kind]
        inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
        layers = [layer for found in lists if id(found) not in inner for layer in found]
        if layers:
            return [layer for layer in layers if any(True for _ in layer.parameters())]
    return []
