"""FirstLook: watches the first step of a run, so that a check needs no step of its own. It never ends a run.

It reads numbers back once, in that step, and draws no random numbers; what is trained is the same with it or without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright._types import Batch, Optimizer
from trainwright.checkpoint import disk_space
from trainwright.config.plans import StepPlan
from trainwright.engine.precision import supports_bf16
from trainwright.loop.context import NULL_OBSERVER
from trainwright.optim.optimizer_class import steps_in_backward
from trainwright.preflight import data_checks, model_checks  # noqa: F401 -- registers their checks
from trainwright.preflight.check_registry import CheckFacts, CheckReport, FirstStep, look_at
from trainwright.preflight.trainer_copy import AnyTrainer

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 300_000_000  # parameters that are looked at before every run: a fraction of a second

BATCHES = 4  # of a window that are looked at


class FirstLook:
    """Runs the cheap checks at three moments of the first step of a run, and tells what each found."""

    def __init__(self, facts: CheckFacts, tell: Callable[[CheckReport], None]) -> None:
        self._facts = facts
        self._tell = tell

    def start(self) -> None:
        self._tell(look_at(self._facts, "start"))

    def window(self, batches: Sequence[Batch]) -> None:
        """Checks the micro-batches of the first step, before the first forward."""
        if all(isinstance(batch, dict) or hasattr(batch, "keys") for batch in batches):
            self._facts = replace(self._facts, batches=batches[:BATCHES])
            self._tell(look_at(self._facts, "batch"))

    def gradients(self, loss: torch.Tensor) -> None:
        """Checks the gradients of the first step, and its loss."""
        self._facts = replace(
            self._facts,
            step=FirstStep(loss=float(loss), without_gradient=parameters_without_gradient(self._facts.model)),
        )
        self._tell(look_at(self._facts, "step"))
        self._facts = replace(self._facts, batches=None, step=None)


def begin(trainer: AnyTrainer, plan: StepPlan | None, folder: str) -> Any:
    """Returns the observer of the first step of a run, after the checks before that step. It never ends a run."""
    try:
        facts = known_facts(trainer, plan, folder, optimizer=trainer.optimizer, is_brief=True)
    except Exception as error:
        logger.info("The first step is not looked at: %s: %s", type(error).__name__, error)
        return NULL_OBSERVER
    look = FirstLook(facts, log_findings if trainer.args.should_log else lambda report: None)
    look.start()
    return look


def log_findings(report: CheckReport) -> None:
    """Logs findings: notes as information, others as warnings."""
    for finding in report.findings:
        logger.log(logging.INFO if finding.severity == "note" else logging.WARNING, "%s", finding)


def known_facts(
    trainer: AnyTrainer, plan: StepPlan | None, folder: str, *, optimizer: Optimizer | None, is_brief: bool
) -> CheckFacts:
    """Returns what is known of a run before its first batch; `is_brief`: only problems are wanted, and quickly."""
    args, engine = trainer.args, trainer._engine
    optimizer_bytes = 0 if args.save_only_model else disk_space.estimated_optimizer_bytes(trainer.model)
    is_comparable = not steps_in_backward(args) and engine.trains_bare
    return CheckFacts(
        args=args,
        model=trainer.model,
        device=engine.device,
        processing_class=trainer.processing_class,
        optimizer=optimizer if is_comparable else None,
        plan=plan,
        label_names=tuple(trainer.label_names or ()),
        can_return_loss=trainer.can_return_loss,
        loss_is_the_models=not trainer._uses_outputs(),
        folder=Path(folder) if args.should_save else None,
        checkpoint_bytes=disk_space.weights_bytes(trainer.model) + optimizer_bytes,
        free_bytes=disk_space.free_bytes(Path(folder)),
        supports_bf16=supports_bf16(engine.device),
        max_elements=0 if engine.holds_parts else MAX_ELEMENTS if is_brief else None,
        is_brief=is_brief,
    )


def parameters_without_gradient(model: nn.Module) -> tuple[str, ...]:
    """Returns the trainable parameters without a gradient; empty where none has one, as the engine keeps them.

    One without elements is another process's.
    """
    trainable = [(name, p.grad is None) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    names = tuple(name for name, is_lost in trainable if is_lost)
    return () if len(names) == len(trainable) else names
