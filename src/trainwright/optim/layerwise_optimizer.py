"""Layer-wise training: an optimizer for each parameter, stepping as soon as its gradient is there.

So no two gradients exist at once, which saves their memory. For the trainer, the many optimizers look like one, whose
`step()` has nothing left to do; a schedule moves the rates of all of them through its `param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

_HOOKS: Any = WeakIdKeyDictionary()  # parameter -> handle of the hook that steps its optimizer


class LayerWiseDummyOptimizer(Optimizer):
    """Stands for the optimizers of `optimizer_dict`, which step elsewhere: its own `step` does nothing.

    Args:
        optimizer_dict: parameter -> its optimizer.
        kwargs: `lr`, the rate that is shown where there is no optimizer.
    """

    def __init__(self, optimizer_dict: Mapping[Any, Optimizer] | None = None, **kwargs: object) -> None:
        self.optimizer_dict = optimizer_dict
        super().__init__([torch.zeros(1, 1)], {"lr": kwargs.get("lr", 1e-3)})
        self._show_groups()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """The states of all optimizers, in the order of `optimizer_dict`."""
        if not self.optimizer_dict:
            return super().state_dict()
        return {"layers": [optimizer.state_dict() for optimizer in self.optimizer_dict.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.optimizer_dict:
            super().load_state_dict(state_dict)
            return
        layers = state_dict["layers"]
        if len(layers) != len(self.optimizer_dict):
            raise ValueError(f"it holds states of {len(layers)} parameters, and there are {len(self.optimizer_dict)}")
        for optimizer, state in zip(self.optimizer_dict.values(), layers, strict=True):
            optimizer.load_state_dict(state)
        self._show_groups()

    def _show_groups(self) -> None:
        """Loading gives an optimizer new group dicts, so this is done after each load."""
        if self.optimizer_dict:
            self.param_groups = [group for part in self.optimizer_dict.values() for group in part.param_groups]


class LayerWiseDummyScheduler(LRScheduler):
    """Shows the rates of layer-wise optimizers and moves none of them. Takes `lr` and `optimizer_dict`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.default_lr = kwargs["lr"]
        super().__init__(LayerWiseDummyOptimizer(**kwargs), -1)

    def get_lr(self) -> list[Any]:
        parts = getattr(self.optimizer, "optimizer_dict", None)
        if not parts:
            return [self.default_lr]
        return [group["lr"] for part in parts.values() for group in part.param_groups]

    def _get_closed_form_lr(self) -> list[Any]:
        return self.base_lrs


def step_in_backward(optimizer: LayerWiseDummyOptimizer) -> None:
    """From now on each parameter is updated as soon as its gradient is complete, and the gradient is freed."""
    parts = dict(optimizer.optimizer_dict or {})

    def update(parameter: torch.Tensor) -> None:
        parts[parameter].step()
        parameter.grad = None

    for parameter in parts:
        earlier = _HOOKS.pop(parameter, None)
        if earlier is not None:  # of an optimizer that this one replaces
            earlier.remove()
        _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(update)
