"""Saving and stopping by the clock, with a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainwright import TrainerControl, TrainerState
from trainwright.callbacks.flow import CAUTION, TimeLimits


class Course:
    """A run of steps that take a second, saves that take five, evaluations that take twenty."""

    def __init__(self, limits: dict[str, float], *, eval_steps: int | None = None, save_s: float = 5.0) -> None:
        self.now = 1000.0
        self.callback = TimeLimits(**limits, clock=lambda: self.now)  # type: ignore[arg-type]
        self.args = SimpleNamespace(eval_strategy="steps" if eval_steps else "no")
        self.progress = TrainerState(eval_steps=eval_steps)
        self.control = TrainerControl()
        self.save_s = save_s
        self.saved: list[float] = []
        self.evaluated: list[int] = []
        self._tell("on_train_begin")

    def _tell(self, event: str, **kwargs: Any) -> None:
        getattr(self.callback, event)(self.args, self.progress, self.control, **kwargs)

    def run(self, num_steps: int, *, saves_at: tuple[int, ...] = ()) -> Course:
        for _ in range(num_steps):
            self.step(saves=self.progress.global_step + 1 in saves_at)
            if self.control.should_training_stop:
                break
        return self

    def step(self, *, saves: bool) -> None:
        control = self.control
        state = self.progress
        control.should_save = control.should_evaluate = False
        self._tell("on_step_begin")
        self.now += 1
        state.global_step += 1
        control.should_save = saves
        control.should_evaluate = bool(state.eval_steps) and state.global_step % int(state.eval_steps or 1) == 0
        self._tell("on_step_end")
        if control.should_evaluate:
            self.now += 20
            self.evaluated.append(state.global_step)
            self._tell("on_evaluate", metrics={})
        if control.should_save:
            self.now += self.save_s
            self.saved.append(self.now - 1000)
            self._tell("on_save")


def test_no_more_than_so_long_between_saves_whoever_asked() -> None:
    course = Course({"save_every_s": 60.0}).run(300, saves_at=(100,))
    gaps = [later - earlier for earlier, later in zip([0.0, *course.saved], course.saved, strict=False)]
    assert max(gaps) <= 60 + 1 + 5
    assert min(gap for gap in gaps[2:]) >= 60
    assert [saved for saved in course.saved if saved == 100 + 5 + 5] != [], "the save of a step was moved"


@pytest.mark.parametrize("save_s", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("limit", [100.0, 333.0])
def test_it_ends_in_time_and_not_much_before(save_s: float, limit: float) -> None:
    course = Course({"max_train_s": limit}, save_s=save_s).run(1000, saves_at=(10,))
    assert course.control.should_training_stop
    assert course.saved[-1] == course.now - 1000, "it did not save last"
    assert course.now - 1000 <= limit
    assert limit - (course.now - 1000) <= (CAUTION - 1) * save_s + 2.5


def test_a_save_that_was_never_seen_is_guessed() -> None:
    course = Course({"max_train_s": 100.0, "first_save_s": 30.0}, save_s=40.0).run(1000)
    assert course.now - 1000 <= 100


def test_an_evaluation_that_does_not_fit_is_left_to_the_resume() -> None:
    course = Course({"max_train_s": 100.0}, eval_steps=10).run(1000, saves_at=(5,))
    assert course.now - 1000 <= 100
    assert course.evaluated == [10, 20]
    assert not course.callback.owes_evaluation, "the step before one is early enough to stop"
    late = Course({"max_train_s": 100.0}, eval_steps=10)
    late.args.eval_strategy = "epoch"  # then nobody knows before
    late.run(1000, saves_at=(5,))
    assert late.now - 1000 <= 100
    assert late.callback.owes_evaluation
    assert late.callback.state()["attributes"] == {"owes_evaluation": True}
    assert not late.control.should_evaluate


def test_the_clock_is_looked_at_seldom_while_there_is_time() -> None:
    asked = []

    class Counting(TimeLimits):
        def _decide(self, *args: Any) -> Any:
            asked.append(1)
            return super()._decide(*args)

    course = Course({"max_train_s": 10_000.0})
    course.callback = Counting(10_000.0, clock=lambda: course.now)
    course.run(9_000)
    assert len(asked) < 60


def test_all_processes_do_what_the_first_one_says() -> None:
    first = Course({"save_every_s": 10.0})
    decisions: list[Any] = []

    def record(decide: Any) -> Any:
        decisions.append(decide())
        return decisions[-1]

    first.callback._agree = record
    first.run(100)
    other = Course({"save_every_s": 10.0})
    told = iter(decisions)
    other.callback._agree = lambda decide: next(told)
    other.callback._clock = lambda: 0.0  # its own clock stands still
    other.run(100)
    assert len(first.saved) == len(other.saved) > 3
    assert next(told, None) is None
