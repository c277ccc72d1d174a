"""FirstLook: watches the first step of a run, so that a check needs no step of its own. It never ends a run.

It reads numbers back once, in that step, and draws no random numbers; what is trained is the same with it or without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from trainwright._types import Batch
from trainwright.preflight import (  # importing a file registers its checks
    data_checks,
    loss_checks,
    parameter_checks,
    system_checks,
    token_checks,
    trial_step_checks,
)
from trainwright.preflight.check_registry import BATCH, START, STEP, look_at
from trainwright.preflight.facts import CheckFacts, FirstStep
from trainwright.preflight.finding import CheckReport

if TYPE_CHECKING:
    from torch import nn

BATCHES = 4  # of a window that are looked at
CHECK_FILES = (data_checks, loss_checks, parameter_checks, system_checks, token_checks, trial_step_checks)


class FirstLook:
    """Runs the cheap checks during the first step of a run.

    Args:
        facts: what is known before step 1.
        tell: is given what was found at each of the three moments.
    """

    def __init__(self, facts: CheckFacts, tell: Callable[[CheckReport], None]) -> None:
        self._facts = facts
        self._tell = tell

    def start(self) -> None:
        self._tell(look_at(self._facts, (START,)))

    def window(self, batches: Sequence[Batch]) -> None:
        """Checks the micro-batches of the first step, before the first forward."""
        if all(isinstance(batch, dict) or hasattr(batch, "keys") for batch in batches):
            self._facts = replace(self._facts, batches=batches[:BATCHES])
            self._tell(look_at(self._facts, (BATCH,)))

    def gradients(self, loss: torch.Tensor) -> None:
        """Checks the gradients of the first step, and its loss."""
        self._facts = replace(
            self._facts,
            step=FirstStep(loss=float(loss), without_gradient=parameters_without_gradient(self._facts.model)),
        )
        self._tell(look_at(self._facts, (STEP,)))
        self._facts = replace(self._facts, batches=None, step=None)


def parameters_without_gradient(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of trainable parameters without a gradient; empty where none has one, as the engine keeps them.

    One without elements is another process's.
    """
    trainable = [(name, p.grad is None) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    names = tuple(name for name, is_lost in trainable if is_lost)
    return () if len(names) == len(trainable) else names
