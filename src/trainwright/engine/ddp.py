"""DDP: one whole model in each of several processes, whose gradients torch's DistributedDataParallel averages."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright._types import Optimizer
from trainwright.config.plans import DDPPlan, EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT, MakeOptimizer, uncompiled
from trainwright.engine.distributed_base import DistributedEngine


class DDPEngine(DistributedEngine):
    """Trains a whole model on each of several devices, one process for each."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._wrapped: DistributedDataParallel | None = None

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(model)
        self._wrapped = self._averaging(model) if any(p.requires_grad for p in model.parameters()) else None
        return self._wrapped or model, optimizer

    def _averaging(self, model: nn.Module) -> DistributedDataParallel:
        is_spread = len({parameter.device for parameter in model.parameters()}) > 1
        device_ids = None if self.device.type == "cpu" or is_spread else [self.device]
        handler = self.accelerator.ddp_handler
        handler.find_unused_parameters = finds_unused(model, self._plan.ddp)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **handler.to_kwargs())
        handler.register_comm_hook(wrapped)
        return wrapped

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync or self._wrapped is None or self._plan.ddp.sync_each_batch:
            return NO_CONTEXT
        return self._wrapped.no_sync()

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner.module if isinstance(inner, DistributedDataParallel) else inner


def finds_unused(model: nn.Module, plan: DDPPlan) -> bool:
    """Returns True if DDP looks for parameters that a backward pass does not reach; recomputation does not allow it."""
    if plan.find_unused_parameters is not None:
        return plan.find_unused_parameters
    # transformers' own property for this is deprecated
    recomputes = any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
    return not (plan.recomputes_activations or recomputes)
