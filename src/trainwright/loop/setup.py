"""The frozen setup of a run: where it starts, and the objects and settings that the training loop works with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.config.behaviour import OURS, Behaviour
from trainwright.loop.retry import SmallerMicroBatches
from trainwright.support.hooks import BatchSource, Events, LoopEngine, RandomStates
from trainwright.support.loss_normalization import LossRule

StepContexts: TypeAlias = Callable[[], Iterable[AbstractContextManager[object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts."""

    epoch: int = 0  # first epoch, from 0
    batches: int = 0  # micro-batches of that epoch that are trained already
    checkpoint: str | None = None  # directory whose random states are loaded at that point; None for a fresh run
    # The evaluation after the last step was cut off; it comes before anything else.
    owes_evaluation: bool = False
    owes_save: bool = False  # the save that was to follow that evaluation was cut off too


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Objects and settings of a run that are decided before its first step."""

    engine: LoopEngine
    model: nn.Module  # as the engine wrapped it
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: BatchSource
    rule: LossRule
    events: Events
    follows_metrics: Callable[[object], bool]  # whether a schedule is driven by evaluations, not by steps
    # Tries a window again that did not fit into memory; None: the error ends the run.
    smaller_batches: SmallerMicroBatches | None = None
    saves_on_interrupt: bool = False  # a run that a signal ends saves its last finished step
    # Set where a run that an error ends saves its last finished step too. Restoring them makes the checkpoint one in
    # which nothing was drawn since that step.
    random_states: RandomStates | None = None
    behaviour: Behaviour = OURS
    step_contexts: StepContexts | None = None  # entered around each micro-batch; None: the trainer has none
    prepares_windows: bool = False  # the trainer replaces the micro-batches of a window
    trial: object = None
    ignore_keys_for_eval: list[str] | None = None
