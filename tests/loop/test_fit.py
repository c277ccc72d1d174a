"""Epochs and windows: how many there are, what a callback can end, and what an ended window leaves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright import Trainer, TrainerCallback, get_last_checkpoint
from trainwright.errors import DataError

from .._support.small import OURS, REFERENCE, Diary, data, differing, make_trainer, weights


class Windows(Trainer):
    """Keeps the number of micro-batches of each step, and the share of the epoch that was logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes: list[int] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.sizes.append(self.current_gradient_accumulation_steps)
        return super().training_step(*args, **kwargs)


@settings(max_examples=25)
@given(
    num_samples=st.integers(1, 20), batch=st.integers(1, 5), accumulation=st.integers(1, 6), epochs=st.integers(1, 2)
)
def test_every_sample_once_an_epoch_in_windows_of_the_right_size(
    num_samples: int, batch: int, accumulation: int, epochs: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    diary = Diary(data.vectors(num_samples))
    trainer = make_trainer(
        tmp_path_factory.getbasetemp() / "windows",
        cls=Windows,
        train_dataset=diary,
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    batches = math.ceil(num_samples / batch)
    full, rest = divmod(batches, accumulation)
    assert trainer.sizes == ([accumulation] * (full * accumulation) + [rest] * rest) * epochs
    assert trainer.state.global_step == (full + (rest > 0)) * epochs == trainer.state.max_steps
    assert trainer.state.epoch == epochs
    for epoch in range(epochs):
        assert sorted(diary.reads[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_a_stream_that_ends_is_begun_again_until_all_steps_are_done(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, cls=Windows, train_dataset=data.Stream(data.vectors(10)), max_steps=5, gradient_accumulation_steps=2
    )
    trainer.train()
    assert trainer.sizes == [2, 2, 1] * 2 + [2, 2]
    assert trainer.state.global_step == 5


class Once(data.Stream):
    def __iter__(self) -> Any:
        items = self._items
        self._items = []
        return iter(items)


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_stream_that_ends_before_max_steps_is_error_with_last_step_saved(strategy: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=Once(data.vectors(10)), max_steps=20, save_strategy=strategy)
    saved = "saved" if strategy == "steps" else "not saved"
    with pytest.raises(DataError, match=rf"no batch in epoch 1; training stops at step 3 of 20\. .* Step 3 is {saved}"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert get_last_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-3") if strategy == "steps" else None)
    if strategy == "steps":  # with the data there, it goes on
        again = make_trainer(tmp_path, train_dataset=data.Stream(data.vectors(10)), max_steps=5)
        assert again.train(resume_from_checkpoint="auto").global_step == 5


@pytest.mark.parametrize("length", [{"max_steps": 20}, {"num_train_epochs": 1, "lr_scheduler_type": "constant"}])
def test_an_empty_stream_is_an_error_before_step_1(length: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, train_dataset=data.Stream([]), save_strategy="steps", **length)
    with pytest.raises(DataError, match="train_dataset is empty"):
        trainer.train()
    assert get_last_checkpoint(tmp_path) is None


# -- a callback that has had enough ----------------------------------------------------------------------------------


class Ends(TrainerCallback):
    """Sets a flag the first time that an event comes at a step."""

    def __init__(self, event: str, step: int, flag: str, *, nth: int = 1) -> None:
        self.begun: list[int] = []

        def handler(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal nth
            if state.global_step == step:
                nth -= 1
                if nth == 0:
                    setattr(control, flag, True)

        setattr(self, event, handler)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append(state.global_step)


@pytest.mark.framework
@pytest.mark.parametrize("side", [OURS, REFERENCE], ids=lambda side: side.name)
@pytest.mark.parametrize(
    ("event", "flag", "steps", "begun"),
    [
        ("on_step_end", "should_epoch_stop", 3 + 7, [0, 3]),
        ("on_step_end", "should_training_stop", 3, [0]),
        ("on_epoch_end", "should_training_stop", 7, [0]),
    ],
)
def test_a_callback_ends_an_epoch_or_the_run(
    event: str, flag: str, steps: int, begun: list[int], side: Any, tmp_path: Path
) -> None:
    ends = Ends(event, 7 if event == "on_epoch_end" else 3, flag)
    trainer = make_trainer(tmp_path, side, callbacks=[ends])
    trainer.train()
    assert (trainer.state.global_step, ends.begun) == (steps, begun)


@pytest.mark.framework
@pytest.mark.parametrize("side", [OURS, REFERENCE], ids=lambda side: side.name)
@pytest.mark.parametrize("step", [0, 1])
def test_a_callback_ends_an_epoch_in_the_middle_of_a_window(step: int, side: Any, tmp_path: Path) -> None:
    """Seven micro-batches in threes: three steps in an epoch. Also in the very first window."""
    ends = Ends("on_substep_end", step, "should_epoch_stop", nth=2)
    trainer = make_trainer(tmp_path, side, callbacks=[ends], gradient_accumulation_steps=3, num_train_epochs=3)
    trainer.train()
    assert ends.begun == [0, step, step + 3]
    assert trainer.state.global_step == step + 3 + 3


@pytest.mark.parametrize("step", [0, 1])
def test_a_callback_ends_the_run_in_the_middle_of_a_window(step: int, tmp_path: Path) -> None:
    ends = Ends("on_substep_end", step, "should_training_stop")
    trainer = make_trainer(tmp_path, callbacks=[ends], gradient_accumulation_steps=3)
    trainer.train()
    assert (trainer.state.global_step, ends.begun) == (step, [0])


def test_a_window_that_was_given_up_leaves_no_gradient_and_no_loss(tmp_path: Path) -> None:
    """What follows is trained as if the window had never begun."""
    parts: dict[str, Any] = {
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 3,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "learning_rate": 0.1,
    }
    seen: list[tuple[bool, float]] = []

    class Looks(Ends):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append((all(p.grad is None for p in kwargs["model"].parameters()), self.trainer._tr_loss.item()))

    looks = Looks("on_substep_end", 1, "should_epoch_stop", nth=2)
    looks.trainer = trainer = make_trainer(tmp_path, callbacks=[looks], logging_steps=1, **parts)
    trainer.train()
    assert [is_clean for is_clean, _ in seen] == [True] * len(seen)
    assert [loss for _, loss in seen] == [0.0] * len(seen)


# -- the order of things ---------------------------------------------------------------------------------------------


def test_fractions_of_an_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=3)
    trainer.train()
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == pytest.approx([3 / 7, 6 / 7, 1.0, 10 / 7, 13 / 7, 2.0])


def test_training_twice_goes_on_from_the_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    first = weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 14
    assert differing(weights(trainer.model), first).keys() == first.keys()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_get_batch_samples_decides_what_is_trained(steps: int, tmp_path: Path) -> None:
    """An override that has had enough ends the epoch."""

    class Enough(Windows):
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
            return ([], None) if self.state.global_step >= steps else (batches, num_items)

    trainer = make_trainer(tmp_path, cls=Enough, num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == steps
