"""Loops written by the user: the steps of a run, trained outside of `train()`. See `Trainer.steps`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, NoReturn, Protocol, TypeVar

import torch

from trainwright._types import Batch, Model
from trainwright.distributed.pending import arrived
from trainwright.errors import StepOrderError
from trainwright.loop.step import Step
from trainwright.support.loss_normalization import LossOutput

Output = TypeVar("Output")


class DriveHooks(Protocol):
    """Published methods of the trainer that a driven step calls."""

    def compute_loss_context_manager(self) -> AbstractContextManager[object]: ...


@dataclass(frozen=True, slots=True)
class DrivePasses:
    """Methods of the trainer's class around the loss of a micro-batch, which are given the trainer.

    Attributes:
        begin: (trainer, model, inputs, num_items, *, compares_loss) -> the batch on the device.
        differentiate: (trainer, loss, inputs, num_items, *, is_scaled) -> the loss as it is added up.
    """

    begin: Callable[..., Batch]
    differentiate: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step. Tensors are on the device: reading one waits for it.

    Attributes:
        step: number of the step, from 1: optimizer steps done, including this one.
        loss: sum of this process's micro-batch contributions to the loss of the window, a detached scalar.
        grad_norm: norm of the gradients before clipping; None if not measured.
        learning_rate: rate of the first parameter group, before the schedule's step.
    """

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor | float | None
    learning_rate: float | None


class DrivenStep:
    """One optimizer step of `Trainer.steps()`: call `backward` for each of its `batches`, then `update`."""

    def __init__(
        self, step: Step, hooks: DriveHooks, passes: DrivePasses, ends_run: Callable[[BaseException], NoReturn]
    ) -> None:
        self._step = step
        self._passes = passes
        self._hooks = hooks
        self._ends_run = weakref.WeakMethod(ends_run)  # a step that outlives its loop keeps no run alive
        self._inputs: Batch | None = None  # the current micro-batch as collated
        self._forward = ExitStack()
        self._is_begun = self._is_read = self._has_loss = False

    @property
    def number(self) -> int:
        """Number of the step, from 1."""
        return self._step.number

    @property
    def model(self) -> Model:
        """The model as the engine wrapped it; forward passes must go through it."""
        return self._step.model

    @property
    def num_items(self) -> torch.Tensor | int | None:
        """Label items of all micro-batches, over all processes with `average_tokens_across_devices`.

        A scalar tensor on the device; None if neither the model nor the loss function asks for it.
        """
        return arrived(self._step.num_items)  # type: ignore[no-any-return]

    @property
    def batches(self) -> Iterator[Batch]:
        """Iterates over the micro-batches once, on the device, as `_prepare_inputs` returns them.

        The forward and backward passes of each belong into the body of the loop: gradients of the last micro-batch are
        averaged over processes, `step_contexts` are entered, and so is the context of `compute_loss_context_manager`
        until `backward`. Ends early if a callback stops the epoch or the run; `update` then drops the window.

        Raises:
            StepOrderError: they were iterated before, or `backward` was not called for the previous micro-batch.
        """
        if self._is_begun:
            self._refuse("step.batches was iterated already; a step trains each of its micro-batches once.")
        self._is_begun = True
        return self._read()

    def _read(self) -> Iterator[Batch]:
        batches = self._step.micro_batches
        while True:
            with self._ending_the_run():
                self._inputs = next(batches, None)
                if self._inputs is None:
                    break
                inputs = self._passes.begin(self._hooks, self.model, self._inputs, self.num_items, compares_loss=False)
                self._forward.enter_context(self._hooks.compute_loss_context_manager())
            self._has_loss = False
            try:
                yield inputs
            finally:
                self._forward.close()
            if not self._has_loss:
                self._refuse(
                    "step.backward(loss) was not called for a micro-batch. Call it once for each of step.batches; for "
                    "a micro-batch that must not count, pass its loss times 0."
                )
        self._is_read = True

    def backward(self, loss: torch.Tensor | LossOutput, *, is_scaled: bool | None = None) -> None:
        """Computes the gradients of a micro-batch's loss, adds them to the window's gradients, and logs the loss.

        Args:
            loss: a scalar with its graph, or a `LossOutput`; divided as `train()` divides the result of `compute_loss`.
            is_scaled: for a custom loss, True if it is scaled for the whole window (a sum over the micro-batch,
                divided by `num_items`), False if it is the mean of its micro-batch; None: as `compute_loss` returns it.

        Raises:
            StepOrderError: it is called outside of the loop over `batches`, or after `update`.
        """
        if self._step.is_over or self._inputs is None:
            when = "after step.update()" if self._step.is_over else "outside of the loop over step.batches"
            self._refuse(f"step.backward() was called {when}. Call it for each micro-batch of that loop.")
        with self._ending_the_run():
            self._forward.close()
            add_up = self._passes.differentiate
            self._step.add(add_up(self._hooks, loss, self._inputs, self.num_items, is_scaled=is_scaled))
        self._has_loss = True

    def update(self) -> StepResult | None:
        """Updates the weights: clips, consults the guard, steps optimizer and schedule, fires the events of a step.

        Then logs, evaluates and saves if due.

        Returns:
            The result; None if a callback stopped the epoch or run within the window, which is then dropped.

        Raises:
            StepOrderError: it was called before, or not all micro-batches are trained.
        """
        if self._step.is_over:
            self._refuse(
                "step.update() was called twice. One step makes one update: continue with the next step of steps()."
            )
        if not self._is_read:
            self._refuse(
                "step.update() was called before all micro-batches of the step were trained. Finish the loop over "
                "step.batches first."
            )
        with self._ending_the_run():
            self._step.update()
        return make_result(self._step)

    def _refuse(self, message: str) -> NoReturn:
        with self._ending_the_run():
            raise StepOrderError(message)

    @contextmanager
    def _ending_the_run(self) -> Iterator[None]:
        """Wraps the trainer's own work: an error in it ends the run, as within `train()`."""
        ends_run = self._ends_run()
        if ends_run is None:
            raise StepOrderError("The loop over steps() has ended, and so has this step's run.")
        try:
            yield
        except BaseException as error:
            ends_run(error)


