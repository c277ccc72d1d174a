"""Rollback: copies of weights, optimizer and schedule in host memory, and restoring the last of them.

Data and `global_step` move on, as in a skipped step: the samples since the snapshot are not trained again (Chowdhery et
al. 2022, arXiv:2204.02311, section 5.1). With a snapshot every 50 steps, and step 57 bad: step 57 ends with
the weights of step 50, and the schedule is seven steps behind from then on.

A snapshot is also taken with each save, so that a run resumed from it rolls back to the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from trainwright._types import Optimizer, Scheduler
from trainwright.capabilities.guard.plan import GuardPlan
from trainwright.errors import BadStepError
from trainwright.optim.schedules import schedule_memory
from trainwright.state.progress import Progress
from trainwright.support.tensor_tree import local_part


class SavedState(Protocol):
    """A state to return to."""

    def follow(self, optimizer: Optimizer, scheduler: Scheduler) -> None:
        """Uses the optimizer and the schedule of the next update, which a callback may have replaced."""

    def keep(self, run: Progress, *, is_saved: bool) -> None:
        """Copies the state after a finished step, if a copy is due."""

    def restore(self) -> int:
        """Restores the state; returns its step."""


class MemorySnapshot:
    """One copy in host memory of everything a step changes: trained weights, buffers, optimizer, schedule.

    It is renewed every `every` steps. Of sharded parameters, each process copies its part. `scheduler` is None if it is
    not stepped with the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, scheduler: Scheduler, *, every: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._every = every
        self._step: int | None = None
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor and its copy, by the tensor's id
        self._states: dict[torch.Tensor, dict[str, Any]] = {}  # Any: an optimizer's state for a parameter
        self._undo: Callable[[], None] = lambda: None

    def follow(self, optimizer: Optimizer, scheduler: Scheduler) -> None:
        """Accepts a replaced optimizer.

        The copied weights apply to it, and its own copy begins with its current state.
        """
        if optimizer is not self._optimizer and self._step is not None:
            parameters = [copied for copied in self._copies.values() if isinstance(copied[0], nn.Parameter)]
            self._copies = {id(tensor): (tensor, copy) for tensor, copy in parameters}
            self._states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
            self._undo = schedule_memory(scheduler)
        self._optimizer = optimizer
        self._scheduler = scheduler

    def keep(self, run: Progress, *, is_saved: bool) -> None:
        """Copies the state: before the first step, every `every` steps, and with each checkpoint."""
        step = run.state.global_step
        if step == self._step or not (self._step is None or is_saved or step % self._every == 0):
            return
        before = self._copies
        self._copies = {}
        for tensor in self._tensors():
            known, copy = before.get(id(tensor), (None, None))
            if copy is not None and known is tensor:
                copy.copy_(local_part(tensor))
            else:
                copy = local_part(tensor).to("cpu", copy=True)
            self._copies[id(tensor)] = tensor, copy
        self._states = {parameter: dict(state) for parameter, state in self._optimizer.state.items()}
        self._undo = schedule_memory(self._scheduler)
        self._step = step

    def restore(self) -> int:
        """Restores the copy; returns its step."""
        assert self._step is not None
        for parameter in set(self._optimizer.state) - set(self._states):
            del self._optimizer.state[parameter]
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = dict(state)
        for tensor, copy in self._copies.values():
            local_part(tensor).copy_(copy)
        self._undo()
        return self._step

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (parameter for parameter in self._model.parameters() if parameter.requires_grad)
        yield from self._model.buffers()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class SavedSnapshot:
    """The newest checkpoint of the run; `load` loads its weights, optimizer and schedule, and returns its step."""

    def __init__(self, load: Callable[[], int]) -> None:
        self.restore = load

    def follow(self, optimizer: Optimizer, scheduler: Scheduler) -> None:
        """Does nothing: a checkpoint is loaded into the trainer's current optimizer."""

    def keep(self, run: Progress, *, is_saved: bool) -> None:
        """Does nothing: checkpoints are written anyway."""


class Rollback:
    """Returns to the last snapshot, but at most `most` times to the same one.

    The updates of `num_left_out` steps after a rollback are skipped too; `left_out` of them are still to come.
    """

    def __init__(self, snapshot: SavedState, *, most: int, num_left_out: int) -> None:
        self._snapshot = snapshot
        self._most = most
        self._num_left_out = num_left_out
        self._last = -1  # step of the last snapshot used
        self._times = 0  # number of times that snapshot was used
        self.keep = snapshot.keep
        self.follow = snapshot.follow
        self.left_out = 0

    def leaves_out(self) -> bool:
        """Returns True if the update of the current step is skipped because of an earlier rollback."""
        if self.left_out == 0:
            return False
        self.left_out -= 1
        return True

    def go_back(self, error: type[BadStepError]) -> int:
        """Restores the last snapshot, and returns its step.

        Raises `error` after too many rollbacks to the same snapshot, and the error of `restore` if there is none.
        """
        with torch.no_grad():
            step = self._snapshot.restore()
        self._times = self._times + 1 if step == self._last else 1
        self._last = step
        self.left_out = self._num_left_out
        if self._times > self._most:
            raise error(
                f"Bad steps after {self._most} rollbacks to step {step} (max_rollbacks={self._most}): the samples "
                "alone are not the cause. Lower the learning rate, or resume from an earlier checkpoint."
            )
        return step


def make_rollback(
    plan: GuardPlan,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Scheduler,
    *,
    load_newest: Callable[[], int],
    samples_per_step: int,
    is_possible: bool,
) -> Rollback | None:
    """Makes the rollback of a run; None if no policy asks for it, or the engine keeps its own states.

    `scheduler` is None if it is not stepped with the optimizer; `load_newest` loads the newest checkpoint of the run
    and returns its step; `samples_per_step` counts the samples of all processes.
    """
    if "rollback" not in (plan.on_nonfinite, plan.on_spike) or not is_possible:
        return None
    every = plan.rollback_every
    snapshot = MemorySnapshot(model, optimizer, scheduler, every=every) if every > 0 else SavedSnapshot(load_newest)
    num_left_out = math.ceil(plan.rollback_skip_samples / samples_per_step)
    return Rollback(snapshot, most=plan.max_rollbacks, num_left_out=num_left_out)
