"""A model compiled as the plan says, and the module inside a compiled one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.config.plans import CompilePlan


def compiled(model: nn.Module, plan: CompilePlan) -> nn.Module:
    if plan.backend is None:
        return model
    made: Any = torch.compile(model, backend=plan.backend, mode=plan.mode)
    return made  # type: ignore[no-any-return]


def uncompiled(model: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner
