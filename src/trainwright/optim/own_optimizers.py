"""Optimizers made of others: an optimizer for each parameter (layer-wise training), and Muon together with AdamW.

Layer-wise training steps as soon as a gradient is there, so no two gradients exist at once, which saves their memory.
For the trainer, the many optimizers look like a single one, with an empty `step()`; a schedule moves the rates of
all of them through its `param_groups`.

Muon (Jordan et al., 2024) orthogonalises the update of a matrix (`muon.py`). It is meant for the weights inside of a
network, not for embeddings, the output layer, biases and norms: AdamW updates them. With
`adjust_lr_fn="match_rms_adamw"` (the default here; Liu et al., 2025) its updates are as large as AdamW's, so that one
learning rate and one weight decay serve both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from trainwright._types import counted
from trainwright.errors import ArgumentError
from trainwright.optim.muon import SECTIONS, MatrixMuon, Sections
from trainwright.optim.parameter_groups import Group
from trainwright.support.model_facts import embedding_ids, expert_layers

State = dict[str, Any]  # as torch's `state_dict`
_HOOKS: MutableMapping[torch.Tensor, RemovableHandle] = WeakIdKeyDictionary()  # hook that steps a parameter's optimizer
# Names of the output layer, for models in which get_output_embeddings() does not return it.
HEADS = ("lm_head", "head", "classifier", "score", "qa_outputs", "output_projection", "proj_out", "embed_out", "fc_out")
MATRICES = "uses_muon"  # a group with this key set is Muon's
# Names of layers that compute query, key and value together, one after the other.
QKV = ("c_attn", "qkv_proj", "Wqkv", "qkv")


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
        **muon: Any,  # further arguments of MatrixMuon
    ) -> None:
        groups = [{**group, "params": own} for group in params if (own := list(group["params"]))]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, MATRICES: False})
        self._parts: list[Optimizer] = []
        if matrices := [group for group in self.param_groups if group[MATRICES]]:
            self._parts.append(MatrixMuon(matrices, lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **muon))
        if others := [group for group in self.param_groups if not group[MATRICES]]:
            self._parts.append(AdamW(others, lr, betas, eps, weight_decay))
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()  # an engine that has whole and sharded parameters replaces the groups for a step
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: Group) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Gives both optimizers the groups and the state of this one."""
        for part in self._parts:
            is_muon = isinstance(part, MatrixMuon)
            part.param_groups = [group for group in self.param_groups if group[MATRICES] == is_muon]
            part.state = self.state


def muon_groups(model: nn.Module, *, split_qkv: bool = False) -> list[Group]:
    """Returns groups of a model's parameters: hidden matrices, of which there must be some, and the rest.

    Args:
        model: whose trainable parameters are grouped.
        split_qkv: a matrix that computes query, key and value together is in a group that says where they are.

    Raises:
        ArgumentError: the model has no hidden matrices to train.
    """
    hidden = hidden_matrices(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not hidden & named.keys():
        raise ArgumentError(
            f"optim='muon' is for the matrices inside of a network, and {type(model).__name__} has none to train "
            "besides embeddings and its output layer. Use optim='adamw_torch'."
        )
    cut = {name: found for name, found in find_sections(model).items() if name in hidden} if split_qkv else {}
    groups: list[Group] = []
    for found in [None, *{str(one): one for one in cut.values()}.values()]:
        own = [p for name, p in named.items() if name in hidden and cut.get(name) == found]
        groups.append({"params": own, MATRICES: True, **({} if found is None else {SECTIONS: found})})
    rest = {"params": [p for name, p in named.items() if name not in hidden], MATRICES: False}
    return [*groups, rest]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the matrices that are neither an embedding nor the output layer's, and of stacks of them.

    A stack (experts, rows, columns) belongs to a layer of experts. Other parameters with three dimensions are kernels
    of convolutions. Biases of experts are no matrices, although they have two dimensions.
    """
    outer = embedding_ids(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        outer |= {id(p) for p in head.parameters()}
    heads = [child for name, child in model.named_modules() if name.rpartition(".")[2] in HEADS]
    outer |= {id(p) for child in heads for p in child.parameters()}
    of_experts = [p for layer in expert_layers(model).values() for p in layer.parameters(recurse=False)]
    stacks = {id(p) for p in of_experts if p.ndim == 3}
    outer |= {id(p) for p in of_experts if p.ndim == 2}
    return {name for name, p in model.named_parameters() if id(p) not in outer and (p.ndim == 2 or id(p) in stacks)}


def find_sections(model: nn.Module) -> dict[str, Sections]:
    """Returns, by name, the sections of query, key and value in the matrices that compute them together.

    It finds layers by the names in `QKV`; their outputs are all queries, then all keys, then all values. Layers in
    which each head has its own three, as `query_key_value` of GPT-NeoX, are not among them.
    """
    found = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] not in QKV:
            continue
        axis = 1 if type(module).__name__ == "Conv1D" else 0  # transformers' Conv1D has weights (inputs, outputs)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            continue
        owner = model.get_submodule(path.rpartition(".")[0])
        config = getattr(owner, "config", None) or getattr(model, "config", None)
        widths = _find_qkv_widths(config, weight.shape[axis])
        if widths is not None:
            found[f"{path}.weight"] = (axis, widths)
    return found


def _find_qkv_widths(config: Any, length: int) -> list[int] | None:
    """Returns the widths of query, key and value by the configuration, else thirds; None if the length is no sum."""
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if heads and hidden:
        size = getattr(config, "head_dim", None) or hidden // heads
        of_keys = (getattr(config, "num_key_value_heads", None) or heads) * size
        if heads * size + 2 * of_keys == length:
            return [heads * size, of_keys, of_keys]
    return [length // 3] * 3 if length % 3 == 0 else None


def muon_lines(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Describes the parameters that Muon and AdamW each update; empty for another optimizer.

    Args:
        optimizer: of the model.
        model: as the engine wrapped it.
    """
    if not isinstance(optimizer, MuonWithAdamW):
        return []
    names = {id(p): name for name, p in model.named_parameters()}
    kinds: dict[bool, list[tuple[str, torch.Tensor, Group]]] = {True: [], False: []}
    for group in optimizer.param_groups:
        kinds[group[MATRICES]] += [(names.get(id(p), "?"), p, group) for p in group["params"]]
    num_stacks = sum(p.ndim == 3 for _, p, _ in kinds[True])
    num_cut = sum(SECTIONS in group for _, _, group in kinds[True])
    matrices = [f"weights of {counted(len(kinds[True]) - num_stacks, 'layer')}"]
    matrices += [f"{counted(num_stacks, 'stack')} of experts' weights"] if num_stacks else []
    matrices += [f"query, key and value apart in {num_cut}"] if num_cut else []
    rest = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name, _, _ in kinds[False])
    return [f"muon      {', '.join(matrices)}", f"adamw     {', '.join(rest) or 'nothing'}"]
