"""A resume with another batch size or accumulation: every sample of every epoch once, and steps that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.errors import CheckpointError

from .._support.small import Diary, StopAt, data, make_trainer

pytestmark = pytest.mark.costly

SIZE = 26


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append((state.global_step, round(state.epoch, 6)))


def interrupted(folder: Path, step: int, **settings: Any) -> list[int]:
    """What was trained until the run was stopped; the batch that lay ready was read, but not trained."""
    diary = Diary(data.vectors(SIZE))
    trainer = make_trainer(folder, train_dataset=diary, callbacks=[StopAt(step)], **settings)
    trainer.train()
    batches = step * settings.get("gradient_accumulation_steps", 1)
    per_epoch = -(-SIZE // 4)
    assert batches <= per_epoch * 2
    epoch, rest = divmod(batches, per_epoch)
    return diary.reads[: epoch * SIZE + rest * 4]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What an uninterrupted run reads."""
    through = Diary(data.vectors(SIZE))
    make_trainer(tmp_path_factory.mktemp("through"), train_dataset=through).train()
    return through.reads


@pytest.mark.parametrize("step", [2, 5, 7, 9])
@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 3},
        {"gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "dataloader_num_workers": 0},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_every_sample_of_every_epoch_once(
    settings: dict[str, Any], step: int, order: list[int], tmp_path: Path
) -> None:
    trained = interrupted(tmp_path, step)
    rest = Diary(data.vectors(SIZE))
    rates = Rates()
    second = make_trainer(tmp_path, train_dataset=rest, callbacks=[rates], **settings)
    second.train(resume_from_checkpoint=True)
    assert trained + rest.reads == order, "the order of the epoch is that of the seed, whatever the batches"
    numbers = [number for number, _ in rates.steps]
    assert numbers == [*range(step + 1, second.state.max_steps + 1)]
    assert rates.steps[-1] == (second.state.max_steps, 2.0)


def test_the_worked_example(tmp_path: Path) -> None:
    """400 samples, 2 epochs, batches of 4 until step 50, of 8 after it."""
    settings = {"num_train_epochs": 2, "logging_steps": 500, "optim": "sgd"}
    make_trainer(tmp_path, train_dataset=data.vectors(400), callbacks=[StopAt(50)], **settings).train()
    rates = Rates()
    settings["per_device_train_batch_size"] = 8
    second = make_trainer(tmp_path, train_dataset=data.vectors(400), callbacks=[rates, StopAt(60)], **settings)
    second.train(resume_from_checkpoint=True)
    assert rates.steps[0] == (51, 0.52)
    third = make_trainer(tmp_path, train_dataset=data.vectors(400), callbacks=[rates], **settings)
    third.train(resume_from_checkpoint=True)
    assert (75, 1.0) in rates.steps
    assert rates.steps[-1] == (125, 2.0)
    assert [number for number, _ in rates.steps] == [*range(51, 126)]
    assert third.state.max_steps == 125


def test_a_run_takes_the_given_number_of_steps(tmp_path: Path) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(5)], max_steps=16).train()
    diary = Diary(data.vectors(SIZE))
    second = make_trainer(tmp_path, train_dataset=diary, max_steps=16, per_device_train_batch_size=13)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 16
    # one batch is left of the first epoch, then ten steps of two an epoch
    assert second.state.epoch == 6.0
    assert len(diary.reads) == 6 + 10 * 13


def test_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)]).train()
    second = make_trainer(tmp_path, per_device_train_batch_size=7)
    with caplog.at_level("INFO", "trainwright.run"):
        second.train(resume_from_checkpoint=True)
    said = (
        "steps now have 7 samples instead of 4: the run continues with sample 13 of 26 in epoch 1, with 6 steps to go"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("size", "epoch", "skipped"), [(20, 1, 12), (30, 1, 12), (10, 2, 0)])
def test_data_that_shrank_or_grew(
    size: int, epoch: int, skipped: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)]).train()
    diary = Diary(data.vectors(size))
    make_trainer(tmp_path, train_dataset=diary, log_level="warning").train(resume_from_checkpoint=True)
    assert "had 26 samples when the checkpoint was written, 12 of them trained in epoch 1" in caplog.text
    assert f"but now has {size}." in caplog.text
    assert f"epoch {epoch}; " in caplog.text
    assert ("none of its samples" if skipped == 0 else f"the first {skipped} of {size} samples") in caplog.text
    assert len(diary.reads) == (3 - epoch) * size - skipped
    again = Diary(data.vectors(size))
    make_trainer(tmp_path / "again", callbacks=[StopAt(3)]).train()
    other = make_trainer(tmp_path / "again", train_dataset=again, ignore_data_skip=True)
    other.train(resume_from_checkpoint=True)
    assert sorted(again.reads[:size]) == [*range(size)]


def test_a_dataloader_of_the_users_own_is_counted_in_batches(tmp_path: Path) -> None:
    from .test_resume_exact import OwnLoader

    make_trainer(tmp_path, cls=OwnLoader, callbacks=[StopAt(3)]).train()
    other = make_trainer(tmp_path, cls=OwnLoader, gradient_accumulation_steps=2)
    with pytest.raises(CheckpointError, match="steps of 4 samples, but this run has 4 x 2 accumulated"):
        other.train(resume_from_checkpoint=True)
