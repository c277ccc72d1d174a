"""A ceiling on the Python calls of a step, and of a batch of an evaluation: counted, not timed, so it holds anywhere.

A tiny MLP on a list dataset, in the steady state. Beside it a loop written by hand, with a DataLoader, AdamW, clipping
and LambdaLR, is counted for the record, and printed: `pytest -s`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainwright

from . import doubles

WARM_UP, COUNTED = 10, 50
CEILING_PER_STEP = 300  # with a dataset class and a collator of the user's own too
CEILING_PER_LOG = 150  # of a console line, a journal entry and the events; 150 us are promised
CEILING_PER_MICRO_BATCH = 150  # by hand 74
CEILING_PER_EVALUATION_BATCH = 130


class Counter:
    """Calls of Python functions, and of C functions for the record, while it is on."""

    def __init__(self) -> None:
        self.python = self.c = 0

    def start(self) -> None:
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.python += 1
        elif event == "c_call":
            self.c += 1

    def per_step(self) -> str:
        return f"{self.python / COUNTED:.0f} Python calls a step ({self.c / COUNTED:.0f} of C functions)"


class CountsSteps(trainwright.TrainerCallback):
    def __init__(self) -> None:
        self.counter = Counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM_UP:
            self.counter.start()
        elif state.global_step == WARM_UP + COUNTED:
            self.counter.stop()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(doubles.FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class OwnData(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def own_collator(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in ("x", "labels")}


def by_trainwright(
    output_dir: Path, accumulation: int, *, logging_steps: int = 10, wrap: Callable[[Any], Any] = list, **more: Any
) -> Counter:
    counts = CountsSteps()
    trainer = doubles.trainer(
        output_dir,
        settings={
            "max_steps": WARM_UP + COUNTED + 2,
            "logging_steps": logging_steps,
            "gradient_accumulation_steps": accumulation,
            "per_device_train_batch_size": 8,
        },
        model=doubles.model(Mlp),
        train_dataset=wrap(doubles.samples(8 * accumulation * (WARM_UP + COUNTED + 4))),
        callbacks=[counts],
        **more,
    )
    trainer.train()
    return counts.counter


def by_hand(accumulation: int) -> Counter:
    from transformers import default_data_collator

    model, counter = doubles.model(Mlp), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 1000)
    data = doubles.samples(8 * accumulation * (WARM_UP + COUNTED + 2))
    total, step = torch.zeros(()), 0
    for i, batch in enumerate(DataLoader(data, batch_size=8, shuffle=True, collate_fn=default_data_collator)):
        loss = model(**batch)["loss"] / accumulation
        loss.backward()
        total += loss.detach()
        if (i + 1) % accumulation:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            print(total.item() / 10)
            total.zero_()
        if step == WARM_UP:
            counter.start()
        elif step == WARM_UP + COUNTED:
            counter.stop()
    return counter


@pytest.fixture(autouse=True)
def _no_profile_left() -> Any:
    yield
    sys.setprofile(None)


def test_a_step_stays_under_the_ceiling(tmp_path: Path) -> None:
    ours, hand = by_trainwright(tmp_path, 1), by_hand(1)
    print(f"\naccumulation 1: trainwright {ours.per_step()}, by hand {hand.per_step()}")
    assert 100 < ours.python / COUNTED <= CEILING_PER_STEP
    own = by_trainwright(tmp_path, 1, wrap=OwnData, data_collator=own_collator)
    print(f"with a dataset class and a collator of one's own: trainwright {own.per_step()}")
    assert 100 < own.python / COUNTED <= CEILING_PER_STEP


def test_a_log_stays_under_the_ceiling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # as it is in a script; a package that another test used may have lowered it
    often, seldom = (
        by_trainwright(tmp_path, 1, logging_steps=1),
        by_trainwright(tmp_path, 1, logging_steps=WARM_UP + COUNTED + 2),
    )
    per_log = (often.python - seldom.python) / COUNTED
    print(f"\na log: {per_log:.0f} Python calls")
    assert 20 < per_log <= CEILING_PER_LOG


def test_a_further_micro_batch_stays_under_the_ceiling(tmp_path: Path) -> None:
    one, four = by_trainwright(tmp_path, 1), by_trainwright(tmp_path, 4)
    hand = by_hand(4)
    print(f"\naccumulation 4: trainwright {four.per_step()}, by hand {hand.per_step()}")
    assert (four.python - one.python) / COUNTED / 3 <= CEILING_PER_MICRO_BATCH


def test_a_batch_of_an_evaluation_stays_under_the_ceiling(tmp_path: Path) -> None:
    trainer = doubles.trainer(tmp_path, settings={"per_device_eval_batch_size": 8}, model=doubles.model(Mlp))
    data = {number: doubles.samples(8 * number) for number in (2, 2 + COUNTED)}
    calls = {}
    for number, samples in data.items():
        trainer.evaluate(samples)
        counter = Counter()
        counter.start()
        trainer.evaluate(samples)
        counter.stop()
        calls[number] = counter.python
    per_batch = (calls[2 + COUNTED] - calls[2]) / COUNTED
    print(f"\nevaluation: {per_batch:.0f} Python calls a batch")
    assert 30 < per_batch <= CEILING_PER_EVALUATION_BATCH


def test_the_counter_counts() -> None:
    counter = Counter()

    def called() -> None: ...

    calls: list[Callable[[], None]] = [called] * 7
    counter.start()
    for call in calls:
        call()
    counter.stop()
    assert counter.python == 7 + 1  # stop() itself is the last
