"""Messages of a run: lines of logs, levels and names, what is said once, and advice that fits what was found."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwright import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from trainwright._types import counted
from trainwright.callbacks.progress import format_line
from trainwright.errors import ArgumentError, LegacyNameWarning
from trainwright.run import console
from trainwright.state.progress import CALLBACKS, LOGGING
from trainwright.state.trainer_state import TrainerState
from trainwright.support.log_handler import PackageHandler, each_warning_once, for_log

from .._support.small import make_trainer
from ..parity import data

SPOKEN = {"log_level": "warning"}


class Slow(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class Flat(torch.nn.Module):
    """Does not learn: the first evaluation is the best."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.weight * 0.0 + 1.0, "logits": x}


def test_a_run_says_each_thing_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With the bar turned off too: the plan, `name=value` lines, the end by early stopping, the best model."""
    made = make_trainer(
        tmp_path,
        model=Flat(),
        num_train_epochs=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=2,
        load_best_model_at_end=True,
        eval_dataset=data.vectors(4),
        callbacks=[EarlyStoppingCallback(2), Slow()],
        **SPOKEN,
    )
    assert made.args.disable_tqdm
    made.train()
    out = capsys.readouterr().out
    assert re.search(r"^step=2/28 loss=1 grad_norm=0 learning_rate=\S+ epoch=\S+$", out, flags=re.MULTILINE)
    assert out.count("batch     ") == out.count("best      the weights of") == 1
    assert "checkpoint-7 are loaded (loss 1)" in out
    said = [record.getMessage() for record in caplog.records if "Early stopping at step 21" in record.getMessage()]
    assert len(said) == 1
    assert "eval_loss has not improved for 2 evaluations; the best was 1." in said[0]
    assert "x 1 process =" in out
    phases = {phase for listeners in made.callback_handler._table.values() for _, phase in listeners}
    assert phases == {LOGGING, f"{CALLBACKS}.Slow"}


def test_a_log_line_is_read_by_people_and_tools() -> None:
    state = TrainerState(global_step=10, max_steps=75)
    assert format_line(state, {"loss": "0.457", "note": "two words"}) == 'step=10/75 loss=0.457 note="two words"'
    assert format_line(TrainerState(), {"eval_loss": "0.5"}) == "eval_loss=0.5"
    assert [counted(*one) for one in ((1, "step"), (2, "process"), (1.5, "epoch"), (3, "batch"), (0, "entry"))] == [
        "1 step",
        "2 processes",
        "1.5 epochs",
        "3 batches",
        "0 entries",
    ]


def test_within_run_a_warning_is_shown_once_and_by_the_first_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(PackageHandler, "said", [])  # a run that another test left may be alive
    logger = logging.getLogger("trainwright.x")

    def shown(*messages: str, level: int = logging.WARNING) -> list[str]:
        for message in messages:
            logger.log(level, message)
        return capsys.readouterr().err.splitlines()

    assert len(shown("a", "a")) == 2, "outside of a run each call is shown"
    with each_warning_once():
        assert shown("a", "b", "a") == ["WARNING trainwright: a", "WARNING trainwright: b"]
        assert len(shown("a", "a", level=logging.ERROR)) == 2
    with each_warning_once():
        assert len(shown("a")) == 1, "the next run shows it again"
    monkeypatch.setenv("RANK", "1")
    assert shown("c") == []
    assert len(shown("c", level=logging.ERROR)) == 1
    monkeypatch.setattr(logging.getLogger("trainwright"), "level", logging.INFO)
    logger.manager._clear_cache()
    assert len(shown("c")) == 1, "log_level_replica='info'"


def test_message_has_level_and_name_and_no_number_of_a_system_error() -> None:
    handler = PackageHandler()

    def shown(level: int) -> str:
        return handler.format(logging.LogRecord("trainwright.run", level, __file__, 1, "text", None, None))

    assert [shown(level) for level in (logging.INFO, logging.WARNING, logging.ERROR)] == [
        "text",
        "WARNING trainwright: text",
        "ERROR trainwright: text",
    ]
    with pytest.raises(FileNotFoundError) as caught:
        Path("/nowhere/file").read_text()
    assert for_log(f"It cannot be read: {caught.value}.") == (
        "It cannot be read: No such file or directory: '/nowhere/file'."
    )


def test_only_the_first_process_gives_advice(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.rules, "cautions", lambda args, facts: ["advice"])
    monkeypatch.setattr(console.rules, "check_run", lambda args, facts: None)
    for should_log in (True, False):
        console.check_run(SimpleNamespace(should_log=should_log), None)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == ["advice"]


def test_an_older_name_is_warned_about_at_the_line_that_uses_it(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = TrainingArguments(str(tmp_path), evaluation_strategy="no", use_cpu=True)
        args.evaluation_strategy = "no"
        Trainer(torch.nn.Linear(1, 1), args, tokenizer=data.tokenizer())
    older = [one for one in caught if issubclass(one.category, LegacyNameWarning)]
    assert len(older) == 3
    assert {one.filename for one in older} == {__file__}


def test_yaml_is_named_only_where_it_read_text(tmp_path: Path) -> None:
    for value, is_yaml in (("5e-5", True), ("fast", False)):
        with pytest.raises(ArgumentError) as caught:
            TrainingArguments(str(tmp_path), use_cpu=True, adam_epsilon=value)
        assert ("YAML" in str(caught.value)) is is_yaml


@pytest.mark.parametrize(("longer", "is_said"), [(4, True), (2, False)])
def test_a_longer_run_at_a_rate_near_zero_is_warned_about(
    longer: int, is_said: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"save_strategy": "epoch", "lr_scheduler_type": "cosine", **SPOKEN}
    make_trainer(tmp_path, num_train_epochs=2, **given).train()
    trainer = make_trainer(tmp_path, num_train_epochs=longer, **given)
    trainer.train(resume_from_checkpoint=True)
    said = [record.getMessage() for record in caplog.records if "had nearly ended" in record.getMessage()]
    assert len(said) == int(is_said)
    assert not is_said or "pass another warmup_steps, such as warmup_steps=1." in said[0]
    if is_said:  # and what is offered has an effect
        caplog.clear()
        anew = make_trainer(tmp_path, num_train_epochs=longer, warmup_steps=1, **given)
        anew.train(resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
        first = [
            next(entry["learning_rate"] for entry in one.state.log_history if entry["step"] == 16)
            for one in (trainer, anew)
        ]
        assert "had nearly ended" not in caplog.text
        assert first[1] > 10 * first[0]


class OfALibrary(TrainingArguments):
    """Sets a field by itself, as sentence-transformers' arguments do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ddp_broadcast_buffers = False


