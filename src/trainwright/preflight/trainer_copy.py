"""Copies of a trainer: the same objects and hooks with separate records, so that trials leave no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from trainwright._types import Batch
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.config.fields import assign
from trainwright.run.internals import Internals
from trainwright.run.run import Run
from trainwright.run.services import Services
from trainwright.support.hooks import has_hook
from trainwright.support.model_modes import unchanged_model

AnyTrainer: TypeAlias = Any  # a Trainer, or a subclass of the user's: the class is above this package


def make_copy(trainer: AnyTrainer, settings: Mapping[str, Any] | None = None, **parts: Any) -> AnyTrainer:
    """Returns a trainer like this one, with its own services and run, without trackers and the user's callbacks.

    `settings` are changed fields of the arguments, `parts` changed attributes: `model`, `optimizer`, ...
    """
    args = copy.copy(trainer.args)
    assign(args, settings or {})
    internals = Internals(trainer)
    services = Services.for_arguments(args, measures_memory=False)
    services.use_engine(internals.engine)
    run = Run.idle(args)
    size = args.train_batch_size if settings else trainer._train_batch_size
    windows: dict[str, Any] = {"checkpoint_items": {}}
    if has_hook(trainer, "prepare_window", num_arguments=1):
        # Windows are trained as they were read: preparing one may change a user's object.
        windows["prepare_window"] = list
    parts = {"args": args, "_train_batch_size": size, **windows, **parts}
    parts["model_wrapped"] = parts.get("model", trainer.model)
    copied = internals.copied_for_preflight(services=services, run=run, **parts)
    model = copied.model
    optimizer = copied.optimizer
    schedule = copied.lr_scheduler
    handler = CallbackHandler([DefaultFlowCallback], model, trainer.processing_class, optimizer, schedule)
    handler.args = args
    services.use_callbacks(handler, run.progress.clock)
    run.progress.state = Internals(copied).fresh_state()
    return copied


def compute_window_losses(copied: AnyTrainer, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Returns the losses of the micro-batches of one step of a copy, and leaves their gradients in its model."""
    device = Internals(copied).engine.device
    window, num_items = copied.get_batch_samples(iter(batches), len(batches), device)
    copied.current_gradient_accumulation_steps = len(window)
    return [copied.training_step(copied.model, dict(batch), num_items) for batch in window]


@contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    """Undoes all effects of a step on a model besides its weights, and draws no random numbers."""
    with unchanged_random_states(), unchanged_model(model):
        yield
