"""MixturePlan: the shares of sources along a run, as the arguments set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.config.fields import get_value
from trainwright.config.plans import SamplingPlan
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePlan:
    """Shares of the sources of a mixture, along a run."""

    # each from a step (int) or a share of the run (float) on: by source a share, or a number of passes as text
    stages: tuple[tuple[int | float, Mapping[str, float | str]], ...]
    is_linear: bool  # shares change steadily until the next stage
    unit: str  # shares of "samples" or "tokens"
    samples_per_step: int  # over all processes
    num_steps: int | None  # length of the run; None: `num_epochs` decides
    num_epochs: float


def plan_mixture(args: Arguments, plan: SamplingPlan) -> MixturePlan | None:
    """Returns the shares that the arguments set; None: each row of each source once per epoch."""
    schedule = get_value(args, "mixture_schedule") or [(0, get_value(args, "mixture"))]
    if not schedule[0][1]:
        return None
    return MixturePlan(
        stages=tuple((start, dict(shares)) for start, shares in schedule),
        is_linear=get_value(args, "mixture_schedule_type") == "linear",
        unit=get_value(args, "mixture_unit"),
        samples_per_step=plan.batch_size * plan.num_processes * plan.micro_batches,
        num_steps=args.max_steps if args.max_steps > 0 else None,
        num_epochs=args.num_train_epochs,
    )
