"""How a budget of tokens forms batches, for the plan of a run and the lines about it."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.config.fields import get_value
from trainwright.config.plans import Batching
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan(Batching):
    """Batches with a limit of tokens."""

    max_tokens: int  # of a batch, padding included


def plan_budget(max_tokens: int) -> BudgetPlan:
    """Returns batches of up to `max_tokens` tokens."""
    return BudgetPlan(text=f"up to {max_tokens} tokens", max_tokens=max_tokens)


def plan_batches(args: Arguments) -> BudgetPlan | None:
    """Returns the budget of the arguments; None without one."""
    budget = get_value(args, "max_tokens_per_batch")
    return None if budget is None else plan_budget(budget)