def make_result(step: Step) -> StepResult | None:
    """Returns the result of a finished step; None if its window was dropped."""
    if step.result is None or step.loss is None:
        return None
    return StepResult(step.number, step.loss, step.result.grad_norm, step.result.learning_rate)


class DrivenSteps(Generic[Output]):
    """Iterator over the steps of a run; see `Trainer.steps`.

    Attributes:
        output: the return value of `train()`, once the last step is done.
    """

    def __init__(self, run: Generator[Step, None, Output], hooks: DriveHooks, passes: DrivePasses) -> None:
        self._run = run
        # The current run keeps the trainer alive; afterwards, this object does not, since the trainer may hold it.
        self._hooks = weakref.ref(hooks)
        self._passes = passes
        self._last: Step | None = None
        self.output: Output | None = None

    def __iter__(self) -> DrivenSteps[Output]:
        return self

    def __next__(self) -> DrivenStep:
        step = self.next_step()
        hooks = self._hooks()
        assert hooks is not None
        return DrivenStep(step, hooks, self._passes, self._end_by)

    def next_step(self) -> Step:
        """Returns the next step of the loop in `train()`; StopIteration at the end of the run."""
        if self._last is not None and not self._last.is_over:
            self._end_by(
                StepOrderError(
                    f"The next step was requested before step.update() of step {self._last.number}. Train all of its "
                    "micro-batches and call step.update(), or leave the loop."
                )
            )
        try:
            self._last = step = next(self._run)
        except StopIteration as end:
            self._last = None
            if end.value is not None:
                self.output = end.value
            raise
        step.keeps_loss = True
        return step

    def next_or_none(self) -> Step | None:
        """Returns the next step; None at the end of the run."""
        try:
            return self.next_step()
        except StopIteration:
            return None

    @contextmanager
    def ending_by_error(self) -> Iterator[None]:
        """Wraps the body of the loop: an error in it ends the run, as within `train()`."""
        try:
            yield
        except BaseException as error:
            self._end_by(error)

    def close(self) -> None:
        """Ends the run at its current step: ends workers, finishes writes, restores hooks and signal handlers.

        Leaving a `for` loop does this, unless a variable holds the iterator; so does leaving a `with` statement.
        """
        self._run.close()

    def __enter__(self) -> DrivenSteps[Output]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close() if error is None else self._end_by(error)

    def _end_by(self, error: BaseException) -> NoReturn:
        """Ends the run by an error, and raises it; a signal ends the process as in `train()`."""
        self._run.throw(error)
        raise error
