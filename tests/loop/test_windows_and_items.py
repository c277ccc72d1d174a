"""`prepare_window`, `step_contexts` and `checkpoint_items`: a generation buffer whose run may end anywhere."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright import Trainer, TrainerCallback
from trainwright.capability_table import FILES
from trainwright.checkpoint.manifest import find_problem
from trainwright.errors import ArgumentError, CheckpointError

from .._support import forked
from .._support.small import differing, make_trainer, sign_again, weights


class Buffer:
    """Batches that the model made, each with how often it was used."""

    def __init__(self) -> None:
        self.made: list[dict[str, torch.Tensor]] = []
        self.uses = 0

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "uses": self.uses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]
        self.uses = state["uses"]


class Generates(Trainer):
    """Every three windows the model makes new inputs, with noise, of the batches that were read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.buffer = self.checkpoint_items["buffer"] = Buffer()
        self.num_windows = 0

    def prepare_window(self, batches: list[Any]) -> list[Any]:
        if self.buffer.uses % 3 == 0:
            with torch.no_grad():
                logits = [self.model(**batch)["logits"].mean() for batch in batches]  # draws for dropout
            self.buffer.made = [
                {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) * logit}
                for batch, logit in zip(batches, logits, strict=True)
            ]
        self.buffer.uses += 1
        return self.buffer.made


class Killed(BaseException):
    """Not an error that a run hears of."""


def raises_within_the_fifth_step(state: Any) -> None:
    if state.global_step == 4:
        raise Killed


class Calls(TrainerCallback):
    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state)


SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), cls=Generates, **SETTINGS)
    trainer.train()
    return trainer


def resumed(folder: Path, **settings: Any) -> Any:
    trainer = make_trainer(folder, cls=Generates, **SETTINGS, **settings)
    trainer.train(resume_from_checkpoint=True)
    return trainer


def assert_same(one: Any, other: Any) -> None:
    assert not differing(weights(one.model), weights(other.model))
    assert one.buffer.uses == other.buffer.uses == 8
    assert torch.equal(one.buffer.made[0]["x"], other.buffer.made[0]["x"])


@pytest.mark.parametrize("in_background", [False, True])
def test_a_generation_buffer_killed_within_a_step_resumes_bit_for_bit(
    in_background: bool, whole: Any, tmp_path: Path
) -> None:
    ends = make_trainer(
        tmp_path, cls=Generates, callbacks=[Calls(raises_within_the_fifth_step)], save_async=in_background, **SETTINGS
    )
    with pytest.raises(Killed):
        ends.train()
    assert ends.buffer.uses == 5
    assert torch.load(tmp_path / "checkpoint-4" / FILES["checkpoint_items"])["buffer"]["uses"] == 4
    assert_same(resumed(tmp_path), whole)


KILLED = """
import os
import signal
import sys
from tests._support.small import make_trainer
from tests.loop.test_windows_and_items import SETTINGS, Generates


class Dies(Generates):
    num_losses = 0

    def compute_loss(self, *args, **kwargs):
        self.num_losses += (self.state.global_step, self.buffer.uses) == (2, 3)
        if self.num_losses == 2:  # micro-batches of step 3, on what the model made in step 1
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(*args, **kwargs)


make_trainer(sys.argv[1], cls=Dies, save_async=False, **SETTINGS).train()
"""


