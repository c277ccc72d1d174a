"""`speed="auto"`: measures levers before the first step, proves each on the user's model, keeps the fastest.

A lever is a set of settings that changes the time of a step, but trains on the same samples and computes the same loss
and gradients; only the draws of dropout may differ. Each is tried on the first samples, on top of the ones kept so far;
afterwards weights, gradients, buffers and random states are restored. Settings that change the samples of a step are
suggested but never applied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from trainwright._types import JSONObject, has_length
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.errors import ModelError
from trainwright.loop.extension import Extension, Run
from trainwright.optim.factory import steps_in_backward
from trainwright.preflight.measure import SPLIT, Choice, Measurement, TooShort, in_words
from trainwright.preflight.padding import to_multiples
from trainwright.preflight.trainer_copy import AnyTrainer, left_as_it_was
from trainwright.preflight.trials import ATTENTION, PAD_TO
from trainwright.run import console
from trainwright.run.internals import Internals
from trainwright.support.host import available_bytes
from trainwright.support.patches import with_attention


class SpeedLevers(Extension):
    """Trains with the levers named in `speed`, with the checkpoint's levers, or with newly measured ones."""

    name = "speed"
    order = -60  # before anything that reads the settings

    def __init__(self, trainer: AnyTrainer) -> None:
        self._trainer = trainer
        self._choice = Choice()
        self._before: dict[str, Any] = {}
        self._batch_size = 0
        self._collator: Any = None
        self._attention = ExitStack()

    def model_ready(self, run: Run) -> None:
        """Chooses the settings and puts them into the arguments."""
        trainer = self._trainer
        args = trainer.args
        internals = Internals(trainer)
        checkpoint = internals.run.resumed.checkpoint
        choice = internals.engine.agree(lambda: _noted(args, checkpoint) or choose(trainer))
        first, *others = choice.lines()
        console.show_lines(args, [f"speed     {first}", *(f"          {line}" for line in others)])
        self._choice = choice
        fields = {name: value for name, value in choice.settings.items() if name != ATTENTION}
        self._before = {name: getattr(args, name) for name in (*fields, "speed")}
        self._batch_size = trainer._train_batch_size
        vars(args).update(fields, speed=choice.settings)
        if "per_device_train_batch_size" in fields:
            trainer._train_batch_size = args.train_batch_size
        self._collator = trainer.data_collator
        if (multiple := choice.settings.get(PAD_TO)) is not None:
            trainer.data_collator = to_multiples(trainer.data_collator, multiple)
        self._attention.enter_context(with_attention(trainer.model, choice.settings.get(ATTENTION)))

    def facts(self) -> JSONObject:
        """Returns the levers, for the journal."""
        return {"levers": self._choice.to_dict()}

    def close(self) -> None:
        """Restores the settings."""
        self._attention.close()
        if self._trainer is not None:
            vars(self._trainer.args).update(self._before)
            if "per_device_train_batch_size" in self._before:
                self._trainer._train_batch_size = self._batch_size
            if PAD_TO in self._before:
                self._trainer.data_collator = self._collator
        self._trainer = None


def _noted(args: Any, checkpoint: Checkpoint | None) -> Choice | None:
    """Returns the choice if it was made already."""
    if isinstance(args.speed, dict):
        return Choice(settings=args.speed, note=f"{in_words(args.speed) or 'as the arguments are'}: set by hand")
    arguments = None if checkpoint is None else checkpoint.arguments
    saved = (arguments or {}).get("speed")
    if not isinstance(saved, dict):
        return None
    settings = _for_step_size(saved, args.per_device_train_batch_size * args.gradient_accumulation_steps)
    return Choice(
        settings=settings, note=f"{in_words(settings) or 'as the arguments are'}: the choice of the checkpoint"
    )


def _for_step_size(settings: JSONObject, num_samples: int) -> JSONObject:
    """Returns the settings of a checkpoint for steps of `num_samples`, which the user may have changed since."""
    parts = settings.get("gradient_accumulation_steps")
    if not isinstance(parts, int) or parts < 1:
        return settings
    if num_samples % parts:
        return {name: value for name, value in settings.items() if name not in SPLIT}
    return settings | {"per_device_train_batch_size": num_samples // parts}


def choose(trainer: AnyTrainer) -> Choice:
    """Measures the levers of a trainer with a placed model, without changing the trainer. In one process."""
    logger = logging.getLogger("trainwright")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        if reason := _obstacle(trainer):
            return Choice(note=f"nothing was measured: {reason}")
        with left_as_it_was(trainer.model), _kept_weights(trainer.model) as restore:
            return Measurement(trainer, restore).choose()
    except TooShort as error:
        return Choice(note=f"nothing was measured: {error}")
    except Exception as error:  # from the user's model, data or hooks; the run itself will raise it again
        return Choice(note=f"nothing was kept: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    finally:
        Internals(trainer).engine.empty_cache()
        logger.setLevel(level)


def _obstacle(trainer: AnyTrainer) -> str | None:
    if reason := Internals(trainer).engine.changes_layers:
        return str(reason)
    if getattr(trainer.args, "mixed_precision", "no") == "fp8":
        return "fp8 exchanges layers"
    if steps_in_backward(trainer.args):
        return f"optim={trainer.args.optim} updates the weights in the backward pass"
    if isinstance(trainer.train_dataset, IterableDataset) or not has_length(trainer.train_dataset):
        return "the training data are a stream, which may only be read once"
    return None


@contextmanager
def _kept_weights(model: nn.Module) -> Iterator[Any]:
    """Yields a function that restores the trainable weights; they are also restored at the end."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if sum(p.numel() * p.element_size() for p in trained) > available_bytes():
        raise ModelError("there is no memory for a copy of the weights")
    copies = [(p, p.detach().to("cpu", copy=True)) for p in trained]

    def restore() -> None:
        with torch.no_grad():
            for parameter, before in copies:
                parameter.copy_(before)

    try:
        yield restore
    finally:
        restore()
