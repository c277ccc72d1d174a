"""Copies of a trainer: the same objects and hooks with records of their own, so that what is tried leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.run import build
from trainwright.run.training import TrainingRun
from trainwright.state.model_modes import unchanged_model


def copy_of(trainer: Any, *, model: Any, **settings: Any) -> Any:  # any Trainer, or a subclass of the user's
    """A trainer like this one around a model, with other settings; trackers and the user's callbacks stay out.

    Args:
        trainer: lends its datasets, hooks and engine.
        model: in place of the trainer's.
        settings: fields of the arguments and their values.
    """
    copied = copy.copy(trainer)
    copied.args = copy.copy(trainer.args)
    for name, value in settings.items():
        setattr(copied.args, name, value)
    copied.model = copied.model_wrapped = model
    copied._services = build.Services.for_arguments(copied.args, measures_memory=False)
    copied._services.use_engine(trainer._engine)
    copied._run = TrainingRun.idle(copied.args)
    handler = CallbackHandler(
        [DefaultFlowCallback], model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    )
    handler.args = copied.args
    copied._services.use_callbacks(handler, copied._run.progress.clock)
    copied.state = copied._fresh_state()
    return copied


@contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    """Whatever a step does to a model besides its weights is undone, and no random number is drawn."""
    with unchanged_random_states(), unchanged_model(model):
        yield
