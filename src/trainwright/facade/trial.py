"""A check-up in full: the first batches are read, one step is tried without an update, and every check looks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trainwright import assemble, model_facts
from trainwright._types import Batch
from trainwright.config import resolve
from trainwright.config.plans import StepPlan
from trainwright.data import columns
from trainwright.evaluation.dry_run import first_batches
from trainwright.facade.twins import as_it_was, twin_of
from trainwright.optim.optimizer_class import steps_in_backward
from trainwright.preflight.check_registry import BATCH, FULL, START, STEP, look_at
from trainwright.preflight.facts import CheckFacts, FirstStep
from trainwright.preflight.finding import CheckReport
from trainwright.preflight.first_look import BATCHES, parameters_without_gradient

WORTH_REPEATING_S = 5.0  # a first step that was quicker is taken again: the first one also sets things up


def full_check(trainer: Any, *, memory: Any) -> CheckReport:  # any Trainer, or a subclass of the user's
    """Every check over everything that can be found out. `memory` makes a plan of a twin, or is None."""
    with as_it_was(trainer.model):
        twin = twin_of(trainer, model=trainer.model)
        facts = _known(trainer, twin)
        try:
            facts = replace(facts, batches=_batches(twin))
        except Exception as error:
            facts = replace(facts, failure=f"No batch can be made: {type(error).__name__}: {error}")
        if facts.batches and not look_at(facts, (BATCH,)).of("vocabulary"):  # it would end a GPU's process
            facts = _tried(twin, facts)
        report = look_at(facts, (START, BATCH, STEP, FULL))
    return report if memory is None else replace(report, memory=memory())


def _known(trainer: Any, twin: Any) -> CheckFacts:
    """What needs no batch."""
    plan = optimizer = None
    if trainer.train_dataset is not None:
        values = twin.set_initial_training_values(twin.args, twin.get_train_dataloader())
        plan = StepPlan.from_values(values, micro_batches=resolve.micro_batches(twin.args), max_grad_norm=0.0)
    if not steps_in_backward(twin.args):
        optimizer = twin.optimizer or twin._make_optimizer(twin.model, plan.max_steps if plan is not None else 1)
    facts: CheckFacts = twin._facts(plan, str(twin.args.output_dir), optimizer=optimizer, is_brief=False)
    names, taken = _columns(twin)
    rehearse = _rehearse(twin) if twin.eval_dataset is not None else None
    return replace(facts, columns=names, taken=taken, rehearse=rehearse)


def _columns(twin: Any) -> tuple[tuple[str, ...] | None, frozenset[str] | None]:
    """Names of the entries of a training sample, and which of them reach the model or its collator."""
    data = twin.train_dataset
    names = getattr(data, "column_names", None)
    if names is None and hasattr(data, "__getitem__"):
        try:
            sample = data[0]
        except Exception:  # a stream, or a dataset that wants other keys
            return None, None
        names = list(sample) if isinstance(sample, dict) else None
    if names is None:
        return None, None
    keeps_all = not twin.args.remove_unused_columns or model_facts.takes_any_input(twin.model)
    if keeps_all or columns.is_own(twin.data_collator):
        return tuple(names), frozenset(names)
    twin._set_signature_columns_if_needed()
    return tuple(names), frozenset(twin._signature_columns)


def _rehearse(twin: Any) -> Any:
    def names() -> Iterable[str]:
        twin._rehearse_evaluation()
        return twin._names_of_metrics()  # type: ignore[no-any-return]

    return names


def _batches(twin: Any) -> list[Batch]:
    number = min(resolve.micro_batches(twin.args), BATCHES)
    return list(first_batches(twin.get_train_dataloader(), number))


def _tried(twin: Any, facts: CheckFacts) -> CheckFacts:
    """With what a forward and a backward pass over the batches show; no update is made."""
    if not twin._engine.trains_bare or (steps_in_backward(twin.args) and twin.optimizer is not None):
        return facts
    try:
        with twin._engine.mixed_precision(twin.model, keeps_outputs=twin._uses_outputs()):
            loss, seconds = _timed_step(twin, facts.batches)
            without = parameters_without_gradient(twin.model)
            if seconds < WORTH_REPEATING_S:
                seconds = _timed_step(twin, facts.batches)[1]
    except Exception as error:
        return replace(facts, failure=f"A step fails: {type(error).__name__}: {error}")
    share = resolve.micro_batches(twin.args) / len(facts.batches or (0,))
    return replace(facts, step=FirstStep(loss=loss, without_gradient=without, seconds=seconds * share))


def _timed_step(twin: Any, batches: Any) -> tuple[float, float]:
    start = time.perf_counter()
    twin.model.train()
    with assemble.untouched_randomness():
        window, num_items = twin.get_batch_samples(iter(batches), len(batches), twin._engine.device)
        twin._rule, twin.current_gradient_accumulation_steps = twin._loss_rule(), len(window)
        losses = [twin.training_step(twin.model, dict(batch), num_items) for batch in window]
    return float(sum(losses)), time.perf_counter() - start
