"""TimeLimits: saves and stops by the clock. It only sets flags, as the flow by steps does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.control import TrainerControl
from trainwright.state.exportable_state import ExportableState
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)

CAUTION = 1.5  # a save may take so many times as long as the longest one before
LOOKS = 0.1  # of the time until something may be due: after so much of it the clock is read again


def _alone(decide: Callable[[], Decision]) -> Decision:
    return decide()


class Decision(NamedTuple):
    """Decision of one process for all, by its clock.

    Attributes:
        saves, stops: whether to save and to stop after this step.
        num_steps: steps until the next decision.
    """

    saves: bool
    stops: bool
    num_steps: int


class TimeLimits(TrainerCallback, ExportableState):
    """Requests a save at intervals of time, and the end of training early enough for a last save.

    Args:
        max_train_s: seconds that a `train()` may take, its last save included.
        save_every_s: seconds between two saves, whoever asked for the earlier one.
        save_s: returns the seconds of the longest save so far until it was on disk; 0 before the first.
        first_save_s: estimate of these seconds before the first save.
        agree: calls a function on the first process and returns its result on all of them.
        clock: returns seconds; monotonic.
    """

    looks_at_files = False  # on_save only reads the clock

    def __init__(
        self,
        max_train_s: float | None = None,
        save_every_s: float | None = None,
        *,
        save_s: Callable[[], float] = float,
        first_save_s: float = 0.0,
        agree: Callable[[Callable[[], Decision]], Decision] = _alone,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_train_s, self.save_every_s = max_train_s, save_every_s
        self.owes_evaluation = False
        self._agree, self._clock = agree, clock
        self._save_s, self._first_save_s = save_s, first_save_s
        self._longest = {"save": 0.0, "step": 0.0, "evaluation": 0.0}
        self._began = self._saved = self._asked = clock()
        self._step_began: float | None = None
        self._num_steps = self._next_look = 0

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._began = self._saved = self._asked = self._clock()
        self._step_began, self._num_steps, self._next_look = None, 0, 0
        self.owes_evaluation = False

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        now = self._clock()
        if self._step_began is not None and self._num_steps > 1:  # from step to step: waiting for data counts
            self._saw("step", now - self._step_began)
        self._step_began = now

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._asked = now = self._clock()
        self._num_steps += 1
        if self._num_steps == 2:
            self._longest["step"] = 0.0  # the first one takes longer: compiling, warming up
        if self._step_began is not None:
            self._saw("step", now - self._step_began)
        if state.global_step >= self._next_look or control.should_evaluate:
            self._obey(self._agree(lambda: self._decide(args, state, control)), state, control)
        if control.should_evaluate or control.should_save or control.should_log:
            self._step_began = None

    def on_epoch_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._asked = self._clock()
        self._step_began = None
        self._obey(self._agree(lambda: self._decide(args, state, control)), state, control)

    def on_evaluate(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        now = self._clock()
        self._saw("evaluation", now - self._asked)
        self._asked = now

    def on_save(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._saved = self._clock()
        self._saw("save", self._saved - self._asked)
        self._next_look = 0

    def state(self) -> dict[str, Any]:  # JSON
        """Returns the pending evaluation, for a checkpoint."""
        return {"args": {}, "attributes": {"owes_evaluation": self.owes_evaluation}}

    def _decide(self, args: Arguments, state: TrainerState, control: TrainerControl) -> Decision:
        now = self._clock()
        until_save = math.inf if self.save_every_s is None else self._saved + self.save_every_s - now
        until_stop = math.inf if self.max_train_s is None else self._began + self.max_train_s - now
        until_stop -= CAUTION * self._last_save_s() + self._longest["step"]
        if control.should_evaluate or _evaluates(args, state, state.global_step + 1):
            until_stop -= self._longest["evaluation"]
        left = LOOKS * (min(until_save, until_stop) - self._longest["evaluation"])
        num_steps = max(1, min(10_000, int(left / max(self._longest["step"], 1e-6)))) if left < math.inf else 1
        return Decision(until_save <= 0, until_stop <= 0 and not control.should_training_stop, num_steps)

    def _obey(self, decision: Decision, state: TrainerState, control: TrainerControl) -> None:
        self._next_look = state.global_step + decision.num_steps
        if decision.saves:
            control.should_save = True
        if not decision.stops:
            return
        control.should_save = control.should_training_stop = True
        self.owes_evaluation, control.should_evaluate = control.should_evaluate, False
        logger.warning(
            "max_train_time=%gs is nearly over after %.1fs, and a save may take %.1fs: the run saves and stops after "
            "step %d. Resume with resume_from_checkpoint=True.",
            self.max_train_s, self._clock() - self._began, self._last_save_s(), state.global_step,
        )  # fmt: skip

    def _last_save_s(self) -> float:
        """Returns the seconds that the last save may take, in the background too: the loop waits for it."""
        return max(self._longest["save"], self._save_s()) or self._first_save_s

    def _saw(self, what: str, took_s: float) -> None:
        self._longest[what] = max(self._longest[what], took_s)


def _evaluates(args: Arguments, state: TrainerState, step: int) -> bool:
    steps = state.eval_steps
    return bool(args.eval_strategy == "steps" and steps and steps >= 1 and step % steps == 0)
