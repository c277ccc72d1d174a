"""Optimizers by name, as data. A row says where the class is, what it is given, and what `optim_args` it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def _flag(text: str) -> bool:
    return text.lower() in ("true", "1", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """How to make one optimizer.

    Attributes:
        path: "module:attribute" of the class.
        adam: give it `betas` and `eps` from `adam_beta1`, `adam_beta2`, `adam_epsilon`.
        fixed: further arguments that this name stands for.
        options: names that `optim_args` may hold, with what turns the text into a value.
    """

    path: str
    adam: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch": OptimizerSpec(path="torch.optim:AdamW", adam=True),
    "adamw_torch_fused": OptimizerSpec(path="torch.optim:AdamW", adam=True, fixed={"fused": True}),
    "adafactor": OptimizerSpec(
        path="trainwright.optim.schedules:Adafactor", fixed={"scale_parameter": False, "relative_step": False}
    ),
    "sgd": OptimizerSpec(
        path="torch.optim:SGD",
        options={"momentum": float, "dampening": float, "weight_decay": float, "nesterov": _flag},
    ),
    "adagrad": OptimizerSpec(
        path="torch.optim:Adagrad", options={"lr_decay": float, "weight_decay": float, "eps": float}
    ),
    "rmsprop": OptimizerSpec(
        path="torch.optim:RMSprop",
        options={"momentum": float, "alpha": float, "eps": float, "weight_decay": float, "centered": _flag},
    ),
}
