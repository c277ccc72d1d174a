"""Muon for the hidden matrices of a model and AdamW for all the rest, as one optimizer.

Muon (Jordan et al., 2024) orthogonalises the update of a matrix. It is meant for the weights inside of a network, not
for embeddings, the output layer, biases and norms. With `adjust_lr_fn="match_rms_adamw"` (the default here; Liu et al.,
2025) its updates are as large as AdamW's, so that one learning rate and one weight decay serve both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from trainwright.errors import ArgumentError
from trainwright.model_facts import embedding_ids
from trainwright.optim.parameter_groups import Group

# What models call their output layer, where get_output_embeddings() does not tell.
HEADS = ("lm_head", "head", "classifier", "score", "qa_outputs", "output_projection", "proj_out", "embed_out", "fc_out")
MATRICES = "uses_muon"  # a group with this key set is Muon's


class MuonWithAdamW(Optimizer):
    """Combines Muon and AdamW over disjoint groups, with common groups and state in torch's usual form.

    `params` are groups as `muon_groups` makes them; learning rate and weight decay are those of both.
    """

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
        groups = [{**group, "params": list(group["params"])} for group in params]
        groups = [group for group in groups if group["params"]]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, MATRICES: False})
        self._parts: list[Optimizer] = []
        matrices = [group for group in self.param_groups if group[MATRICES]]
        others = [group for group in self.param_groups if not group[MATRICES]]
        if matrices:
            self._parts.append(Muon(matrices, lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **muon))
        if others:
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
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not any(name in hidden for name, _ in named):
        raise ArgumentError(
            f"optim='muon' is for the matrices inside of a network, and {type(model).__name__} has none to train "
            "besides embeddings and its output layer. Use optim='adamw_torch'."
        )
    return [
        {"params": [p for name, p in named if name in hidden], MATRICES: True},
        {"params": [p for name, p in named if name not in hidden], MATRICES: False},
    ]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the 2-D parameters that are neither an embedding nor the output layer's."""
    outer = embedding_ids(model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module):
        outer |= {id(p) for p in head.parameters()}
    for name, child in model.named_modules():
        if name.rpartition(".")[2] in HEADS:
            outer |= {id(p) for p in child.parameters()}
    return {name for name, p in model.named_parameters() if p.ndim == 2 and id(p) not in outer}
