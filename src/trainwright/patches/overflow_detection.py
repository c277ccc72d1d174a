"""Watching a model's activations for overflow, with transformers' detector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def overflow_detection(model: nn.Module) -> Iterator[None]:
    """Stops a run with a report of the last layers' values when an activation or a weight is NaN or infinite."""
    from transformers.debug_utils import DebugUnderflowOverflow

    before = {module: set(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for module, hooks in before.items():
            for key in [key for key in module._forward_hooks if key not in hooks]:
                del module._forward_hooks[key]
