"""Check-ups: FirstLook checks the first step of a run; `full_check` reads batches and tries a step without an update.

FirstLook only ends a run for a finding that would also end the original: before the first step, not after an hour. It
reads numbers back once, in that step, and draws no random numbers; training is the same with or without it. A full
check works on a copy of the trainer, so that its trials leave no trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from trainwright._types import Batch, DataLoaderLike, Optimizer
from trainwright.capability import Capability
from trainwright.capability_table import MADE, check_capability
from trainwright.checkpoint import async_writer
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import resolve
from trainwright.config.coerce import output_path
from trainwright.config.plans import StepPlan
from trainwright.distributed.device import supports_bf16
from trainwright.errors import ArgumentError, DataError
from trainwright.loop.extension import Decision, Extension, Run, StepFacts
from trainwright.optim.factory import steps_in_backward
from trainwright.preflight import (  # noqa: F401 -- registers their checks
    data_checks,
    model_checks,
    row_checks,
    table_checks,
)
from trainwright.preflight.check_registry import (
    CHECKS,
    SECTIONS,
    CheckFacts,
    CheckReport,
    FirstStep,
    look_at,
    make_sections,
)
from trainwright.preflight.row_facts import taken_entries, with_rows
from trainwright.preflight.trainer_copy import AnyTrainer, compute_window_losses, left_as_it_was, make_copy
from trainwright.run import build, train
from trainwright.run.internals import Internals
from trainwright.support.hooks import is_overridden
from trainwright.support.units import size_text

logger = logging.getLogger(__name__)


def register_capabilities() -> None:
    """Enters the checks and sections of all capabilities."""
    for row in MADE:
        capability: Capability = row.load()
        CHECKS.update({one.name: one for one in capability.checks})
        SECTIONS.extend(one for one in capability.sections if one not in SECTIONS)


register_capabilities()

MAX_ELEMENTS = 300_000_000  # limit for parameters to check before every run, in a fraction of a second

BATCHES = 4  # batches of a window to examine

HOOKS_ON_BATCHES = ("get_batch_samples", "prepare_window", "_prepare_inputs", "_prepare_input")


class FirstLook(Extension):
    """Runs the cheap checks at three moments of a run's first step, and reports their findings."""

    name = "first_look"
    order = -50  # before a guard refuses the update

    def __init__(self, trainer: AnyTrainer, folder: str) -> None:
        self._trainer = trainer
        self._folder = folder
        self._facts: CheckFacts | None = None  # None if there is nothing to check
        self._dataloader: DataLoaderLike = None

    def before_plan(self, run: Run, dataloader: DataLoaderLike) -> None:
        """Keeps the dataloader: its order determines the rows of each batch."""
        self._dataloader = dataloader

    def begin(self, run: Run) -> None:
        """Runs the checks before the first step; withdraws from the run if they fail themselves."""
        trainer = self._trainer
        try:
            facts = known_facts(trainer, run.plan, self._folder, optimizer=trainer.optimizer, is_brief=True)
            is_fresh = run.progress.state.global_step == 0
            facts = with_rows(trainer, facts, self._dataloader if is_fresh else None)
        except Exception as error:
            logger.info("The first step is not checked: %s: %s", type(error).__name__, error)
            run.extensions.remove(self)
            return
        finally:
            self._dataloader = None
        self._tell(look_at(facts, "start"), replace(facts, rows=None, eval_rows=None))

    def _tell(self, report: CheckReport, facts: CheckFacts) -> None:
        """Logs the findings, and raises the first that ends the run; later checks use these facts."""
        self._facts = replace(facts, found_by=facts.found_by | {one.check for one in report.findings})
        for finding in report.findings:
            if finding.ends_run:
                raise DataError(str(finding))
        if self._trainer.args.should_log:
            log_findings(without_repeats(report, Internals(self._trainer)))

    def window(self, batches: Sequence[Batch]) -> None:
        """Checks the micro-batches of the first step, before the first forward pass."""
        assert self._facts is not None
        if all(isinstance(batch, dict) or hasattr(batch, "keys") for batch in batches):
            facts = replace(self._facts, batches=batches[:BATCHES])
            self._tell(look_at(facts, "batch"), facts)

    def decide(self, facts: StepFacts) -> Decision:
        """Checks the gradients of the first step, and its loss; the update is made."""
        assert self._facts is not None
        loss = float(facts.run.progress.meter.total)
        without_gradient = parameters_without_gradient(self._facts.model)
        step = FirstStep(loss=loss, without_gradient=without_gradient)
        seen = replace(self._facts, step=step)
        self._tell(look_at(seen, "step"), seen)
        return Decision.APPLY

    def after_step(self, run: Run) -> None:
        """Stops after the first step."""
        run.extensions.remove(self)
        self.close()

    def on_error(self, error: BaseException) -> None:
        """Adds to an out-of-memory error of the first step what would fit, by the memory plan."""
        trainer = self._trainer
        if trainer is None or not Internals(trainer).engine.is_out_of_memory(error):
            return
        try:
            said = find_what_fits(trainer)
        except Exception as reason:  # a model whose memory cannot be planned
            logger.info("What would fit is not known: %s: %s", type(reason).__name__, reason)
        else:
            error.add_note(said)

    def close(self) -> None:
        """Releases the trainer."""
        self._trainer = None
        self._facts = None
        self._dataloader = None


