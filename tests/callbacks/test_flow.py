"""When to log, evaluate, save and stop: the same flags as transformers' over a grid of arguments and states."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import transformers

import trainwright
from trainwright import DefaultFlowCallback, TrainerControl, TrainerState, TrainingArguments

STRATEGIES = ("no", "steps", "epoch")
STATES = list(itertools.product((1, 4, 5, 6, 10, 12), (5, 12), (2, 5), (0.5, 1.0, 2.0)))


def arguments(**settings: Any) -> tuple[Any, Any]:
    always = {"output_dir": "run", "use_cpu": True, "report_to": "none"}
    return TrainingArguments(**always, **settings), transformers.TrainingArguments(**always, **settings)


@pytest.mark.parametrize("logging_strategy", STRATEGIES)
@pytest.mark.parametrize("eval_strategy", STRATEGIES)
@pytest.mark.parametrize("save_strategy", STRATEGIES)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("delay", [0, 5])
def test_all_flags_are_equal(
    logging_strategy: str, eval_strategy: str, save_strategy: str, first: bool, delay: int
) -> None:
    ours, theirs = arguments(
        logging_strategy=logging_strategy,
        eval_strategy=eval_strategy,
        save_strategy=save_strategy,
        logging_first_step=first,
        eval_delay=delay,
        eval_steps=5,
    )
    different = []
    for event, (step, max_steps, interval, epoch) in itertools.product(("on_step_end", "on_epoch_end"), STATES):
        values = {
            "global_step": step,
            "max_steps": max_steps,
            "epoch": epoch,
            "logging_steps": interval,
            "eval_steps": interval,
            "save_steps": interval,
        }
        one = TrainerControl()
        other = transformers.TrainerControl()
        one = getattr(DefaultFlowCallback(), event)(ours, TrainerState(**values), one) or one
        original = transformers.DefaultFlowCallback()
        other = getattr(original, event)(theirs, transformers.TrainerState(**values), other) or other
        if vars(one) != vars(other):
            different.append((event, values, vars(one), vars(other)))
    assert different == []


def test_a_flag_that_another_callback_set_stays() -> None:
    control = TrainerControl(should_save=True, should_epoch_stop=True)
    args = TrainingArguments("run", use_cpu=True, save_strategy="no", report_to="none")
    state = TrainerState(global_step=1, max_steps=9)
    DefaultFlowCallback().on_step_end(args, state, control)
    DefaultFlowCallback().on_epoch_end(args, state, control)
    assert (control.should_save, control.should_epoch_stop) == (True, True)


def test_it_is_the_public_one() -> None:
    assert trainwright.DefaultFlowCallback is DefaultFlowCallback
