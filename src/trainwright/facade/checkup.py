"""The hooks that look at a run before it costs an hour: `check()`, `prove()`, and the first look of every `train()`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trainwright.checkpoint import disk_space
from trainwright.config.plans import StepPlan
from trainwright.engine.device_info import supports_bf16
from trainwright.facade import proofs
from trainwright.facade import trial as trials
from trainwright.facade.checkpoint import CheckpointHooks
from trainwright.facade.memory import plan_memory
from trainwright.facade.optimizer import OptimizerHooks
from trainwright.facade.rehearsal import RehearsalHooks
from trainwright.loop.context import NULL_OBSERVER
from trainwright.optim.optimizer_class import steps_in_backward
from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import NOTE, CheckReport
from trainwright.preflight.first_look import FirstLook
from trainwright.preflight.prove.proof import ProofReport

logger = logging.getLogger(__name__)

MAX_ELEMENTS = 300_000_000  # parameters that are looked at before every run: a fraction of a second


class CheckHooks(RehearsalHooks, CheckpointHooks, OptimizerHooks):
    """Says what is probably not meant, before it has cost anything."""

    def check(self, *, memory: bool = False, budget: int | float | str | None = None) -> CheckReport:
        """Looks for what would go wrong, on the first batches and without training; the trainer stays as it is.

        Args:
            memory: also plan the memory of a step: where it goes, and what changes of settings make of it.
            budget: memory there is, as "24GB" or a number of bytes; the plan then ends with the cheapest change that
                fits. None: that of the device.

        Returns:
            The findings, each with its evidence and its cure. `print` shows them; `is_fine` says that none is grave.
        """
        plan = (lambda: plan_memory(self, budget)) if memory or budget is not None else None
        return trials.full_check(self, memory=plan)

    def prove(self, *, num_steps: int = 4) -> ProofReport:
        """Computes in two ways what must be equal, on copies of the model and on the first samples.

        A resume and an uninterrupted run, two ways to accumulate, two sizes of evaluation batches, one process and two.

        Args:
            num_steps: optimizer steps of each short run.
        """
        return proofs.prove(self, num_steps=num_steps)

    def _first_look(self, trial: Any) -> Any:
        """What watches the first step of a run; it has looked at what is known before it."""
        if not getattr(self.args, "preflight", True):
            return NULL_OBSERVER
        try:
            facts = self._facts(self._plan, self._get_output_dir(trial), optimizer=self.optimizer, is_brief=True)
        except Exception as error:  # a look must never be what ends a run
            logger.info("The first step is not looked at: %s: %s", type(error).__name__, error)
            return NULL_OBSERVER
        look = FirstLook(facts, self._tell)
        look.start()
        return look

    def _facts(self, plan: StepPlan | None, folder: str, *, optimizer: Any, is_brief: bool) -> CheckFacts:
        saves, device = self.args.should_save, self._engine.device
        optimizer_bytes = 0 if self.args.save_only_model else disk_space.estimated_optimizer_bytes(self.model)
        is_comparable = not steps_in_backward(self.args) and self._engine.trains_bare
        return CheckFacts(
            args=self.args,
            model=self.model,
            device=device,
            processing_class=self.processing_class,
            optimizer=optimizer if is_comparable else None,
            plan=plan,
            label_names=tuple(self.label_names or ()),
            can_return_loss=self.can_return_loss,
            loss_is_the_models=not self._uses_outputs(),
            folder=Path(folder) if saves else None,
            checkpoint_bytes=disk_space.weights_bytes(self.model) + optimizer_bytes,
            free_bytes=disk_space.free_bytes(Path(folder)),
            supports_bf16=supports_bf16(device),
            max_elements=0 if self._engine.holds_parts else MAX_ELEMENTS if is_brief else None,
            is_brief=is_brief,
        )

    def _tell(self, report: CheckReport) -> None:
        """Warns of what was found; says nothing where all is well."""
        if not self.args.should_log:
            return
        for finding in report.findings:
            level = logging.INFO if finding.severity == NOTE else logging.WARNING
            logger.log(level, "%s", finding)
