"""The laws of live control: commands act after one step in all processes, are in the journal, and can be repeated."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.cli.control import give
from trainwright.config.commands import parse_command
from trainwright.errors import ArgumentError, TrainwrightError
from trainwright.journal.record import read
from trainwright.report.run_page import write_report
from trainwright.support.inbox import Inbox

from .._support.engines import needs
from .._support.two_processes import run as run_ranks
from ..cli.commands import call
from ..contract import doubles
from .average_runs import ON_CPU

STEPS = 8
AFTER = 3  # a command that is sent at the end of step 3 acts after step 4, once the run has taken it


class Sends(TrainerCallback):
    """Sends messages at the end of a step, and waits until they are taken; notes what each step has."""

    def __init__(self, folder: Path, *messages: Any, step: int = AFTER) -> None:
        self.inbox = Inbox(folder)
        self.messages = messages
        self.step = step
        self.numbers: list[str] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(float(kwargs["optimizer"].param_groups[0]["lr"]))
        if state.global_step != self.step:
            return
        self.numbers = [self.inbox.send(message) for message in self.messages]
        until(lambda: not list(self.inbox.folder.glob("new-*")))
        time.sleep(0.05)  # from the disk to the queue

    def answers(self) -> list[Any]:
        return [self.inbox.answer_to(number) for number in self.numbers]


def until(is_so: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def command(*words: Any) -> dict[str, Any]:
    return {"words": list(words), "by": "ann@desk"}


def run(folder: Path, *messages: Any, resume: Any = None, step: int = AFTER, **settings: Any) -> tuple[Any, Sends]:
    sends = Sends(folder, *messages, step=step)
    settings = {
        "live_control": True,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": STEPS,
        "incidents": False,
        "preflight": False,
        **settings,
    }
    trainer = doubles.trainer(
        folder, settings=settings, callbacks=[sends], eval_dataset=settings.pop("evaluated", None)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, sends


def test_each_command_acts_after_the_step_and_is_in_the_journal(tmp_path: Path) -> None:
    messages = [command(*words) for words in (["save"], ["evaluate"], ["log", 1], ["profile", 2])]
    trainer, sends = run(tmp_path, *messages, evaluated=doubles.samples(4), logging_steps=4)
    step = AFTER + 1
    assert sends.answers() == [{"step": step, "refused": None}] * 4
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}", f"checkpoint-{STEPS}"}
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [4, 5, 6, 7, 8]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [step]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [f"steps-{step + 1}-{step + 2}-rank0.json.gz"]
    entries = read(tmp_path).of("command")
    assert [(one["step"], one["name"], one["value"], one["by"], one["refused"]) for one in entries] == [
        (step, "save", None, "ann@desk", None),
        (step, "evaluate", None, "ann@desk", None),
        (step, "log", 1, "ann@desk", None),
        (step, "profile", 2, "ann@desk", None),
    ]
    assert "save by ann@desk" in write_report(tmp_path).read_text(encoding="utf-8")
    assert not Inbox(tmp_path).is_open


def test_stop_ends_the_run_in_order_with_a_checkpoint(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, command("stop"))
    assert trainer.state.global_step == AFTER + 1
    assert (tmp_path / f"checkpoint-{AFTER + 1}").is_dir()
    assert "train_loss" in trainer.state.log_history[-1]
    resumed, _ = run(tmp_path, resume=True)
    whole, _ = run(tmp_path / "whole")
    assert doubles.same(doubles.weights(resumed), doubles.weights(whole))


@pytest.mark.parametrize("schedule", ["linear", "constant", "cosine", "polynomial", "reduce_lr_on_plateau"])
def test_a_rate_holds_from_the_next_step_and_its_schedule_continues_in_proportion(
    schedule: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"lr_scheduler_type": schedule}
    if schedule == "reduce_lr_on_plateau":
        settings |= {"eval_strategy": "steps", "eval_steps": 100, "evaluated": doubles.samples(4)}
    plain, before = run(tmp_path / "plain", **settings)
    trainer, sends = run(tmp_path / "told", command("lr", 3e-4), **settings)
    assert sends.rates[:AFTER] == before.rates[:AFTER]
    factor = 3e-4 / before.rates[AFTER]
    assert sends.rates[AFTER] == 3e-4, "the rate of the step that follows"
    assert sends.rates[AFTER:] == pytest.approx([rate * factor for rate in before.rates[AFTER:]], rel=1e-6)
    assert not doubles.same(doubles.weights(plain), doubles.weights(trainer))


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_a_journal_repeats_its_commands_to_the_bit_and_so_does_a_resume(schedule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr_scheduler_type": schedule, "save_steps": 6}
    told, sends = run(tmp_path / "told", command("lr", 2e-3), **settings)
    again, repeated = run(tmp_path / "again", live_control=str(tmp_path / "told"), **settings | {"step": 0})
    resumed, _ = run(tmp_path / "told", resume=str(tmp_path / "told" / "checkpoint-6"), **settings | {"step": 0})
    assert sends.rates == repeated.rates
    for other in (again, resumed):
        assert doubles.same(doubles.weights(told), doubles.weights(other))
    assert [entry["by"] for entry in read(tmp_path / "again").of("command")] == ["a journal"]


def test_a_refused_command_says_why_and_changes_nothing(tmp_path: Path) -> None:
    plain, _ = run(tmp_path / "plain", logging_strategy="epoch")
    hostile: list[Any] = [
        {},
        {"words": ["lr", -1], "by": "x"},
        {"words": [[]], "by": "x"},
        {"words": "save", "by": "x"},
    ]
    messages = [command("evaluate"), command("log", 5), *hostile]
    trainer, sends = run(tmp_path / "told", *messages, logging_strategy="epoch")
    evaluate, log, *others = sends.answers()
    assert "no eval_dataset" in evaluate["refused"]
    assert "logging_strategy='epoch'" in log["refused"]
    assert all(other["step"] is None and other["refused"] for other in others)
    assert doubles.same(doubles.weights(plain), doubles.weights(trainer))
    assert [bool(entry["refused"]) for entry in read(tmp_path / "told").of("command")] == [True, True]


def test_files_that_are_not_messages_are_left_or_refused(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.open()
    (inbox.folder / "new-../../x.json").parent.mkdir(parents=True, exist_ok=True)
    (inbox.folder / "new-1.json").write_text("[" * 100_000)
    (inbox.folder / "new-2.json").write_text("x" * 10_000)
    (inbox.folder / "new-A.json").write_text("{}")
    os.mkfifo(inbox.folder / "new-3.json")
    assert inbox.take() == [("1", None), ("2", None), ("3", None)]
    assert inbox.take() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sav"], "'sav' is not a command. Did you mean save?"),
        (["save", "now"], "save takes no value"),
        (["lr"], "lr takes a learning rate above 0"),
        (["lr", "fast"], "lr fast: it takes a learning rate above 0"),
        (["lr", "0"], "lr 0: it takes"),
        (["lr", "nan"], "lr nan: it takes"),
        (["log", "2.5"], "log 2.5: it takes a number of steps"),
        (["profile", "1", "2"], "profile takes a number of steps"),
    ],
)
def test_a_wrong_command_is_refused_before_it_is_sent(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_command(words)
    assert message in str(caught.value)
    Inbox(tmp_path).open()
    assert call("ctl", str(tmp_path), *words).exit_code == 2
    assert Inbox(tmp_path).take() == []


def test_the_command_line_waits_for_the_answer(tmp_path: Path) -> None:
    answered: dict[str, Any] = {}

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                thread = threading.Thread(target=lambda: answered.update(given=give(tmp_path, ["save"], wait_s=20)))
                thread.start()
                answered["thread"] = thread
            if "given" not in answered and state.global_step < 900:
                time.sleep(0.01)
            elif "given" in answered:
                control.should_training_stop = True

    settings = {"live_control": True, "max_steps": 1000, "logging_steps": 1000, "save_strategy": "no"}
    doubles.trainer(tmp_path, settings=settings, callbacks=[Asks()]).train()
    answered["thread"].join()
    step, refused = answered["given"]
    assert refused is None
    assert (tmp_path / f"checkpoint-{step}").is_dir()


def test_a_command_to_no_run_is_refused_or_withdrawn(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="started without live_control=True"):
        give(tmp_path, ["save"], wait_s=0)
    Inbox(tmp_path).open()  # as a run leaves it that was killed
    with pytest.raises(TrainwrightError, match="withdrawn"):
        give(tmp_path, ["save"], wait_s=0.2)
    assert Inbox(tmp_path).take() == []


def test_an_invalid_journal_is_refused_before_step_1(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read as the journal of a run"):
        run(tmp_path, live_control=str(tmp_path / "nothing"))


def test_messages_to_an_earlier_run_are_not_carried_out(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    inbox.open()
    inbox.send(command("stop"))
    trainer, _ = run(tmp_path)
    assert trainer.state.global_step == STEPS


ZERO = [pytest.param(f"zero {stage}", marks=[pytest.mark.slow, needs("deepspeed")]) for stage in (1, 2, 3)]


@pytest.mark.process
@pytest.mark.timeout(200)
@pytest.mark.parametrize("backend", ["ddp", *ZERO])
def test_two_processes_carry_a_command_out_after_the_same_step(backend: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("control_of_two.py")
    done = run_ranks(script, str(tmp_path / "run"), backend, folder=tmp_path, timeout_s=150, environment=ON_CPU)
    first, second = done.told
    assert first["rates"] == second["rates"]
    assert first["weights"] == second["weights"]
    assert first["rates"][-1] == 3e-4
    (lr, save) = read(tmp_path / "run").of("command")
    assert lr["step"] == save["step"] == first["rates"].index(3e-4) + 1
    assert f"checkpoint-{save['step']}" in first["saved"]
    assert json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[0])["kind"] == "start"
