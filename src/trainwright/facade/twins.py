"""Twins of a trainer: the same objects and hooks with records of their own, so that what is tried leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright import assemble
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.state.control import TrainerControl
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState

# What a run leaves in a trainer, as it is before the first one.
BLANK: dict[str, Any] = {
    "is_in_train": False, "_before": None, "_changes": (), "_owed": (False, False), "_loader": None, "_plan": None,
    "_rule": None, "_pause": None, "_is_rehearsing": False, "_flos_model": None, "_past": None,
}  # fmt: skip


def twin_of(trainer: Any, *, model: Any, **settings: Any) -> Any:  # any Trainer, or a subclass of the user's
    """A trainer like this one around a model, with other settings; trackers and the user's callbacks stay out."""
    twin = copy.copy(trainer)
    twin.args = copy.copy(trainer.args)
    for name, value in settings.items():
        setattr(twin.args, name, value)
    for name, value in BLANK.items():
        setattr(twin, name, list(value) if name == "_changes" else value)
    twin.model = twin.model_wrapped = model
    twin._run = RunState(TrainerState(), TrainerControl())
    twin._run_id = assemble.new_run_id()
    twin._writer = CheckpointWriter()
    twin._memory_tracker = TrainerMemoryTracker(True)
    twin._eval_dataloaders = {}
    twin.callback_handler = CallbackHandler(
        [DefaultFlowCallback], model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    )
    twin.callback_handler.args = twin.args
    twin._journal = assemble.make_keeper(twin.callback_handler, twin._run.clock)
    twin.state = TrainerState(stateful_callbacks=twin._stateful(), is_local_process_zero=True)
    return twin


@contextmanager
def as_it_was(model: Any) -> Iterator[None]:
    """Whatever a step does to a model besides its weights is undone: gradients, buffers, modes, random states."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with assemble.untouched_randomness():
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, was_training in modes:
            module.training = was_training