def find_what_fits(trainer: AnyTrainer) -> str:
    """Returns in a sentence which changes of settings make a step fit into the device's memory.

    Nothing is computed: the plan goes through the step with stand-ins. It is made where no step may be taken any more.
    """
    from trainwright.preflight.memory.planner import plan_memory, read_memory

    limit = read_memory(Internals(trainer).engine.device)
    plan = plan_memory(trainer, limit, measures=False)
    need = (
        f"By the memory plan a step needs {size_text(plan.peak.total_bytes)} of the {size_text(limit)} that there are"
    )
    if plan.peak.total_bytes <= limit:
        return f"{need}: look for what else holds memory of the device."
    fitting = [one for one in plan.changes if one.peak_bytes is not None and one.peak_bytes <= limit]
    if fitting:
        return f"{need}; this would fit, with {size_text(fitting[0].peak_bytes or 0)}: {fitting[0]}."
    return f"{need}, and no change of settings alone makes it fit."


def without_repeats(report: CheckReport, internals: Internals) -> CheckReport:
    """Returns a report without what an earlier trial of a search said of the same rows."""
    if not internals.is_searching:
        return report
    said = internals.search.said
    new = tuple(one for one in report.findings if not (one.rows and one.check in said))
    said.update(one.check for one in new)
    return replace(report, findings=new)


def log_findings(report: CheckReport) -> None:
    """Logs findings: notes as information, others as warnings."""
    for finding in report.findings:
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        logger.log(level, "%s", finding, extra={"check": finding.check})


def known_facts(
    trainer: AnyTrainer, plan: StepPlan | None, folder: str, *, optimizer: Optimizer | None, is_brief: bool
) -> CheckFacts:
    """Returns the known facts about a run before its first batch; `is_brief`: only problems are wanted, quickly."""
    args = trainer.args
    internals = Internals(trainer)
    engine = internals.engine
    optimizer_bytes = 0 if args.save_only_model else async_writer.estimated_optimizer_bytes(trainer.model)
    is_comparable = not steps_in_backward(args) and engine.trains_bare
    if engine.holds_parts:
        max_elements: int | None = 0
    elif is_brief:
        max_elements = MAX_ELEMENTS
    else:
        max_elements = None
    return CheckFacts(
        args=args,
        model=trainer.model,
        device=engine.device,
        processing_class=trainer.processing_class,
        optimizer=optimizer if is_comparable else None,
        has_own_schedule=build.has_own_schedule(trainer),
        plan=plan,
        # An input that an evaluation returns among the labels has no classes to check.
        label_names=tuple(name for name in trainer.label_names or () if not name.startswith("input_")),
        can_return_loss=trainer.can_return_loss,
        loss_is_the_models=not internals.uses_outputs(),
        model_gets_batches=not is_overridden(trainer, *HOOKS_ON_BATCHES),
        folder=Path(folder) if args.should_save else None,
        checkpoint_bytes=async_writer.weights_bytes(trainer.model) + optimizer_bytes,
        free_bytes=async_writer.free_bytes(Path(folder)),
        supports_bf16=supports_bf16(engine.device),
        max_elements=max_elements,
        is_brief=is_brief,
    )


