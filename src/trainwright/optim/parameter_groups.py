"""Parameter groups: which parameters decay, and which do not (biases and normalisation layers)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

Group = dict[str, Any]  # "params" and the settings of a group, as torch has them

# Searched in the lower-case path of a parameter: biases, and norm layers by the names that models give them.
NO_DECAY_PATTERNS = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
NO_DECAY_LAYERS: tuple[type[nn.Module], ...] = (nn.LayerNorm,)


def get_parameter_names(
    model: nn.Module, forbidden_layer_types: Iterable[type], forbidden_layer_names: Sequence[str] | None = None
) -> list[str]:
    """Lists the parameters outside of the given layer types and name patterns.

    Args:
        model: the module.
        forbidden_layer_types: types of layers whose parameters are left out.
        forbidden_layer_names: patterns, searched in the path relative to each enclosing module, in lower case.

    Returns:
        Names of the parameters.
    """
    types = tuple(forbidden_layer_types)
    patterns = [re.compile(p) for p in forbidden_layer_names or ()]
    names = []
    for child_name, child in model.named_children():
        if isinstance(child, types):
            continue
        below = get_parameter_names(child, types, forbidden_layer_names)
        names += [f"{child_name}.{n}" for n in below if not _matches(patterns, f"{child_name}.{n}")]
    return names + [n for n in model._parameters if not _matches(patterns, n)]


def decay_parameter_names(model: nn.Module) -> list[str]:
    return get_parameter_names(model, NO_DECAY_LAYERS, NO_DECAY_PATTERNS)


def decay_groups(model: nn.Module, decay_names: Iterable[str], weight_decay: float) -> list[Group]:
    """Two groups of the trainable parameters: those that decay and those that do not, in the model's order."""
    decays = set(decay_names)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trainable if name in decays], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decays], "weight_decay": 0.0},
    ]


def with_decay(
    groups: Iterable[Group], model: nn.Module, decay_names: Iterable[str], weight_decay: float
) -> list[Group]:
    """The groups with a decay in each; split by the two kinds of parameters where there is any decay."""
    if weight_decay == 0:
        return [{"weight_decay": 0.0, **group} for group in groups]
    names = set(decay_names)
    decays = {id(p) for name, p in model.named_parameters() if name in names}
    result = []
    for group in groups:
        for kind, value in ((True, weight_decay), (False, 0.0)):
            params = [p for p in group["params"] if (id(p) in decays) is kind]
            if params:
                result.append({"weight_decay": value, **group, "params": params})
    return result


def _matches(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(p.search(name.lower()) for p in patterns)
