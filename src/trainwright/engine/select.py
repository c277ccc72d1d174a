"""Selection of the engine for a plan, the only list of all backends; and the engine of one device."""

from __future__ import annotations

import torch
from torch import nn

from trainwright._types import Optimizer
from trainwright.config.plans import EnginePlan
from trainwright.engine.accelerate_setup import make_accelerator
from trainwright.engine.base import Engine, MakeOptimizer


def select_engine(plan: EnginePlan) -> Engine:
    """Makes the engine for a plan. Its module is imported here, so no run imports the engine of another backend."""
    shares_sequences = plan.parallel is not None and plan.parallel.num_per_sequence > 1
    if plan.deepspeed is not None and shares_sequences:
        from trainwright.engine.long_context_zero import make_long_zero_engine

        return make_long_zero_engine(plan)
    if plan.deepspeed is not None and plan.stands_in:
        from trainwright.engine.zero3_stand_in import make_zero_stand_in

        return make_zero_stand_in(plan)
    if plan.deepspeed is not None:
        from trainwright.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(plan)
    if shares_sequences:
        from trainwright.engine.long_context import make_long_context_engine

        return make_long_context_engine(plan)
    if plan.parallel is not None and plan.parallel.layers_in_parts:
        from trainwright.engine.sharded_base import EngineOfParts, TensorParallelEngine

        return EngineOfParts(plan) if plan.parallel.has_others else TensorParallelEngine(plan)
    if plan.fsdp is not None:
        from trainwright.engine.fsdp import make_fsdp_engine

        return make_fsdp_engine(plan)
    if plan.world_size > 1 and plan.stands_in:
        from trainwright.engine.stand_ins import StandInEngine

        return StandInEngine(plan)
    if plan.world_size > 1:
        from trainwright.engine.distributed_base import DDPEngine

        return DDPEngine(plan)
    if plan.num_devices > 1:
        from trainwright.engine.data_parallel import DataParallelEngine

        return DataParallelEngine(plan)
    return SingleEngine(plan)


class SingleEngine(Engine):
    """Trains in this process, on one device."""

    def __init__(self, plan: EnginePlan) -> None:
        super().__init__(plan, make_accelerator(plan), torch.device(plan.device))
        self._is_fp8 = plan.precision.mixed == "fp8"

    @property
    def trains_bare(self) -> bool:
        return not self._is_fp8  # which exchanges layers at setup

    def _wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        optimizer = make_optimizer(model)
        if self._is_fp8:  # accelerate exchanges the linear layers, and the optimizer's parameters with them
            model, optimizer = self.accelerator.prepare(model, optimizer)
        return model, optimizer