def parameters_without_gradient(model: nn.Module) -> tuple[str, ...]:
    """Returns the trainable parameters without a gradient; empty if none has one, because the engine keeps them.

    A parameter without elements belongs to another process.
    """
    trainable = [(name, p.grad is None) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    names = tuple(name for name, is_lost in trainable if is_lost)
    return () if len(names) == len(trainable) else names


# -- in full -----------------------------------------------------------------------------------------------------------

WORTH_REPEATING_S = 5.0  # a faster first step is repeated: the first one also sets things up


def full_check(
    trainer: AnyTrainer,
    *,
    plans_memory: bool,
    budget: Any,
    processes: int | None = None,
    per_node: int | None = None,
    engine: str | Mapping[str, Any] | None = None,
    against: str | Sequence[str] | None = None,
) -> CheckReport:
    """Runs every check on all available facts; the arguments are as for `Trainer.check`.

    `plans_memory` adds the memory plan, or that of a run of `processes` processes.
    """
    if processes is None and (per_node is not None or engine is not None):
        raise ArgumentError(
            f"per_node={per_node!r} and engine={engine!r} belong to the plan of a run of many processes: say how many, "
            "check(processes=64, ...)."
        )
    if against is not None:
        check_capability("recorded_values", needed_by="check(against=...)")
    with left_as_it_was(trainer.model):
        copied = make_copy(trainer)
        facts = _known(trainer, copied)
        try:
            facts = replace(facts, batches=_batches(copied))
        except Exception as error:
            facts = replace(facts, failure=f"No batch can be made: {type(error).__name__}: {error}")
        if facts.batches and not _certainly_fails(facts):
            facts = _tried(copied, facts)
        report = replace(look_at(facts, "start", "batch", "step", "full"), sections=make_sections(facts))
    if against is not None:
        from trainwright.preflight.against import check_against

        report = replace(report, against=check_against(trainer, against))
    if processes is not None:
        from trainwright.preflight.memory.run_planner import plan_run

        plan = plan_run(trainer, processes, per_node=per_node, engine=engine, budget=budget)
        return replace(report, plan=plan)
    if not plans_memory:
        return report
    from trainwright.preflight.memory.planner import plan_memory

    return replace(report, memory=plan_memory(trainer, budget))


def _certainly_fails(facts: CheckFacts) -> bool:
    """Returns whether a step need not be tried: tokens beyond the vocabulary would end a GPU's process."""
    report = look_at(facts, "batch")
    return bool(report.of("vocabulary")) or any(one.ends_run for one in report.findings)


def _known(trainer: AnyTrainer, copied: AnyTrainer) -> CheckFacts:
    plan = optimizer = loader = None
    if trainer.train_dataset is not None:
        loader = copied.get_train_dataloader()
        values = copied.set_initial_training_values(copied.args, loader)
        plan = build.step_plan(copied.args, values)
    if not steps_in_backward(copied.args):
        num_steps = plan.max_steps if plan is not None else 1
        optimizer = copied.optimizer or Internals(copied).make_optimizer(copied.model, num_steps)
    facts = known_facts(copied, plan, output_path(copied.args), optimizer=optimizer, is_brief=False)
    names, taken = _columns(copied)
    # The copy has its own hooks, which change nothing.
    facts = replace(facts, model_gets_batches=not is_overridden(trainer, *HOOKS_ON_BATCHES))
    facts = with_rows(copied, facts, loader)

    def rehearse() -> Iterable[str]:
        from trainwright.run import dry_run

        train.check_evaluation(copied)
        return dry_run.find_metric_names(copied)

    return replace(facts, columns=names, taken=taken, rehearse=None if copied.eval_dataset is None else rehearse)


def _columns(copied: AnyTrainer) -> tuple[tuple[str, ...] | None, frozenset[str] | None]:
    """Returns the names of the entries of a training sample, and which of them reach the model or its collator."""
    data = copied.train_dataset
    names = getattr(data, "column_names", None)
    if names is None and hasattr(data, "__getitem__"):
        try:
            sample = data[0]
        except Exception:  # a stream, or a dataset with other keys
            return None, None
        names = list(sample) if isinstance(sample, dict) else None
    if names is None:
        return None, None
    taken = taken_entries(copied)
    return tuple(names), frozenset(names) if taken is None else taken


def _batches(copied: AnyTrainer) -> list[Batch]:
    from trainwright.run.dry_run import first_batches

    number = min(resolve.micro_batches(copied.args), BATCHES)
    return list(first_batches(copied.get_train_dataloader(), number))


def _tried(copied: AnyTrainer, facts: CheckFacts) -> CheckFacts:
    """Adds the facts from forward and backward passes over the batches, without an update."""
    internals = Internals(copied)
    engine = internals.engine
    if not engine.trains_bare or (steps_in_backward(copied.args) and copied.optimizer is not None):
        return facts
    try:
        with engine.mixed_precision(copied.model, keeps_outputs=internals.uses_outputs()):
            loss, seconds = _timed_step(copied, facts.batches)
            without = parameters_without_gradient(copied.model)
            if seconds < WORTH_REPEATING_S:
                seconds = _timed_step(copied, facts.batches)[1]
    except Exception as error:
        return replace(facts, failure=f"A step fails: {type(error).__name__}: {error}")
    share = resolve.micro_batches(copied.args) / len(facts.batches or (0,))
    return replace(facts, step=FirstStep(loss=loss, without_gradient=without, seconds=seconds * share))


def _timed_step(copied: AnyTrainer, batches: Any) -> tuple[float, float]:
    start = time.perf_counter()
    copied.model.train()
    with unchanged_random_states():
        losses = compute_window_losses(copied, batches)
    return float(sum(losses)), time.perf_counter() - start
