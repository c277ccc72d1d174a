"""Tensor parallelism: the model was sharded when it was loaded, so each process has parts of its layers.

Processes that share layers get the same batches. The model itself communicates between them, and averages the gradients
where it is sharded over the data as well. The engine adds gradient norms, updates and checkpoints of the shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from trainwright._types import Optimizer, is_instance_of
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import MakeOptimizer
from trainwright.engine.gradients import step_each_kind
from trainwright.engine.sharded_base import ShardedEngine, reshard
from trainwright.errors import ModelError

logger = logging.getLogger(__name__)


class TensorParallelEngine(ShardedEngine):
    """Trains a model of which each process holds the shards that it has loaded."""

    def __init__(self, plan: EnginePlan) -> None:
        assert plan.parallel is not None
        super().__init__(plan, make_accelerator(plan))
        if plan.loaders.dispatch_batches:
            logger.warning(
                "accelerator_config.dispatch_batches=True has no effect with tensor parallelism, where several "
                "processes need the same batch: each process reads for itself."
            )

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(self.setup_for_evaluation(model))
        step_each_kind(optimizer)
        return model, optimizer

    def setup_for_evaluation(self, model: nn.Module) -> nn.Module:
        reshard(model)
        check_sharded_parameters(model, self._plan)
        return model

    def _sharded_of(self, model: nn.Module) -> nn.Module:
        return self.unwrap(model)

    @property
    def holds_parts(self) -> bool:
        return True

    @contextmanager
    def generating(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        # A process whose text has ended continues with the others: each forward pass is one of all processes.
        yield {"synced_gpus": True}

    @property
    def dispatches(self) -> bool:
        return False  # processes that share layers need the same batch


def check_sharded_parameters(model: nn.Module, plan: EnginePlan) -> None:
    """Raises ModelError for a model that is whole, or has other trained weights, whose gradients nobody averages."""
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
