"""Which backend serves a plan: the only list of brands."""

from __future__ import annotations

from trainwright.config.plans import EnginePlan
from trainwright.engine.base import Engine
from trainwright.errors import NotYetError


def select_engine(plan: EnginePlan) -> Engine:
    """The engine for a plan.

    Raises:
        NotYetError: more than one process; this version trains on one device.
    """
    if plan.world_size > 1:
        raise NotYetError(
            f"This process is one of {plan.world_size}, and this version trains on one device only. "
            "Start it with plain `python`, without torchrun or accelerate launch (and without WORLD_SIZE set)."
        )
    from trainwright.engine.single import SingleEngine

    return SingleEngine(plan)
