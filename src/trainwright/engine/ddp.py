"""Several processes with whole models: gradients are averaged by torch's DistributedDataParallel.

Accelerate starts the process group and says where this process computes; the wrapped model is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainwright._types import Prepared
from trainwright.config.plans import DDPPlan, EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT
from trainwright.engine.compile import compiled, uncompiled
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.precision import autocast_forward
from trainwright.engine.updates import Updates


class DDPEngine(DistributedEngine):
    """Trains with one whole model on each of several devices, one process for each."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan))
        self._wrapped: DistributedDataParallel | None = None
        self._updates = Updates(getattr(self.accelerator, "scaler", None))

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Any],
        make_scheduler: Callable[[Any], Any],
    ) -> Prepared:
        optimizer = make_optimizer(model)
        scheduler = make_scheduler(optimizer)
        self._wrapped = self._wrap(model)
        self._updates.begin(model, optimizer)
        running = model if self._wrapped is None else self._wrapped
        return Prepared(compiled(running, self._plan.compile), optimizer, scheduler)

    def _wrap(self, model: nn.Module) -> DistributedDataParallel | None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return None
        device_ids = None if self.device.type == "cpu" or _is_spread(model) else [self.device]
        handler = self.accelerator.ddp_handler
        handler.find_unused_parameters = finds_unused(model, self._plan.ddp)
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **handler.to_kwargs())
        handler.register_comm_hook(wrapped)
        return wrapped

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        return model

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return autocast_forward(model, self._plan.precision, self.device, keeps_outputs=keeps_outputs)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync or self._wrapped is None or self._plan.ddp.sync_each_batch:
            return NO_CONTEXT
        return self._wrapped.no_sync()

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner = uncompiled(model)
        return inner.module if isinstance(inner, DistributedDataParallel) else inner


def finds_unused(model: nn.Module, plan: DDPPlan) -> bool:
    """Whether to look for parameters that a step does not reach; recomputed activations do not allow it."""
    if plan.find_unused_parameters is not None:
        return plan.find_unused_parameters
    return not (plan.recomputes_activations or _recomputes_activations(model))


def _recomputes_activations(model: nn.Module) -> bool:
    """Whether a model of transformers recomputes activations; its own property warns that it will go."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _is_spread(model: nn.Module) -> bool:
    """Whether a model is already laid out over several devices of this process."""
    return len({parameter.device for parameter in model.parameters()}) > 1
