"""A model that came in parts, as transformers loads one for tensor parallelism: each process has parts of its layers.

Processes that share layers get the same batches; the model itself sends what they need of each other, and averages the
gradients where it was sharded over data as well. Here is what is left: norms, updates and checkpoints over the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainwright._types import Prepared, is_instance_of
from trainwright.config.plans import EnginePlan
from trainwright.engine import sharded_state
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import NO_CONTEXT
from trainwright.engine.compile import compiled, uncompiled
from trainwright.engine.distributed_base import DistributedEngine
from trainwright.engine.gradients import step_each_kind
from trainwright.engine.precision import autocast_forward
from trainwright.engine.updates import Updates
from trainwright.errors import ArgumentError, ModelError


class TensorParallelEngine(DistributedEngine):
    """Trains a model of which each process holds the parts that it was given when it was loaded."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.parallel is not None
        super().__init__(plan, make_accelerator(plan))
        self._model: Any = None
        self._syncs = True
        self._updates = Updates(None)

    def place(self, model: nn.Module) -> nn.Module:
        return model  # it was put there when it was loaded

    def setup(
        self,
        model: nn.Module,
        *,
        make_optimizer: Callable[[nn.Module], Any],
        make_scheduler: Callable[[Any], Any],
    ) -> Prepared:
        _let_go(model)
        check_sharded_parameters(model, self._plan)
        self._model, self._syncs = model, True
        optimizer = make_optimizer(model)
        step_each_kind(optimizer)
        scheduler = make_scheduler(optimizer)
        self._updates.begin(model, optimizer)
        return Prepared(compiled(model, self._plan.compile), optimizer, scheduler)

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        _let_go(model)
        check_sharded_parameters(model, self._plan)
        return model

    def mixed_precision(self, model: nn.Module, *, keeps_outputs: bool = True) -> AbstractContextManager[None]:
        return autocast_forward(model, self._plan.precision, self.device, keeps_outputs=keeps_outputs)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        if sync != self._syncs and not self._plan.ddp.sync_each_batch:
            for module in _sharded_roots(self._model):
                module.set_requires_gradient_sync(sync)
            self._syncs = sync
        return NO_CONTEXT

    def refresh(self, model: nn.Module) -> None:
        _let_go(self._model)
        self._updates.refresh(self._model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        # One whose text has ended goes on with the others: each forward pass is one of all processes.
        yield {"synced_gpus": True}

    def dispatch(self, dataloader: Any) -> Any:
        raise ArgumentError(
            "accelerator_config.dispatch_batches=True sends each process a part of a batch, and here several processes "
            "need the same one. Leave it out: each process reads for itself."
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def holds_parts(self) -> bool:
        return True

    def whole_weights(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        _let_go(model)
        return sharded_state.whole_weights(self.unwrap(model))

    def load_weights(self, model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Any:
        _let_go(model)
        return sharded_state.load_whole_weights(self.unwrap(model), weights)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return sharded_state.whole_optimizer_state(self._model, optimizer)

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        sharded_state.load_whole_optimizer_state(self._model, optimizer, state)


def check_sharded_parameters(model: Any, plan: EnginePlan) -> None:
    """Whether the model is in parts, all of them as they can be trained.

    Raises:
        ModelError: it is whole, or has weights beside the parts that nobody would keep equal.
    """
    parallel = plan.parallel
    assert parallel is not None
    name = type(model).__name__
    if is_instance_of(model, "peft", "PeftModel") or getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"{name} is an adapter on a model in parts: its weights are whole in each process and their gradients are "
            "not, so they would part. Train the adapter with fsdp or DDP, or the model itself."
        )
    if not any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        has_plan = getattr(model, "supports_tp_plan", False)
        raise ModelError(
            f"parallelism_config.tp_size={parallel.tp}, and {name} is whole in each process. "
            + (
                f"Load it in parts: {name}.from_pretrained(..., distributed_config=DistributedConfig(tp_size="
                f"{parallel.tp}))."
                if has_plan
                else f"{name} has no plan for tensor parallelism: use fsdp, or take it apart yourself with "
                "torch.distributed.tensor.parallel.parallelize_module."
            )
        )
    beside = [n for n, p in model.named_parameters() if p.requires_grad and not hasattr(p, "device_mesh")]
    if beside and parallel.dp_replicate * parallel.dp_shard > 1:
        raise ModelError(
            f"{len(beside)} trainable weights of {name} ({beside[0]}, ...) are not sharded over the "
            f"{parallel.dp_replicate * parallel.dp_shard} processes with data of their own: their gradients would not "
            "be averaged. Load the model with DistributedConfig(tp_size=..., fsdp_size=...)."
        )


def _sharded_roots(model: Any) -> list[Any]:
    return [model] if isinstance(model, FSDPModule) else []


def _let_go(model: nn.Module) -> None:
    """An evaluation leaves parameters whole, waiting for a backward pass that never comes."""
    for module in uncompiled(model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
