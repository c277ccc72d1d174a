"""The time left: it holds across evaluations, saves and resumes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainwright import TrainerState
from trainwright.callbacks.progress import Eta, latest, pauses_left

STEP_S = 2.0
EVALUATION_S = 30.0
SAVE_S = 5.0


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def after(steps: int, *, eval_every: int, save_every: int) -> tuple[Eta, list[float | None]]:
    """A pace after so many steps, and what it said was left of 100 after each."""
    hands = Hands()
    pace = Eta(hands)
    said = []
    args = SimpleNamespace(eval_strategy="steps", save_strategy="steps")
    state = TrainerState(max_steps=100, eval_steps=eval_every, save_steps=save_every)
    for step in range(1, steps + 1):
        hands.now += STEP_S
        evaluates = step % eval_every == 0
        saves = step % save_every == 0
        pause = "save" if saves else None
        if evaluates:
            pause = "evaluation"
        pace.step_done(pause=pause)
        hands.now += EVALUATION_S * evaluates + SAVE_S * (saves and not evaluates)
        state.global_step = step
        said.append(pace.left_s(100 - step, pauses_left(args, state)))
    return pace, said


def test_the_rate_is_that_of_training_alone() -> None:
    pace, _ = after(45, eval_every=10, save_every=4)
    assert pace.step_s == pytest.approx(STEP_S)


def test_once_an_evaluation_was_seen_the_time_left_is_that_which_passes() -> None:
    """With the evaluations to come in it, and so it does not jump when one of them takes its time."""
    _, said = after(95, eval_every=10, save_every=10)
    for step in range(12, 95):
        left = (100 - step) * STEP_S + (10 - step // 10) * EVALUATION_S
        assert said[step - 1] == pytest.approx(left), step


def test_before_two_steps_nothing_is_claimed() -> None:
    _, said = after(2, eval_every=50, save_every=50)
    assert said == [None, pytest.approx(98 * STEP_S)]


def test_saves_beside_evaluations_are_counted_once() -> None:
    args = SimpleNamespace(eval_strategy="epoch", save_strategy="steps")
    state = TrainerState(max_steps=100, num_train_epochs=4, save_steps=10, global_step=50)
    assert pauses_left(args, state) == {"evaluation": 2, "save": 5}
    args = SimpleNamespace(eval_strategy="no", save_strategy="no")
    assert pauses_left(args, state) == {"evaluation": 0, "save": 0}


def test_what_the_bar_has_room_for() -> None:
    logs = {"loss": 0.51234, "learning_rate": 3e-5, "train_tokens_per_second": 12345.6, "grad_norm": 1.0, "epoch": 1.0}
    assert latest(logs) == "loss 0.512, lr 3e-05, tokens/s 12.3 k"
