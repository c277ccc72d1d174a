"""Where the time goes: every phase gets what was spent in it, and all of them add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback, TrainingArguments
from trainwright.journal import record
from trainwright.run.console import time_breakdown
from trainwright.state.progress import Clock

from .._support.small import data, make_trainer, train

NAP_S = 1.0


class Time:
    """Time that passes in naps alone, so that a busy machine changes no phase."""

    now = 0.0

    @classmethod
    def nap(cls) -> None:
        cls.now += NAP_S


def slow(method: str) -> type[Trainer]:
    """A trainer that sleeps in one of its hooks."""

    def sleeps(self: Any, *args: Any, **kwargs: Any) -> Any:
        Time.nap()
        return getattr(super(Slow, self), method)(*args, **kwargs)

    Slow = type("Slow", (Trainer,), {method: sleeps})
    return Slow


class Napping(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Time.nap()


def collate(items: list[Any]) -> Any:
    Time.nap()
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0]}


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Time.nap()
        return grad


class Backward(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return SlowBackward.apply(super().compute_loss(*args, **kwargs))


PHASES: dict[str, dict[str, Any]] = {
    "data": {"data_collator": collate},
    "host_to_device": {"cls": slow("_prepare_inputs")},
    "forward": {"cls": slow("compute_loss")},
    "backward": {"cls": Backward},
    "optimizer": {"cls": slow("_clip_grad_norm")},
    "callbacks.Napping": {"callbacks": [Napping()]},
    "logging": {"cls": slow("log")},
    "evaluation": {
        "cls": slow("_evaluate"),
        "eval_dataset": data.vectors(4),
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    "saving": {"cls": slow("_save_checkpoint"), "save_strategy": "steps", "save_steps": 1},
}


@pytest.mark.parametrize("phase", PHASES)
def test_sleep_is_attributed_to_phase_and_all_phases_sum_to_wall_time(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.state.progress.perf_counter", lambda: Time.now)
    settings: dict[str, Any] = {
        "save_strategy": "no",
        "journal": True,
        "max_steps": 6,
        "logging_steps": 1,
        **PHASES[phase],
    }
    trainer = make_trainer(tmp_path, **settings)
    began = Time.now
    train(trainer)
    wall = Time.now - began
    times = record.read(tmp_path).of("time")[-1]["time_by_phase"]
    assert times[phase] >= 6 * NAP_S
    assert all(seconds < times[phase] for name, seconds in times.items() if name not in (phase, "other", "saving"))
    assert sum(times.values()) <= wall


def test_nested_phases_go_back_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr("trainwright.state.progress.perf_counter", lambda: next(now))
    clock = Clock()
    clock.mark("evaluation")
    before = clock.mark("callbacks.Bar")
    clock.mark(before)
    assert clock.read() == {"other": 1.0, "evaluation": 2.0 + 4.0, "callbacks.Bar": 3.0}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"data": 30.0, "forward": 70.0}, "data: more dataloader_num_workers, or cheaper samples"),
        ({"callbacks.Mine": 20.0, "forward": 80.0}, "Mine: do less in each event of it"),
        ({"saving": 50.0, "forward": 50.0}, "saving: save less often: save_steps"),
    ],
)
def test_line_at_the_end_says_where_it_went_and_what_to_change(seconds: dict[str, float], said: str) -> None:
    text = "\n".join(time_breakdown(TrainingArguments(eval_strategy="epoch"), seconds))
    assert text.startswith("time      100.0 s: ")
    assert said in text


def test_the_line_has_no_advice_where_there_is_nothing_to_change() -> None:
    assert time_breakdown(TrainingArguments(), {"forward": 60.0, "backward": 38.0, "data": 2.0}) == [
        "time      100.0 s: forward 60%, backward 38%, data 2%"
    ]


def test_a_short_run_and_a_strategy_that_is_off_get_no_advice() -> None:
    half = {"saving": 25.0, "forward": 25.0}
    assert time_breakdown(TrainingArguments(), half) == ["time      50.0 s: saving 50%, forward 50%"]
    long = {"saving": 50.0, "evaluation": 50.0}
    assert len(time_breakdown(TrainingArguments(save_strategy="no", eval_strategy="no"), long)) == 1
    assert len(time_breakdown(TrainingArguments(save_strategy="steps", eval_strategy="no"), long)) == 2


def test_a_training_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(make_trainer(tmp_path, max_steps=2, save_strategy="no", disable_tqdm=False, log_level="warning"))
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("time      ")]


def _calls(run: Callable[[], Any]) -> int:
    import sys

    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_mark_is_one_call() -> None:
    clock = Clock()
    assert _calls(lambda: clock.mark("data")) == 2  # the lambda, and mark
