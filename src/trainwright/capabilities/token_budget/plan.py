"""How a budget of tokens forms batches, for the plan of a run and the lines about it."""

from __future__ import annotations

from trainwright.config.fields import get_value
from trainwright.config.plans import Batching
from trainwright.config.protocol import Arguments


def plan_batches(args: Arguments) -> Batching | None:
    """Returns the budget of the arguments; None without one."""
    budget = get_value(args, "max_tokens_per_batch")
    return None if budget is None else Batching(text=f"up to {budget} tokens", max_tokens=budget)
