"""Layer-wise training: an optimizer for each parameter, stepping as soon as its gradient is there.

So no two gradients exist at once, which saves their memory. For the trainer, the many optimizers look like one, whose
`step()` has nothing left to do; a schedule moves the rates of all of them through its `param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

State = dict[str, Any]  # as torch's `state_dict`
_HOOKS: MutableMapping[torch.Tensor, RemovableHandle] = WeakIdKeyDictionary()  # hook that steps a parameter's optimizer


class LayerWiseDummyOptimizer(Optimizer):
    """Represents the optimizers of `optimizer_dict`, which step in the backward pass: its own `step` does nothing.

    Args:
        optimizer_dict: parameter -> its optimizer.
        **kwargs: `lr`, the rate that is shown where there is no optimizer.
    """

    def __init__(self, optimizer_dict: Mapping[torch.Tensor, Optimizer] | None = None, **kwargs: object) -> None:
        self.optimizer_dict = optimizer_dict
        super().__init__([torch.zeros(1, 1)], {"lr": kwargs.get("lr", 1e-3)})
        self._show_groups()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        return None

    def state_dict(self) -> State:
        """Returns the states of all optimizers, in the order of `optimizer_dict`."""
        if not self.optimizer_dict:
            return super().state_dict()
        return {"layers": [optimizer.state_dict() for optimizer in self.optimizer_dict.values()]}

    def load_state_dict(self, state_dict: State) -> None:
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
        """Collects the groups of all optimizers; repeated after each load, which makes new group dicts."""
        if self.optimizer_dict:
            self.param_groups = [group for part in self.optimizer_dict.values() for group in part.param_groups]


class LayerWiseDummyScheduler(LRScheduler):
    """Shows the rates of layer-wise optimizers and moves none of them.

    Args:
        args: not used.
        lr: the rate that is shown where there is no optimizer.
        kwargs: `optimizer_dict`, parameter -> its optimizer.
    """

    def __init__(self, *args: object, lr: float, **kwargs: Mapping[torch.Tensor, Optimizer] | None) -> None:
        self.default_lr = lr
        super().__init__(LayerWiseDummyOptimizer(kwargs.get("optimizer_dict"), lr=lr), -1)

    def get_lr(self) -> list[float | torch.Tensor]:
        parts = getattr(self.optimizer, "optimizer_dict", None)
        if not parts:
            return [self.default_lr]
        return [group["lr"] for part in parts.values() for group in part.param_groups]

    def _get_closed_form_lr(self) -> list[float | torch.Tensor]:
        return self.base_lrs


def step_in_backward(optimizer: LayerWiseDummyOptimizer) -> None:
    """Adds hooks that update each parameter as soon as its gradient is complete, and free the gradient."""
    parts = dict(optimizer.optimizer_dict or {})

    def update(parameter: torch.Tensor) -> None:
        parts[parameter].step()
        parameter.grad = None

    for parameter in parts:
        earlier = _HOOKS.pop(parameter, None)
        if earlier is not None:  # of an optimizer that this one replaces
            earlier.remove()
        _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
