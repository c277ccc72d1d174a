"""Averaged weights as an extension: which steps enter the average, its evaluation, its file in a checkpoint.

Weights enter after a step, unless its update was not made. If a guard knows that only during the next step, they
enter then, just before the next update; until then they are the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainwright._types import Model, StateDict, counted
from trainwright.capabilities.averages.averages import Tensors, make_average
from trainwright.capabilities.averages.plan import AveragePlan
from trainwright.capabilities.averages.saved import AVERAGES_NAME, ENTRY, is_average
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError, CheckpointError
from trainwright.loop.extension import Decision, Evaluate, Extension, Run, SavedRun, Sink, StepFacts
from trainwright.support.model_facts import plain_name
from trainwright.support.tensor_tree import local_part

logger = logging.getLogger(__name__)

PREFIX = "eval_average"


class WeightAverages(Extension):
    """Keeps an average of the trained weights, evaluates it too, and saves it with each checkpoint.

    Args:
        plan: kind and options of the average.
        model: as the engine wrapped it; its trained parameters are averaged, buffers are not.
        engine: of the run.
        num_steps: steps of the run; None if they are not known.
        is_late: another extension may refuse a step after `after_step`.
        writes: this process writes the files of a checkpoint.

    Raises:
        ArgumentError: the engine keeps the weights elsewhere, or `start` is a share of an unknown number of steps.
    """

    name = ENTRY
    order = 5  # after the guard, which may refuse the step before

    def __init__(
        self,
        plan: AveragePlan,
        model: Model,
        engine: Engine,
        *,
        num_steps: int | None,
        is_late: bool,
        writes: bool,
    ) -> None:
        if (reason := engine.hides_weights) is not None:
            raise ArgumentError(
                f"average={plan.kind!r} needs the trained weights as the parameters of the model, and {reason}. Or set "
                "average=None."
            )
        self._plan = plan
        self._model = model
        self._engine = engine
        self._is_late = is_late
        self._writes = writes
        self._first = first_step(plan, num_steps)
        self._average = make_average(plan)
        self._pending: int | None = None  # a step whose weights must still enter
        self._refused = 0  # the last step without an update
        named = engine.unwrap(model).named_parameters()
        self._others = {plain_name(name): parameter for name, parameter in named}  # not trained up to now
        self._averaged: dict[str, torch.nn.Parameter] = {}
        self._follow_trained()

    def listens_to(self) -> set[str]:
        """Excludes `decide` if each refusal is reported before `after_step`."""
        events = super().listens_to()
        return events if self._is_late else events - {"decide"}

    # -- entries -------------------------------------------------------------------------------------------------------

    def refused(self, step: int) -> None:
        """Excludes the weights of a step without an update."""
        self._refused = step
        if self._pending == step:
            self._pending = None

    def after_step(self, run: Run) -> None:
        """Adds the weights to the average, if due."""
        step = run.progress.state.global_step
        if step < self._first or step % self._plan.every or step == self._refused:
            return
        self._pending = step
        if not self._is_late:
            self.settle()

    def decide(self, facts: StepFacts) -> Decision:
        """Adds the weights of the previous step, now that a missing update would have been reported."""
        self.settle()
        return Decision.APPLY

    def settle(self) -> None:
        """Enters the weights of the last step, if that is due."""
        if self._pending is not None:
            self._pending = None
            self._follow_trained()
            self._average.enter(self._weights())

    def _follow_trained(self) -> None:
        """Takes in the parameters that are trained by now: a callback may have unfrozen some."""
        found = {name: one for name, one in self._others.items() if one.requires_grad}
        if found:
            self._average.extend([self._kept(local_part(one)) for one in found.values()])
            self._averaged |= found
            self._others = {name: one for name, one in self._others.items() if name not in found}

    def _weights(self) -> Tensors:
        return [self._kept(local_part(parameter)) for parameter in self._averaged.values()]

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._plan.in_host_memory else tensor

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluated(self, run: Run, evaluate: Evaluate) -> dict[str, float]:
        """Evaluates the average, which is the weights themselves until the first entry of an average from step 1 on."""
        if self._average.num:
            with self._in_the_model():
                return evaluate(PREFIX)
        return evaluate(PREFIX) if self._first == 0 else {}

    @contextmanager
    def _in_the_model(self) -> Iterator[None]:
        """Context in which the model has the average for its weights."""
        self._engine.begin_epoch(self._model)
        trained = [one.clone() for one in self._weights()]
        self._put(self._average.mean())
        try:
            yield
        finally:
            self._engine.begin_epoch(self._model)
            self._put(trained)

    def _put(self, values: Tensors) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._averaged.values(), values, strict=True):
                local_part(parameter).copy_(value)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the average in whole tensors by name; all processes call it."""
        copies = [self._whole(entry) for entry in self._average.kept]
        state = {"kind": self._plan.kind, "num": self._average.num, "copies": copies}

        def write(copied: StateDict) -> None:
            torch.save(copied, folder / AVERAGES_NAME)

        if self._writes:
            sink.put(state, write)

    def _whole(self, parts: Tensors) -> dict[str, torch.Tensor]:
        """Gathers tensors by name, one after the other, into the process that writes; none in the others."""
        named: dict[str, torch.Tensor] = {}
        for (name, parameter), part in zip(self._averaged.items(), parts, strict=True):
            whole = self._engine.whole_tensor(parameter, part)
            if self._writes:
                named[name] = part if whole is part else whole.cpu()
        return named

    def load(self, checkpoint: SavedRun) -> None:
        """Continues the average of a checkpoint; CheckpointError if it is for another model."""
        state = checkpoint.entry(self.name).state(is_average)
        if not state or state["kind"] != self._plan.kind or not state["copies"]:
            before = state.get("kind", "none")
            logger.warning(
                "%s has no average of kind %s (%s): it begins with this run.", checkpoint.path, self._plan.kind, before
            )
            return
        copies: list[dict[str, torch.Tensor]] = state["copies"]
        missing = [name for name in self._averaged if name not in copies[0]]
        if missing:
            logger.warning(
                "The average of %s lacks %s (%s, ...), which enter with their weights of now.",
                checkpoint.path,
                counted(len(missing), "parameter"),
                missing[0],
            )
        entries = [[self._take_part(copy, name, checkpoint.path) for name in self._averaged] for copy in copies]
        self._average.load(state["num"], entries)

    def _take_part(self, copy: dict[str, torch.Tensor], name: str, path: Path) -> torch.Tensor:
        """Returns this process's part of a saved tensor."""
        parameter = self._averaged[name]
        here = local_part(parameter)
        if name not in copy:
            return self._kept(here)
        if copy[name].shape != parameter.shape:
            raise CheckpointError(
                f"The average in {path} has {name} in the shape {tuple(copy[name].shape)}, and the model has "
                f"{tuple(parameter.shape)}. Resume with the model of that run, or with average=None."
            )
        part = self._engine.take_tensor_part(parameter, copy[name])
        return part.to("cpu" if self._plan.in_host_memory else here.device)

    def close(self) -> None:
        """Lets go of the model and of the average."""
        self._average = make_average(self._plan)
        self._averaged = {}
        self._others = {}
        self._pending = None


def first_step(plan: AveragePlan, num_steps: int | None) -> int:
    """Returns the first step that may enter; ArgumentError if it is a share of an unknown number of steps."""
    if plan.start >= 1:
        return int(plan.start)
    if plan.start > 0 and num_steps is None:
        raise ArgumentError(
            f"average: start={plan.start} is a share of all steps, and the data of this run has no length. Give start "
            "as a number of steps, or set max_steps."
        )
    return math.ceil(plan.start * (num_steps or 0))
