"""Selection of the engine for a plan: the only list of all backends."""

from __future__ import annotations

from trainwright.config.plans import EnginePlan
from trainwright.engine.base import Engine


def select_engine(plan: EnginePlan) -> Engine:
    """Makes the engine for a plan. Its module is imported here, so no run imports the engine of another backend."""
    if plan.deepspeed is not None:
        from trainwright.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(plan)
    if plan.parallel is not None and (plan.parallel.in_model or plan.parallel.tp > 1):
        from trainwright.engine.tensor_parallel import TensorParallelEngine

        return TensorParallelEngine(plan)
    if plan.fsdp is not None:
        from trainwright.engine.fsdp import make_fsdp_engine

        return make_fsdp_engine(plan)
    if plan.world_size > 1:
        from trainwright.engine.ddp import DDPEngine

        return DDPEngine(plan)
    if plan.num_devices > 1:
        from trainwright.engine.data_parallel import DataParallelEngine

        return DataParallelEngine(plan)
    from trainwright.engine.single import SingleEngine

    return SingleEngine(plan)