def of_a_library(folder: Path, **settings: Any) -> TrainingArguments:
    """Arguments with defaults of another library's, assigned after the constructor, as SetFit's trainer does."""
    args = OfALibrary(str(folder), use_cpu=True, report_to="none", save_strategy="no", **SPOKEN, **settings)
    args.per_device_train_batch_size = 2
    args.num_train_epochs = 1
    args.max_steps = 3
    args.logging_steps = 50
    return args


def test_nothing_is_said_of_what_a_library_has_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_trainer(tmp_path)
    trainer = Trainer(model=made.model, args=of_a_library(tmp_path), train_dataset=data.vectors(8))
    trainer.train()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("how", ["constructor", "setter"])
def test_of_what_the_user_set_it_is_said(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_trainer(tmp_path)
    asked = {"ddp_broadcast_buffers": False, "logging_steps": 20}
    args = of_a_library(tmp_path, **(asked if how == "constructor" else {}))
    if how == "setter":
        args.set_logging(steps=20, report_to="none", level="warning")
    args.logging_steps = 20
    Trainer(model=made.model, args=args, train_dataset=data.vectors(8)).train()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "logging_steps=20 is not reached" in said
    assert ("ddp_broadcast_buffers has no effect" in said) == (how == "constructor")


def test_the_plan_shows_the_batch_size_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_trainer(tmp_path)

    class OwnLoader(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)

    for cls, size in ((Trainer, 8), (OwnLoader, 2)):  # the trainer's own loader is that of the constructor
        args = OfALibrary(str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", max_steps=1, **SPOKEN)
        trainer = cls(model=made.model, args=args, train_dataset=data.vectors(8))
        trainer.args.per_device_train_batch_size = 2
        trainer.train()
        assert (
            f"batch     {size} per device x 1 accumulated x 1 process = {size} samples a step"
            in capsys.readouterr().out
        )
