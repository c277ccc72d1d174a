"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.errors import ModelError


@contextmanager
def checkpointed_activations(model: Any, options: dict[str, Any] | None) -> Iterator[None]:
    """Turns checkpointing on for a run and off after it, unless the user had turned it on already.

    Args:
        model: a model that has transformers' methods for it, under the new or the older name.
        options: `every_n_layers`, `offload`, and arguments of `torch.utils.checkpoint.checkpoint`.

    Raises:
        ModelError: the model has no such methods.
    """
    was_on = any(getattr(model, f"is_{name}_checkpointing", False) for name in ("activation", "gradient"))
    rest = dict(options or {})
    layers, offload = rest.pop("every_n_layers", 1), rest.pop("offload", False)
    if hasattr(model, "activation_checkpointing_enable"):
        name, extras = "activation", {"every_n_layers": layers, "offload": offload}
    elif hasattr(model, "gradient_checkpointing_enable"):
        name, extras = "gradient", {}
    else:
        raise ModelError(
            f"activation_checkpointing=True, and {type(model).__name__} has no activation_checkpointing_enable(). "
            "Wrap its layers with torch.utils.checkpoint yourself, or set activation_checkpointing=False."
        )
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": rest or None}, **extras)
    try:
        yield
    finally:
        if not was_on:
            getattr(model, f"{name}_checkpointing_disable")()
