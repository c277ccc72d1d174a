"""The guard: what happens to a step with an unusable loss or gradient; none if every update is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trainwright._types import Optimizer
from trainwright.capabilities.guard.checks import CHECKS
from trainwright.capabilities.guard.diagnosis import find_bad_parts_anywhere
from trainwright.capabilities.guard.plan import make_plan
from trainwright.capabilities.guard.rollback import make_rollback
from trainwright.capabilities.guard.step_guard import make_guard
from trainwright.capability import Capability, Extension, Others, RunContext

if TYPE_CHECKING:
    from trainwright.loop.incident import Incident


@runtime_checkable
class Records(Protocol):
    """What writes the bundles of incidents."""

    def record(self, incident: Incident, window: object) -> Incident: ...


def leave_unrecorded(incident: Incident, window: object) -> Incident:
    """Returns an incident as it is, where nothing writes bundles."""
    return incident


def make(context: RunContext, others: Others) -> Extension | None:
    """Returns the guard, which writes bundles where incidents are recorded."""
    run = context.run
    engine = context.engine
    setup = run.setup
    recorder = others.get("incidents")
    plan = make_plan(context.args)
    stacked = engine.stacked if engine.num_replicas > 1 else None
    rollback = make_rollback(
        plan,
        setup.model,
        setup.optimizer,
        None if setup.follows_metrics(setup.scheduler) else setup.scheduler,
        load_newest=context.load_newest,
        samples_per_step=run.batch_size * engine.num_replicas * run.plan.micro_batches,
        is_possible=not engine.updates_in_clip,
    )

    def report(incident: Incident) -> None:
        is_counted = incident.step <= run.progress.state.global_step  # otherwise the loop counts it
        if is_counted and incident.action in ("skip", "rollback"):
            run.extensions.refuse(incident.step)
        setup.events.fire("on_incident", run.progress, incident=incident)

    def diagnose(optimizer: Optimizer) -> dict[str, str]:
        return find_bad_parts_anywhere(setup.model, optimizer, engine.gather_objects)

    return make_guard(
        plan,
        report,
        record=recorder.record if isinstance(recorder, Records) else leave_unrecorded,
        optimizer=setup.optimizer,
        device=engine.device,
        mean=None if stacked is None else lambda loss: stacked(loss).mean(),
        rollback=rollback,
        was_updated=(lambda: engine.step(setup.optimizer)) if engine.updates_in_clip else None,
        has_scaler=engine.scales_loss,
        knows_norm=engine.knows_norm,
        diagnose=diagnose,
        writes=context.writes,
    )


CAPABILITY = Capability(make=make, needs=("incidents",), checks=CHECKS)
