"""Optimizers made of others: one for each parameter (layer-wise training), and Muon together with AdamW.

Layer-wise training steps as soon as a gradient is there, so no two gradients exist at once, which saves their memory.
For the trainer, the many optimizers look like one with an empty `step()`; a schedule moves the rates of
all of them through its `param_groups`.

Muon (Jordan et al., 2024) orthogonalises the update of a matrix. It is meant for the weights inside of a network, not
for embeddings, the output layer, biases and norms: AdamW updates them. With `adjust_lr_fn="match_rms_adamw"` (the
default here; Liu et al., 2025) its updates are as large as AdamW's, so that one learning rate and one weight decay
serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.errors import ArgumentError
from trainwright.optim.parameter_groups import Group
from trainwright.support.model_facts import embedding_ids

State = dict[str, Any]  # as torch's `state_dict`
_HOOKS: MutableMapping[torch.Tensor, RemovableHandle] = WeakIdKeyDictionary()  # hook that steps a parameter's optimizer
# Names of the output layer, for models in which get_output_embeddings() does not return it.
HEADS = ("lm_head", "head", "classifier", "score", "qa_outputs", "output_projection", "proj_out", "embed_out", "fc_out")
MATRICES = "uses_muon"  # a group with this key set is Muon's


class LayerWiseDummyOptimizer(Optimizer):
    """Represents the optimizers of `optimizer_dict`, which step in the backward pass: its own `step` does nothing.

    Args:
        optimizer_dict: parameter -> its optimizer.
        **kwargs: `lr`, the rate that is shown without an optimizer.
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
        lr: the rate to show without an optimizer.
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
        if parameter in _HOOKS:  # hook of an optimizer that this one replaces
            _HOOKS.pop(parameter).remove()
        _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]


class MuonWithAdamW(Optimizer):
    """Combines Muon and AdamW over the groups of `muon_groups`, with common groups and state in torch's usual form."""

    def __init__(
        self,
        params: list[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adjust_lr_fn: str = "match_rms_adamw",
        **muon: Any,  # further arguments of torch.optim.Muon
    ) -> None:
        groups = [{**group, "params": own} for group in params if (own := list(group["params"]))]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, MATRICES: False})
        self._parts: list[Optimizer] = []
        if matrices := [group for group in self.param_groups if group[MATRICES]]:
            self._parts.append(Muon(matrices, lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **muon))
        if others := [group for group in self.param_groups if not group[MATRICES]]:
            self._parts.append(AdamW(others, lr, betas, eps, weight_decay))
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Group) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Gives both optimizers the groups and the state of this one."""
        for part in self._parts:
            is_muon = isinstance(part, Muon)
            part.param_groups = [group for group in self.param_groups if group[MATRICES] == is_muon]
            part.state = self.state


def muon_groups(model: nn.Module) -> list[Group]:
    """Returns two groups of a model's parameters: the hidden matrices, without which it is an error, and the rest."""
    hidden = hidden_matrices(model)
    named = [(name in hidden, p) for name, p in model.named_parameters() if p.requires_grad]
    if not any(is_hidden for is_hidden, _ in named):
        raise ArgumentError(
            f"optim='muon' is for the matrices inside of a network, and {type(model).__name__} has none to train "
            "besides embeddings and its output layer. Use optim='adamw_torch'."
        )
    return [{"params": [p for kind, p in named if kind is wanted], MATRICES: wanted} for wanted in (True, False)]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the 2-D parameters that are neither an embedding nor the output layer's."""
    outer = embedding_ids(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        outer |= {id(p) for p in head.parameters()}
    heads = [child for name, child in model.named_modules() if name.rpartition(".")[2] in HEADS]
    outer |= {id(p) for child in heads for p in child.parameters()}
    return {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in outer}
