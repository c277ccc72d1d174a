"""Trials of settings: steps of copies of a trainer, what they compute, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch

from trainwright._types import Batch, JSONObject
from trainwright.checkpoint.rng import unchanged_random_states
from trainwright.distributed.device import synchronize
from trainwright.preflight import padding
from trainwright.preflight.prove import no_dropout
from trainwright.preflight.trainer_copy import AnyTrainer, compute_window_losses, make_copy
from trainwright.run.internals import Internals
from trainwright.run.patched_model import patched
from trainwright.run.train import noise_on_embeddings
from trainwright.support.patches import with_attention

ATTENTION = "attn_implementation"  # the lever that is no field of the arguments
PAD_TO = "pad_to_multiple_of"  # the lever that the collator is given too
NUM_TIMED = 2  # timed steps; the shortest counts, since other work on the machine only adds time

Tensors = Mapping[str, torch.Tensor]


def copy_with(trainer: AnyTrainer, settings: JSONObject) -> AnyTrainer:
    """Returns a copy of a trainer with other settings."""
    fields = {name: value for name, value in settings.items() if name != ATTENTION}
    fields |= {"speed": None, "average_tokens_across_devices": False}  # the divisor is not shared between processes
    parts = {"lr_scheduler": None, "_created_lr_scheduler": False}
    if (multiple := settings.get(PAD_TO)) is not None:
        parts["data_collator"] = padding.to_multiples(trainer.data_collator, multiple)
    if "per_device_train_batch_size" not in settings:
        parts["_train_batch_size"] = trainer._train_batch_size
    return make_copy(trainer, fields, **parts)


class Trials:
    """Steps of copies of a trainer with one choice of settings or another.

    Args:
        trainer: the trainer.
        restore: puts weights and buffers back as they were.
        num_steps: optimizer steps of the run, for schedules inside of an optimizer.
        now: returns the time in seconds.
    """

    def __init__(
        self, trainer: AnyTrainer, restore: Callable[[], None], *, num_steps: int, now: Callable[[], float]
    ) -> None:
        self.restore = restore
        self._trainer = trainer
        self._num_steps = num_steps
        self._now = now

    @contextmanager
    def opened(self, settings: JSONObject) -> Iterator[AnyTrainer]:
        """Returns a copy of the trainer with its model set up as in a run with the settings."""
        copied = copy_with(self._trainer, settings)
        engine = Internals(self._trainer).engine
        with ExitStack() as stack:
            stack.callback(self.restore)
            stack.enter_context(unchanged_random_states())
            stack.enter_context(with_attention(copied.model, settings.get(ATTENTION)))
            keeps = Internals(copied).uses_outputs()
            noise = noise_on_embeddings(copied)
            stack.enter_context(
                patched(copied.args, copied.model, engine, keeps_outputs=keeps, noise=noise, is_alone=True)
            )
            copied.model.train()
            yield copied

    def _step(self, copied: AnyTrainer, batches: Sequence[Batch]) -> torch.Tensor:
        """The loss of a window; gradients are left."""
        copied.model.zero_grad(set_to_none=True)
        return torch.stack([loss.float() for loss in compute_window_losses(copied, batches)]).sum()

    def _optimizer(self, copied: AnyTrainer) -> Any:
        """Returns a new optimizer; None if the trainer has one, because its state must not change."""
        if copied.optimizer is not None:
            return None
        return Internals(copied).make_optimizer(copied.model, self._num_steps)

    def compute(self, copied: AnyTrainer, batches: Sequence[Batch], *, updates: bool = False) -> Tensors:
        """Loss and gradients of a step, or the change of the weights by its update."""
        with unchanged_random_states():
            loss = self._step(copied, batches)
        named = [(name, p) for name, p in copied.model.named_parameters() if p.grad is not None]
        found = {"loss": loss.detach().cpu()}
        if not updates:
            return found | {name: p.grad.detach().float().cpu() for name, p in named}
        before = {name: p.detach().float().cpu().clone() for name, p in named}
        self._optimizer(copied).step()
        return found | {name: p.detach().float().cpu() - before[name] for name, p in named}

    def try_once(self, settings: JSONObject, batches: Sequence[Batch], *, updates: bool = False) -> Tensors:
        """Loss and gradients of a step with the settings, or the change of the weights by its update."""
        with self.opened(settings) as copied:
            return self.compute(copied, batches, updates=updates)

    def try_without_dropout(self, settings: JSONObject, batches: Sequence[Batch]) -> Tensors:
        """Loss and gradients of a step with the settings, and without dropout."""
        with no_dropout(self._trainer.model):
            return self.try_once(settings, batches)

    def measure_steps(
        self,
        copied: AnyTrainer,
        batches: Sequence[Batch],
        *,
        updates: bool = False,
        reads: Iterator[object] | None = None,
        num_warm: int = 1,
    ) -> float:
        """Shortest time of a step after `num_warm` that set things up; where given, batches are read before each."""
        optimizer = self._optimizer(copied) if updates else None
        device = Internals(self._trainer).engine.device
        seconds = []
        for _ in range(num_warm + NUM_TIMED):
            begun = self._now()
            if reads is not None:
                list(islice(reads, len(batches)))
            self._step(copied, batches)
            if optimizer is not None:
                optimizer.step()
            synchronize(device)
            seconds.append(self._now() - begun)
        return min(seconds[num_warm:])

    def measure(self, settings: JSONObject, batches: Sequence[Batch], *, updates: bool) -> float:
        """Shortest time of a step with the settings."""
        with self.opened(settings) as copied:
            return self.measure_steps(copied, batches, updates=updates)
