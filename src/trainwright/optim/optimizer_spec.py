"""Row of the table of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainwright.optim.constraints import Limit
from trainwright.optim.optim_args import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Package of an optimizer.

    Attributes:
        name: of the distribution.
        install: requirement for pip.
        at_least: oldest supported version.
    """

    name: str
    install: str
    at_least: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Class of one optimizer and its arguments; every class gets `lr`.

    Attributes:
        path: "module:attribute" of the class.
        package: None where torch or transformers has it.
        adam: give it `betas` and `eps` of `adam_beta1`, ...: "always", "betas" alone, or "if set" to something else
            than the default, for classes whose own defaults differ.
        decay: give it `weight_decay` as an argument too, besides the groups.
        warmup: give it `warmup_steps`.
        fixed: further arguments that this name stands for.
        options: what `optim_args` may hold.
        projects: `optim_args` of the group of target modules, for GaLore and APOLLO; empty for the others.
        projects_adam: `betas` and `eps` go to that group as well.
        layerwise: an optimizer for each parameter, stepping during the backward pass.
        whole_model: takes the model instead of parameters.
        limits: what it cannot do.
    """

    path: str
    package: Package | None = None
    adam: Literal["no", "always", "betas", "if set"] = "no"
    decay: bool = False
    warmup: bool = False
    fixed: Mapping[str, object] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    projects: Options = field(default_factory=dict)
    projects_adam: bool = False
    layerwise: bool = False
    whole_model: bool = False
    limits: tuple[Limit, ...] = ()
