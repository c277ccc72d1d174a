"""The rate of a resumed run: no jump where it goes on, the new end reached, and what was changed in effect."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from trainwright.optim import schedules
from trainwright.optim.schedules import BUILDERS, follows_metrics, make_schedule

BASE = 1e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr_rate": 0.2},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05},
    "warmup_stable_decay": {"num_decay_steps": 6},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
}
WARMUPS = {"none": lambda length: 0, "steps": lambda length: 5, "share": lambda length: math.ceil(0.2 * length)}
BY_STEPS = [name for name in BUILDERS if name not in ("reduce_lr_on_plateau", "greedy")]
COURSES = [
    (20, 20, 40),
    (20, 10, 40),
    (20, 1, 40),
    (20, 3, 200),
    (40, 10, 20),
    (40, 25, 30),
    (20, 19, 21),
    (60, 30, 61),
]


def builder(name: str, warmup: Callable[[int], int]) -> Callable[[Any, int], Any]:
    def build(optimizer: Any, length: int) -> Any:
        return make_schedule(
            name, optimizer, num_warmup_steps=warmup(length), num_training_steps=length, options=OPTIONS.get(name)
        )

    return build


def optimizer(rate: float = BASE, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.zeros(2, requires_grad=True)], lr=rate, **settings)


def after(build: Any, steps: int, length: int) -> Any:
    """A schedule of a run of `length`, `steps` steps on; and the rates that they had."""
    schedule = build(optimizer(), length)
    return schedule, advance(schedule, steps)


def advance(schedule: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


def loaded(build: Any, schedule: Any, length: int) -> Any:
    """A fresh schedule with the state of another one, through a file."""
    fresh = build(optimizer(), length)
    fresh.load_state_dict(schedule.state_dict())
    fresh.optimizer.load_state_dict(schedule.optimizer.state_dict())
    return fresh


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("name", BY_STEPS)
@pytest.mark.parametrize(("before", "here", "now"), COURSES, ids=lambda n: str(n))
def test_the_rate_goes_on_from_where_it_stands_to_the_new_end(
    name: str, warmup: str, before: int, here: int, now: int
) -> None:
    build = builder(name, WARMUPS[warmup])
    schedule, so_far = after(build, here, before)
    would_be = schedule.optimizer.param_groups[0]["lr"] if here < before else so_far[-1]
    again = loaded(build, schedule, now)
    schedules.continue_towards(again, build, before=before, now=now)
    rates = advance(again, now - here)
    assert rates[0] == pytest.approx(would_be, abs=1e-12), "a jump at the resume"
    fresh = advance(build(optimizer(), now), now)
    steepest = max([abs(b - a) for a, b in itertools.pairwise(fresh[here:])], default=0.0)
    steepest += abs(would_be - fresh[here]) / (now - here) + 1e-12  # the excess fades over what is left
    assert all(abs(b - a) <= steepest for a, b in itertools.pairwise(rates)), "a jump on the way"
    assert max(rates) <= max(would_be, *fresh[here:]) + 1e-12
    assert min(rates) >= 0
    end = again.optimizer.param_groups[0]["lr"]
    assert end <= max(build(optimizer(), now).lr_lambdas[0](now) * BASE, 0) + 1e-12


def test_the_worked_example() -> None:
    build = builder("linear", WARMUPS["none"])
    schedule, so_far = after(build, 20, 20)
    assert so_far[-1] == pytest.approx(5e-5)
    again = loaded(build, schedule, 40)
    assert schedules.continue_towards(again, build, before=20, now=40)
    rates = advance(again, 20)
    assert (rates[0], rates[10]) == pytest.approx((5e-5, 2.5e-5))
    assert again.get_last_lr()[0] == 0


@pytest.mark.parametrize("name", BY_STEPS)
def test_a_later_resume_follows_the_same_course(name: str) -> None:
    """Also one that was saved in a file, and one that is extended twice."""
    build = builder(name, WARMUPS["steps"])
    schedule, _ = after(build, 12, 20)
    through = loaded(build, schedule, 40)
    schedules.continue_towards(through, build, before=20, now=40)
    advance(through, 8)
    again = loaded(build, through, 40)
    schedules.continue_towards(again, build, before=40, now=40)
    last = advance(through, 20)
    assert advance(again, 20) == last
    third = loaded(build, through, 60)
    schedules.continue_towards(third, build, before=40, now=60)
    assert third.get_last_lr()[0] == pytest.approx(last[-1], abs=1e-12)
    advance(third, 5)
    fourth = loaded(build, third, 60)
    schedules.continue_towards(fourth, build, before=60, now=60)
    assert advance(fourth, 10) == advance(third, 10)


@pytest.mark.parametrize("name", BY_STEPS)
def test_the_same_length_changes_nothing(name: str) -> None:
    build = builder(name, WARMUPS["steps"])
    schedule, _ = after(build, 7, 20)
    again = loaded(build, schedule, 20)
    assert not schedules.continue_towards(again, build, before=20, now=20)
    assert not hasattr(again, schedules.HORIZONS)
    assert advance(again, 13) == advance(schedule, 13)


def test_the_state_holds_only_numbers(tmp_path: Any) -> None:
    build = builder("cosine", WARMUPS["none"])
    again = loaded(build, after(build, 5, 20)[0], 40)
    schedules.continue_towards(again, build, before=20, now=40)
    torch.save(again.state_dict(), tmp_path / "scheduler.pt")
    assert torch.load(tmp_path / "scheduler.pt", weights_only=True)["horizons"] == [[0, 20], [5, 40]]


@pytest.mark.parametrize("name", BUILDERS)
def test_another_base_rate_applies_with_the_position_kept(name: str) -> None:
    def build(optimizer: Any, length: int) -> Any:
        return builder(name, WARMUPS["none"])(optimizer, length)

    def rates(schedule: Any) -> list[float]:
        if not follows_metrics(schedule):
            return advance(schedule, 6)
        return [schedule.optimizer.param_groups[0]["lr"]]

    old = optimizer()
    old_schedule = None
    old_schedule = build(old, 20)
    if follows_metrics(old_schedule):
        old.param_groups[0]["lr"] *= 0.25  # evaluations have moved it
    else:
        advance(old_schedule, 6)
    new = optimizer(2 * BASE)
    schedule = build(new, 20)
    asked = schedules.collect_settings(new, schedule)
    schedule.load_state_dict(old_schedule.state_dict())
    new.load_state_dict(old.state_dict())
    schedules.apply_changes(new, schedule, asked, {"learning_rate": (BASE, 2 * BASE)})
    if name == "polynomial":  # its end is a rate of its own, not a share of the base rate
        assert new.param_groups[0]["lr"] == pytest.approx((2 * BASE - 1e-4) * (14 / 20) ** 2 + 1e-4)
        return
    assert rates(schedule) == pytest.approx([2 * rate for rate in rates(old_schedule)])


def test_other_settings_of_the_optimizer_apply() -> None:
    old = optimizer(weight_decay=0.1)
    new = optimizer(weight_decay=0.3, betas=(0.8, 0.99), eps=1e-6)
    made = [builder("linear", WARMUPS["none"])(one, 20) for one in (old, new)]
    asked = schedules.collect_settings(new, made[1])
    new.load_state_dict(old.state_dict())
    made[1].load_state_dict(made[0].state_dict())
    schedules.apply_changes(new, made[1], asked, {"weight_decay": (0.1, 0.3), "adam_beta1": (0.9, 0.8)})
    group = new.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.8, 0.99), 1e-8)


def test_a_plateau_keeps_what_it_counted_and_takes_its_new_settings() -> None:
    old = optimizer()
    new = optimizer()
    before = make_schedule("reduce_lr_on_plateau", old, num_warmup_steps=0, num_training_steps=9)
    before.step(1.0), before.step(2.0)
    now = make_schedule(
        "reduce_lr_on_plateau", new, num_warmup_steps=0, num_training_steps=9, options={"patience": 1, "factor": 0.5}
    )
    asked = schedules.collect_settings(new, now)
    now.load_state_dict(before.state_dict())
    schedules.apply_changes(new, now, asked, {"lr_scheduler_kwargs": (None, {"patience": 1, "factor": 0.5})})
    assert (now.num_bad_epochs, now.best, now.patience, now.factor) == (1, 1.0, 1, 0.5)
    assert isinstance(before, torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert not isinstance(before, LambdaLR)
