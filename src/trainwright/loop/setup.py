"""The fixed setup of a run: its starting position, and the objects and settings of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright._types import JSONObject
from trainwright.config.behaviour import OURS, Behaviour
from trainwright.loop.retry import SmallerMicroBatches
from trainwright.support.hooks import BatchSource, Events, LoopEngine, RandomStates
from trainwright.support.loss_normalization import LossRule

StepContexts: TypeAlias = Callable[[], Iterable[AbstractContextManager[object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Starting position of a run."""

    epoch: int = 0  # first epoch, from 0
    batches: int = 0  # micro-batches of that epoch that are already trained
    checkpoint: str | None = None  # directory to restore random states from at that point; None for a fresh run
    # The evaluation after the last step was interrupted; it is done first.
    owes_evaluation: bool = False
    owes_save: bool = False  # the save after that evaluation was interrupted too
    # Parts of that evaluation that were reported before, in the form of `EvaluationParts.state`.
    evaluated_parts: JSONObject = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Objects and settings of a run that are fixed before its first step."""

    engine: LoopEngine
    model: nn.Module  # as the engine wrapped it
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: BatchSource
    rule: LossRule
    events: Events
    follows_metrics: Callable[[object], bool]  # whether a schedule is driven by evaluations instead of steps
    # Retries a window that did not fit into memory; None: the error ends the run.
    smaller_batches: SmallerMicroBatches | None = None
    saves_on_interrupt: bool = False  # a run ended by a signal saves its last finished step
    # Set if a run ended by an error also saves its last finished step. Restoring these states undoes all draws since
    # that step in the checkpoint.
    random_states: RandomStates | None = None
    behaviour: Behaviour = OURS
    step_contexts: StepContexts | None = None  # entered around each micro-batch; None if the trainer has none
    prepares_windows: bool = False  # the trainer replaces the micro-batches of a window
    trial: object = None
    ignore_keys_for_eval: list[str] | None = None