@pytest.mark.process
def test_generation_buffer_whose_process_is_killed_within_window_resumes_bit_for_bit(
    whole: Any, tmp_path: Path
) -> None:
    done = forked.run(["-c", KILLED, str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2"}
    assert_same(resumed(tmp_path), whole)


def test_a_signal_during_generation_ends_the_run_after_its_step(whole: Any, tmp_path: Path) -> None:
    class Interrupted(Generates):
        def prepare_window(self, batches: list[Any]) -> list[Any]:
            if self.state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().prepare_window(batches)

    with pytest.raises(SystemExit):
        make_trainer(tmp_path, cls=Interrupted, **SETTINGS).train()
    assert (tmp_path / "checkpoint-3").is_dir()
    assert_same(resumed(tmp_path), whole)


def test_an_error_saves_the_items_of_the_step_before(whole: Any, tmp_path: Path) -> None:
    def fails(state: Any) -> None:
        if state.global_step == 5:
            raise LookupError

    with pytest.raises(LookupError):
        make_trainer(tmp_path, cls=Generates, callbacks=[Calls(fails)], save_on_exception=True, **SETTINGS).train()
    assert (tmp_path / "checkpoint-5").is_dir()
    assert_same(resumed(tmp_path), whole)


def test_other_numbers_of_micro_batches_keep_the_position_in_the_data(tmp_path: Path) -> None:
    class Doubles(Trainer):
        def prepare_window(self, batches: list[Any]) -> list[Any]:
            return [*batches, *batches]

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
            counted.append(len(batch_samples))
            return super()._get_num_items_in_batch(batch_samples, device)

    counted: list[int] = []
    trainer = make_trainer(tmp_path, cls=Doubles, num_train_epochs=1, gradient_accumulation_steps=2)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.epoch) == (4, 1.0)
    assert counted == [2, 4, 2, 4, 2, 4, 1, 2]


def test_checks_before_a_run_prepare_no_window(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, cls=Generates, max_steps=2)
    trainer.check(memory=True)
    assert trainer.buffer.uses == 0


def test_a_window_without_batches_is_an_error(tmp_path: Path) -> None:
    class Empty(Trainer):
        def prepare_window(self, batches: list[Any]) -> list[Any]:
            return []

    with pytest.raises(ValueError, match="prepare_window returned no micro-batch"):
        make_trainer(tmp_path, cls=Empty).train()


@pytest.mark.parametrize("is_driven", [False, True])
def test_step_contexts_are_around_forward_and_backward_of_each_micro_batch(is_driven: bool, tmp_path: Path) -> None:
    class Inside(Trainer):
        def step_contexts(self) -> Any:
            return [note("outer"), note("inner")]

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("forward")
            loss = super().compute_loss(*args, **kwargs)
            loss.register_hook(lambda gradient: seen.append("backward"))
            return loss

    @contextmanager
    def note(name: str) -> Iterator[None]:
        seen.append(f"+{name}")
        yield
        seen.append(f"-{name}")

    seen: list[str] = []
    trainer = make_trainer(tmp_path, cls=Inside, max_steps=1, gradient_accumulation_steps=2)
    if is_driven:
        for step in trainer.steps():
            for batch in step.batches:
                step.backward(trainer.compute_loss(step.model, batch))
            step.update()
    else:
        trainer.train()
    assert seen == ["+outer", "+inner", "forward", "backward", "-inner", "-outer"] * 2


# -- items -------------------------------------------------------------------------------------------------------------


def saved(folder: Path, **items: Any) -> Any:
    trainer = make_trainer(folder, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.checkpoint_items |= items
    trainer.train()
    return trainer


def again(folder: Path, **items: Any) -> Any:
    trainer = make_trainer(folder, max_steps=2)
    trainer.checkpoint_items |= items
    return trainer


def test_an_item_that_is_missing_or_altered_in_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def said(trainer: Any, step: int) -> str:
        caplog.clear()
        caplog.set_level(logging.WARNING, logger="trainwright")  # a new trainer sets its own
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        return caplog.text

    teacher = torch.nn.Linear(2, 2)
    other = torch.nn.Linear(2, 2)
    saved(tmp_path, teacher=teacher)
    assert "no state for the checkpoint items more" in said(again(tmp_path, teacher=other, more=Buffer()), 2)
    assert torch.equal(other.weight, teacher.weight)
    assert "items that this trainer does not have; they are ignored: teacher" in said(again(tmp_path), 2)
    with pytest.raises(CheckpointError, match=r"item 'teacher' .* does not fit"):
        said(again(tmp_path, teacher=torch.nn.Linear(3, 2)), 2)

    file = tmp_path / "checkpoint-2" / FILES["checkpoint_items"]
    file.write_bytes(file.read_bytes()[:-10] + bytes(10))
    with pytest.raises(CheckpointError, match=FILES["checkpoint_items"]):
        said(again(tmp_path, teacher=other), 2)
    file.unlink()
    assert FILES["checkpoint_items"] in (find_problem(file.parent) or "")
    firsts: list[int] = []
    trainer = again(tmp_path, teacher=other)
    trainer.add_callback(Calls(lambda state: firsts.append(state.global_step)))
    trainer.train(resume_from_checkpoint=True)
    assert firsts == [1]  # from the step before, which verifies

    (tmp_path / "checkpoint-1" / FILES["checkpoint_items"]).unlink()  # as a run without items wrote it
    sign_again(tmp_path / "checkpoint-1")
    assert "no state for the checkpoint items teacher" in said(again(tmp_path, teacher=other), 1)


class Holds:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"][0]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (object(), "needs state_dict() and load_state_dict"),
        (Holds(torch.zeros(1).numpy()), "checkpoint_items['mine'].state_dict()['value'][0] is a ndarray"),
        (Holds({1, 2}), "['value'][0] is a set"),
    ],
)
def test_item_that_no_checkpoint_can_have_is_refused_before_the_first_step(
    item: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError) as error:
        saved(tmp_path, mine=item)
    assert message in str(error.value)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("value", [1, 0.5, "text", None, True, torch.ones(2, dtype=torch.bfloat16), (1, 2), {3: "x"}])
def test_plain_values_come_back(value: Any, tmp_path: Path) -> None:
    saved(tmp_path, mine=Holds(value))
    item = Holds("other")
    again(tmp_path, mine=item).train(resume_from_checkpoint=True)
    assert torch.equal(item.value, value) if isinstance(value, torch.Tensor) else item.value == value
