"""A check-up in full: the first batches are read, one step is tried without an update, and every check looks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainwright import model_facts
from trainwright._types import Batch
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config import resolve
from trainwright.data import columns
from trainwright.optim.optimizer_class import steps_in_backward
from trainwright.preflight.check_registry import CheckFacts, CheckReport, FirstStep, look_at
from trainwright.preflight.first_look import BATCHES, known_facts, parameters_without_gradient
from trainwright.preflight.trainer_copy import AnyTrainer, copy_of, left_as_it_was
from trainwright.run import build, dry_run
from trainwright.run.dry_run import first_batches

WORTH_REPEATING_S = 5.0  # a first step that was quicker is taken again: the first one also sets things up


def full_check(trainer: AnyTrainer, *, plans_memory: bool, budget: Any) -> CheckReport:
    """Every check over everything that can be found out; `plans_memory` adds the memory plan, see `Trainer.check`."""
    with left_as_it_was(trainer.model):
        copied = copy_of(trainer)
        facts = _known(trainer, copied)
        try:
            facts = replace(facts, batches=_batches(copied))
        except Exception as error:
            facts = replace(facts, failure=f"No batch can be made: {type(error).__name__}: {error}")
        if facts.batches and not look_at(facts, "batch").of("vocabulary"):  # it would end a GPU's process
            facts = _tried(copied, facts)
        report = look_at(facts, "start", "batch", "step", "full")
    if not plans_memory:
        return report
    from trainwright.preflight.memory.planner import plan_memory

    return replace(report, memory=plan_memory(trainer, budget))


def _known(trainer: AnyTrainer, copied: AnyTrainer) -> CheckFacts:
    plan = optimizer = None
    if trainer.train_dataset is not None:
        values = copied.set_initial_training_values(copied.args, copied.get_train_dataloader())
        plan = build.step_plan(copied.args, values)
    if not steps_in_backward(copied.args):
        optimizer = copied.optimizer or copied._make_optimizer(copied.model, plan.max_steps if plan is not None else 1)
    facts = known_facts(copied, plan, str(copied.args.output_dir), optimizer=optimizer, is_brief=False)
    names, taken = _columns(copied)

    def rehearse() -> Iterable[str]:
        copied._dry_run_evaluation()
        return dry_run.names_of_metrics(copied)

    return replace(facts, columns=names, taken=taken, rehearse=None if copied.eval_dataset is None else rehearse)


def _columns(copied: AnyTrainer) -> tuple[tuple[str, ...] | None, frozenset[str] | None]:
    """Names of the entries of a training sample, and which of them reach the model or its collator."""
    data = copied.train_dataset
    names = getattr(data, "column_names", None)
    if names is None and hasattr(data, "__getitem__"):
        try:
            sample = data[0]
        except Exception:  # a stream, or a dataset that wants other keys
            return None, None
        names = list(sample) if isinstance(sample, dict) else None
    if names is None:
        return None, None
    keeps_all = not copied.args.remove_unused_columns or model_facts.takes_any_input(copied.model)
    if keeps_all or columns.is_own(copied.data_collator):
        return tuple(names), frozenset(names)
    copied._set_signature_columns_if_needed()
    return tuple(names), frozenset(copied._signature_columns)


def _batches(copied: AnyTrainer) -> list[Batch]:
    number = min(resolve.micro_batches(copied.args), BATCHES)
    return list(first_batches(copied.get_train_dataloader(), number))


def _tried(copied: AnyTrainer, facts: CheckFacts) -> CheckFacts:
    """With what a forward and a backward pass over the batches show; no update is made."""
    if not copied._engine.trains_bare or (steps_in_backward(copied.args) and copied.optimizer is not None):
        return facts
    try:
        with copied._engine.mixed_precision(copied.model, keeps_outputs=copied._uses_outputs()):
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
        window, num_items = copied.get_batch_samples(iter(batches), len(batches), copied._engine.device)
        copied.current_gradient_accumulation_steps = len(window)
        losses = [copied.training_step(copied.model, dict(batch), num_items) for batch in window]
    return float(sum(losses)), time.perf_counter() - start
