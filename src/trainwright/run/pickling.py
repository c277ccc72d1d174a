"""Pickles and deep copies of a trainer: they keep the record of its run, and get their own services."""

from __future__ import annotations

from typing import Any

from trainwright.callbacks.base import TiedToProcess
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import TimeLimits
from trainwright.run.internals import Internals
from trainwright.run.parts import give_parts
from trainwright.run.run import Run
from trainwright.run.run_callbacks import time_limits
from trainwright.run.services import Services


def make_state(trainer: Any) -> dict[str, Any]:  # any Trainer, or a subclass of the user's
    """Returns a trainer without its services and its run, of which callbacks, record and flags are kept."""
    internals = Internals(trainer)
    progress = internals.run.progress
    return {
        "attributes": internals.picklable_attributes(),
        "parts": internals.picklable_parts(),
        "callbacks": [_without_process(one) for one in trainer.callback_handler.callbacks],
        "state": progress.state,
        "control": progress.control,
    }


def _without_process(callback: Any) -> Any:
    """Returns a callback, or the class of one that another process makes anew."""
    return type(callback) if isinstance(callback, TiedToProcess) else callback


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Restores the state of `make_state` in a trainer without attributes."""
    attributes = dict(state["attributes"])
    # Pickles of 0.3 have them among the attributes.
    older = {
        name[1:]: attributes.pop(name) for name in ("_search", "_extensions", "_default_collator") if name in attributes
    }
    vars(trainer).update(attributes)
    give_parts(trainer, older | state.get("parts", {}))
    args = trainer.args
    internals = Internals(trainer)
    services = Services.for_arguments(args)
    run = Run.idle(args, state["state"])
    internals.services = services
    internals.run = run
    run.progress.control = state["control"]
    trainer.create_accelerator_and_postprocess()
    limits = time_limits(args, trainer.model, engine=services.engine, writer=services.writer)
    callbacks = [limits if c is TimeLimits else c for c in state["callbacks"]]
    parts = trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    handler = CallbackHandler([c for c in callbacks if c is not None], *parts)
    handler.args = args
    services.use_callbacks(handler, run.progress.clock)
