"""Data without a length and no `max_steps`: whole passes are trained, as many as `num_train_epochs` says.

The trainer knows the last step only when it comes; all that belongs to a last step happens at it all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer, errors
from trainwright.config.plans import OPEN_END, StepPlan
from trainwright.run.checks import check_ends_together

from .._support.small import (
    OURS,
    REFERENCE,
    AugmentedStream,
    Side,
    StopAt,
    data,
    differing,
    make_trainer,
    module,
    train,
    weights,
    without_clock,
)
from .._support.two_processes import run

Parts = dict[str, Any]
OPEN: dict[str, Any] = {"lr_scheduler_type": "constant", "num_train_epochs": 1}


def stream() -> Any:
    return data.Stream(data.vectors(26))  # batches of 4: seven


@pytest.mark.framework
@pytest.mark.parametrize(
    ("schedule", "accumulation", "steps", "side"),
    [
        *((name, 1, 7, REFERENCE) for name in ("constant", "constant_with_warmup", "inverse_sqrt")),
        ("constant_with_warmup", 3, 3, OURS),  # transformers weighs a short last window otherwise
    ],
)
def test_one_pass_is_a_run_that_is_told_its_steps(
    schedule: str, accumulation: int, steps: int, side: Side, tmp_path: Path
) -> None:
    settings = {"lr_scheduler_type": schedule, "warmup_steps": 2, "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(tmp_path / "open", train_dataset=stream(), **settings, num_train_epochs=1)
    one = train(trainer)
    other = train(make_trainer(tmp_path / "told", side, train_dataset=stream(), **settings, max_steps=steps))
    assert differing(one.weights, other.weights) == {}
    assert (one.global_step, one.losses()) == (steps, other.losses())
    assert (trainer.state.max_steps, trainer.state.epoch) == (steps, 1.0)


def test_a_schedule_of_the_users_own_needs_no_name(tmp_path: Path) -> None:
    model = module()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizers = (optimizer, LambdaLR(optimizer, lambda step: 0.9**step))
    trainer = make_trainer(tmp_path, model=model, optimizers=optimizers, train_dataset=stream(), num_train_epochs=1)
    assert trainer.train().global_step == 7


def test_the_last_step_is_evaluated_and_saved_as_any_last_step(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        train_dataset=stream(),
        eval_dataset=data.vectors(4),
        save_strategy="steps",
        save_steps=5,
        eval_strategy="steps",
        eval_steps=5,
        **OPEN,
    )
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [5, 7]
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-7"]
    record = json.loads((tmp_path / "checkpoint-7" / "trainer_state.json").read_text())
    assert (record["max_steps"], record["epoch"]) == (7, 1.0)


def test_what_is_done_every_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        train_dataset=stream(),
        eval_dataset=data.vectors(4),
        save_strategy="epoch",
        eval_strategy="epoch",
        logging_strategy="epoch",
        **OPEN | {"num_train_epochs": 3},
    )
    trainer.train()
    logged = [(e["step"], e["epoch"]) for e in trainer.state.log_history if "loss" in e]
    assert logged == [(7, 1.0), (14, 2.0), (21, 3.0)]
    assert [e["step"] for e in trainer.state.log_history if "eval_loss" in e] == [7, 14, 21]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


def hf_stream() -> Any:
    return data.hf_dataset(data.vectors(26)).with_format("torch").to_iterable_dataset(num_shards=2)


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


KINDS: dict[str, Callable[[], Parts]] = {
    "plain": lambda: {"train_dataset": stream()},
    "augmented": lambda: {"train_dataset": AugmentedStream(data.vectors(26))},
    "hf-stream": lambda: {"train_dataset": hf_stream()},
    "own-loader": lambda: {"train_dataset": stream(), "cls": OwnLoader},
}


@pytest.mark.parametrize(
    ("kind", "accumulation", "step"),
    [*((kind, 1, step) for kind in KINDS for step in (3, 7, 9, 14)), ("augmented", 3, 2), ("augmented", 3, 4)],
)
def test_a_resume_goes_on_within_the_pass(kind: str, accumulation: int, step: int, tmp_path: Path) -> None:
    settings = OPEN | {"num_train_epochs": 2, "gradient_accumulation_steps": accumulation}
    through = make_trainer(tmp_path / "through", **KINDS[kind](), **settings)
    through.train()
    first = make_trainer(tmp_path / "two", callbacks=[StopAt(step)], **KINDS[kind](), **settings)
    first.train()
    again = make_trainer(tmp_path / "two", **KINDS[kind](), **settings)
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(through.model)) == {}
    logs = [without_clock(t.state.log_history)[:-1] for t in (again, through)]
    assert [e for e in logs[0] if "train_loss" not in e] == logs[1]
    assert again.state.max_steps == through.state.max_steps == again.state.global_step


def test_a_resume_with_another_batch_size_trains_what_is_left_once(tmp_path: Path) -> None:
    make_trainer(tmp_path, callbacks=[StopAt(3)], train_dataset=stream(), **OPEN).train()
    trainer = make_trainer(tmp_path, train_dataset=stream(), per_device_train_batch_size=7, **OPEN)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 + 2  # 14 samples of 26 are left
    assert trainer.state.epoch == 1.0


def test_a_finished_run_can_be_made_longer_by_steps(tmp_path: Path) -> None:
    make_trainer(tmp_path, train_dataset=stream(), save_strategy="epoch", **OPEN).train()
    longer = make_trainer(tmp_path, train_dataset=stream(), **OPEN | {"max_steps": 10})
    longer.train(resume_from_checkpoint=True)
    rates = [entry["learning_rate"] for entry in longer.state.log_history if "learning_rate" in entry]
    assert (longer.state.global_step, set(rates)) == (10, {1e-2})


def test_lines_and_plan_name_no_total(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, train_dataset=stream(), disable_tqdm=False, log_level="info", **OPEN)
    trainer.train()
    shown = capsys.readouterr().out
    assert "until the data ends" in shown
    assert "step=6 " in shown
    assert "step=7/7 " in shown
    assert "9223372036854775807" not in shown


class Once(IterableDataset[dict[str, Any]]):
    """Can be read one time only."""

    def __init__(self) -> None:
        self.items = iter(data.vectors(8))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.items


def test_a_stream_that_is_used_up_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = OPEN | {"num_train_epochs": 2, "save_strategy": "steps"}
    trainer = make_trainer(tmp_path, train_dataset=Once(), log_level="warning", **settings)
    assert trainer.train().global_step == 2
    assert (tmp_path / "checkpoint-2").is_dir()
    assert "no batch in epoch 1" in caplog.text
    assert "smaller num_train_epochs" in caplog.text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "lr_scheduler_type='linear'"),
        ({**OPEN, "logging_steps": 0.1}, "logging_steps=0.1"),
        ({**OPEN, "num_train_epochs": 0.5}, "num_train_epochs=0.5"),
    ],
)
def test_what_needs_the_number_of_steps_is_refused(settings: Parts, named: str, tmp_path: Path) -> None:
    with pytest.raises(errors.DataError) as error:
        make_trainer(tmp_path, train_dataset=stream(), **settings)
    assert named in str(error.value)
    assert "max_steps" in str(error.value)


@pytest.mark.process
@pytest.mark.timeout(200)
def test_two_processes_end_together(tmp_path: Path) -> None:
    done = run(
        """
        import torch
        from tests._support.small import make_trainer, weights
        from tests._support.two_processes import tell
        from tests.resume.test_open_end import OPEN, stream

        trainer = make_trainer("two", train_dataset=stream(), **OPEN | {"num_train_epochs": 2})
        trainer.train()
        tell(steps=trainer.state.global_step, most=trainer.state.max_steps,
             weights=[float(p.sum()) for p in weights(trainer.model).values()])
        """,
        folder=tmp_path,
    )
    one, other = done.told
    assert one == other
    assert (one["steps"], one["most"]) == (8, 8)  # chunks of 8: three full ones and one of two samples


def test_processes_whose_own_loaders_may_end_apart() -> None:
    plan = StepPlan.from_values((1, OPEN_END, 0, 0, 8, OPEN_END, OPEN_END), micro_batches=1, max_grad_norm=1.0)
    with pytest.raises(errors.DataError, match="may not all end at the same step"):
        check_ends_together(plan, None, 2)
    check_ends_together(plan, None, 1)
    check_ends_together(plan, 8, 2)
