"""A signal between two epochs: opening the data draws numbers and starts workers, and takes longer than a step."""

from __future__ import annotations

import multiprocessing.process
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer, TrainerCallback, TrainingArguments

from .._support.small import differing, weights

ROWS = 12
STEPS_OF_EPOCH = 3
MAX_STEPS = 9


class Model(torch.nn.Module):
    """Draws in each step, so that random states from another place give other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.body(x).squeeze(-1), labels)}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(float(i % 3))} for i in range(ROWS)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class Send(TrainerCallback):
    """Sends the signal in an event of the second epoch."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._send)

    def _send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS_OF_EPOCH:
            signal.raise_signal(signal.SIGTERM)


def make(folder: Path, data: Any, callbacks: list[TrainerCallback], **settings: Any) -> Trainer:
    torch.manual_seed(0)
    settings = {"per_device_train_batch_size": 4, **settings}
    args = TrainingArguments(
        folder,
        max_steps=MAX_STEPS,
        learning_rate=0.1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=7,
        **settings,
    )
    return Trainer(Model(), args, train_dataset=data, callbacks=callbacks)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Sends the signal after a call of a method, counted from 1."""
    original = getattr(owner, name)
    calls: list[int] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return result

    patch.setattr(owner, name, call)


def in_event(event: str) -> Callable[[pytest.MonkeyPatch], list[TrainerCallback]]:
    return lambda patch: [Send(event)]


def once_a_worker_runs(number: int) -> Callable[[pytest.MonkeyPatch], list[TrainerCallback]]:
    def prepare(patch: pytest.MonkeyPatch) -> list[TrainerCallback]:
        after(patch, multiprocessing.process.BaseProcess, "start", number)
        return []

    return prepare


def once_the_data_is_open(patch: pytest.MonkeyPatch) -> list[TrainerCallback]:
    after(patch, DataLoader, "__iter__", 2)
    return []


WITH_WORKERS = {"dataloader_num_workers": 2}
CASES: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], list[TrainerCallback]]]] = {
    "epoch ends": ({}, in_event("on_epoch_end")),
    "epoch begins": ({}, in_event("on_epoch_begin")),
    "epoch ends, workers": (WITH_WORKERS, in_event("on_epoch_end")),
    "epoch begins, workers": (WITH_WORKERS, in_event("on_epoch_begin")),
    "open": ({}, once_the_data_is_open),
    "open, workers": (WITH_WORKERS, once_the_data_is_open),
    "open, persistent workers": (
        {**WITH_WORKERS, "dataloader_persistent_workers": True},
        once_the_data_is_open,
    ),
    "first worker runs": (WITH_WORKERS, once_a_worker_runs(3)),
    "second worker runs": (WITH_WORKERS, once_a_worker_runs(4)),
    "worker runs, seeded samples": ({**WITH_WORKERS, "seed_samples": True}, once_a_worker_runs(3)),
    "worker runs, two batches a step": (
        {**WITH_WORKERS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        once_a_worker_runs(3),
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("is_stream", [False, True], ids=["rows", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_a_signal_between_epochs_loses_no_random_number(
    case: str, is_stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, prepare = CASES[case]
    data = Stream() if is_stream else rows()
    if is_stream and "seed_samples" in settings:
        pytest.skip("samples of a stream have no numbers to seed by")
    whole = make(tmp_path / "whole", data, [], **settings)
    whole.train()
    with monkeypatch.context() as patch:
        first = make(tmp_path / "parts", data, prepare(patch), **settings)
        with pytest.raises(SystemExit):
            first.train()
    assert first.state.global_step == STEPS_OF_EPOCH
    second = make(tmp_path / "parts", data, [], **settings)
    second.train(resume_from_checkpoint=True)
    assert not differing(weights(second.model), weights(whole.model))


class Exclude(TrainerCallback):
    """Excludes a sample after the first step, so that the rest of the epoch is opened again."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and self.trainer is not None:
            self.trainer.quarantine([5])


@pytest.mark.process
@pytest.mark.parametrize("number", [3, 4])
def test_a_signal_while_the_rest_of_an_epoch_is_opened_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(folder: Path, *others: TrainerCallback) -> Trainer:
        exclude = Exclude()
        exclude.trainer = make(folder, rows(), [exclude, *others], **WITH_WORKERS)
        return exclude.trainer

    whole = made(tmp_path / "whole")
    whole.train()
    with monkeypatch.context() as patch:
        first = made(tmp_path / "parts", *once_a_worker_runs(number)(patch))
        with pytest.raises(SystemExit):
            first.train()
    assert first.state.global_step == 1
    second = made(tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert not differing(weights(second.model), weights(whole.model))
