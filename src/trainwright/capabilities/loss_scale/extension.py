"""Skipped updates in fp16, read one step late, so that the host does not wait for the device during a step.

In fp16, a gradient scaler skips an update whose gradients overflowed, and the schedule must not advance then. A fused
optimizer gets the scaler's flag on the device and skips there, so the host does not know. The flag is copied during the
computation and read before the next update, when the device has long passed it, and before each log, evaluation and
save. If it is set, the schedule's step is undone:

    step  rate used  overflow  schedule after the step  before the next update
    1     1.0        no        0.9                      keeps 0.9
    2     (0.9)      yes       0.8                      puts 0.9 back
    3     0.9        no        0.8                      keeps 0.8

For an optimizer that is not fused, the scaler skips on the host, which waits for the flag in any case.
"""

from __future__ import annotations

from collections.abc import Callable

from trainwright.distributed.device import DelayedScalar
from trainwright.engine.base import Engine
from trainwright.loop.extension import Decision, Extension, Run, StepFacts
from trainwright.optim.schedules import can_undo, schedule_memory


class SkippedUpdates(Extension):
    """Undoes the schedule's step after an update that was skipped on the device.

    Args:
        engine: scales the loss, on a device that can copy during its computation.
    """

    name = "loss_scale"
    order = -50  # restores the schedule before other extensions decide, or copy it

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flag = DelayedScalar(engine.device)
        self._undo: Callable[[], None] | None = None  # undoes the schedule's next step
        self._waiting: Callable[[], None] | None = None  # the same for a step with an unread flag

    def decide(self, facts: StepFacts) -> Decision:
        """Settles the previous step, and records the schedule."""
        self.settle()
        self._engine.defers_skips = can_undo(facts.scheduler)
        self._undo = schedule_memory(facts.scheduler) if self._engine.defers_skips else None
        return Decision.APPLY

    def after_step(self, run: Run) -> None:
        """Starts copying the flag of the update, if only the device knows whether it was skipped."""
        flag = self._engine.take_skip_flag()
        if flag is not None:
            self._flag.send(flag)
            self._waiting = self._undo
        self._undo = None

    def settle(self) -> None:
        """Reads the flag of the last update, and undoes the schedule's step if it was skipped."""
        undo = self._waiting
        self._waiting = None
        if undo is not None and self._flag.read() != 0.0:
            undo()

    def close(self) -> None:
        """Lets the engine read flags immediately again."""
        self._engine.defers_skips = False
        self._undo = None
        self._waiting = None
