"""LoopContext: the parts of one run, put together once and then only read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._types import Batch
from trainwright.config.behaviour import OURS, Behaviour
from trainwright.config.plans import StepPlan
from trainwright.loop.micro_batch_retry import MicroBatchRetry
from trainwright.support.hooks import (
    BatchSource,
    Events,
    FirstStepObserver,
    LoopEngine,
    RandomStates,
    Stateful,
    StepGuard,
)
from trainwright.support.loss_normalization import LossRule

StepContexts: TypeAlias = Callable[[], Iterable[AbstractContextManager[object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Start of a run."""

    epoch: int = 0  # first epoch, from 0
    batches: int = 0  # micro-batches of that epoch that are trained already
    checkpoint: str | None = None  # directory whose random states are loaded at that point; None for a fresh run
    # the evaluation after the last step was cut off; it is made up for before anything else
    owes_evaluation: bool = False
    owes_save: bool = False  # and so was the save that was to follow it


class NullObserver:
    """Observer without effect."""

    def window(self, batches: Sequence[Batch]) -> None: ...

    def gradients(self, loss: torch.Tensor) -> None: ...


NULL_OBSERVER = NullObserver()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """Objects and settings of `fit`."""

    engine: LoopEngine
    model: nn.Module  # as the engine wrapped it
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: BatchSource
    plan: StepPlan
    rule: LossRule
    events: Events
    start: RunStart
    # leaves samples in quarantine out after some batches of an epoch (None: where it begins); returns the shorter plan
    count_anew: Callable[[int, int | None], StepPlan]
    guard: StepGuard  # decides whether an update is made
    follows_metrics: Callable[[object], bool]  # whether a schedule is driven by evaluations, not by steps
    first_look: FirstStepObserver = NULL_OBSERVER  # watches the first step of this run
    # tries a window again that did not fit into memory; None: the error ends the run
    smaller_batches: MicroBatchRetry | None = None
    saves_on_interrupt: bool = False  # a run that a signal ends saves its last finished step
    # set where a run that an error ends saves its last finished step too; with them it stands there as if nothing had
    # been drawn since
    random_states: RandomStates | None = None
    behaviour: Behaviour = OURS
    step_contexts: StepContexts | None = None  # around each micro-batch; None: nobody asks for some
    prepares_windows: bool = False  # the trainer replaces the micro-batches of a window
    items: Mapping[str, Stateful] = field(default_factory=dict)  # further objects with a state, of the user's
    trial: object = None
    ignore_keys_for_eval: list[str] | None = None
