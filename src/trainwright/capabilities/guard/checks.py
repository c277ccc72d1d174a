"""Check of what the guard costs a step on an accelerator: a wait, unless the optimizer skips an update by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from trainwright._types import Optimizer
from trainwright.capabilities.guard.plan import GuardPlan, make_plan
from trainwright.capabilities.guard.step_guard import skips_on_device, steps_in_backward
from trainwright.config.protocol import Arguments
from trainwright.distributed.device import get_kind
from trainwright.support.findings import Check, Finding, note


class Facts(Protocol):
    """The facts of the check-up that are read here; `CheckFacts` has them."""

    @property
    def args(self) -> Arguments: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def optimizer(self) -> Optimizer | None: ...


ON_THE_DEVICE = (
    "optim='adamw_torch_fused', or an optimizer of torch.optim made with fused=True, skips such an update on the "
    "device and waits for nothing"
)


def look_at_waits(facts: Facts) -> Iterator[Finding]:
    """Yields a note if each step waits for the device before its update."""
    optimizer = facts.optimizer
    if optimizer is None or not get_kind(facts.device).is_accelerator or steps_in_backward(optimizer):
        return
    plan = make_plan(facts.args)
    name = type(optimizer).__name__
    is_fused = skips_on_device(optimizer, facts.device)
    waits = "each step waits once for the device before its update, so that it cannot launch work ahead"
    if plan.on_spike != "off":
        yield note(
            f"on_spike={plan.on_spike!r} reads loss and norm: {waits}.", "on_spike='off' reads them for logs alone."
        )
    elif facts.args.mixed_precision == "fp16":
        # torch's scaler gives its flag to torch's own fused optimizers alone.
        if not is_fused or not all(group.get("fused") for group in optimizer.param_groups):
            yield note(f"The loss scale of fp16 and {name}, which is not fused: {waits}.", f"{ON_THE_DEVICE}.")
    elif plan.on_nonfinite == "rollback":
        yield note(
            f"on_nonfinite='rollback' reads the norm of the gradients: {waits}.",
            "on_nonfinite='skip' with a fused optimizer waits for nothing.",
        )
    elif plan.on_nonfinite != "ignore" and not is_fused:
        yield _note_optimizer(plan, name, waits)


def _note_optimizer(plan: GuardPlan, name: str, waits: str) -> Finding:
    return note(
        f"on_nonfinite={plan.on_nonfinite!r} reads the norm of the gradients, since {name} is not fused: {waits}.",
        f"{ON_THE_DEVICE}; on_nonfinite='ignore' makes every update.",
    )


CHECKS = (
    Check(
        name="step_waits",
        when="start",
        needs=("optimizer",),
        about="whether each step waits for the accelerator before its update",
        look=look_at_waits,
    ),
)
