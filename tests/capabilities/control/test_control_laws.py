"""The laws of live control: commands act after one step in all processes, are in the journal, and can be repeated."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright import TrainerCallback
from trainwright.capabilities.control.command import parse_command
from trainwright.capabilities.control.extension import MOST_ORDERS, MOST_WAITING
from trainwright.capabilities.control.inbox import MOST_TAKEN, Inbox
from trainwright.capabilities.control.sender import give
from trainwright.errors import ArgumentError, TrainwrightError
from trainwright.journal.record import read
from trainwright.optim.schedules import set_rate
from trainwright.report.run_page import write_report
from trainwright.support.door import RelativeName

from ..._support.engines import needs
from ..._support.two_processes import run as run_ranks
from ...cli.commands import call
from ...contract import doubles
from ..averages.average_runs import ON_CPU
from .receipts import send_and_wait

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
        self.numbers = send_and_wait(self.inbox, *self.messages)

    def answers(self) -> list[Any]:
        return [self.inbox.answer_to(number) for number in self.numbers]


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
def test_rate_holds_from_the_next_step_and_its_schedule_continues_in_proportion(schedule: str, tmp_path: Path) -> None:
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
def test_journal_repeats_its_commands_to_the_bit_and_so_does_a_resume(schedule: str, tmp_path: Path) -> None:
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


def folders(inbox: Inbox, *names: str) -> list[Path]:
    """Makes directories of these names, with a file of the user's, and links of these names to such a directory."""
    made = []
    victim = inbox.folder.parent / "victim"
    victim.mkdir()
    (victim / "new-7.json").write_text("kept")
    for name in names:
        (inbox.folder / f"{name}.json").mkdir(parents=True)
        (inbox.folder / f"{name}.json" / "file").write_text("kept")
        made.append(inbox.folder / f"{name}.json" / "file")
        (inbox.folder / f"{name}-link.json").symlink_to(victim)
    return [*made, victim / "new-7.json"]


@pytest.mark.parametrize("kind", ["new", "taken", "answer"])
def test_directory_or_link_with_a_name_of_ours_stays_and_stops_nothing(kind: str, tmp_path: Path) -> None:
    """With each kind in place before the start, and the messages after it have the same numbers as the directories."""
    inbox = Inbox(tmp_path)
    kept = folders(inbox, f"{kind}-0", f"{kind}-x")
    _, sends = run(tmp_path, command("save"), command("lr", 2e-3))
    assert sends.answers() == [{"step": AFTER + 1, "refused": None}] * 2
    inbox.open()
    inbox._write(RelativeName(f"_control/new-{'1' if kind == 'new' else '0'}.json"), command("stop"))
    assert [number for number, _ in inbox.take()] == ([] if kind == "taken" else ["1" if kind == "new" else "0"])
    inbox.answer("0", {"step": 1})
    inbox.open()
    inbox.close()
    assert all(path.read_text() == "kept" for path in kept)


@pytest.mark.parametrize("what", ["a link", "a file", "a dangling link"])
def test_a_directory_of_messages_that_is_none_is_left_alone(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "new-1.json").write_text("kept")
    place = tmp_path / "run" / "_control"
    place.parent.mkdir()
    if what == "a file":
        place.write_text("kept")
    else:
        place.symlink_to(victim if what == "a link" else tmp_path / "nothing")
    trainer = doubles.trainer(place.parent, settings={"live_control": True, "max_steps": 2, "save_strategy": "no"})
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("so this run takes no commands") == 1
    assert [path.name for path in victim.iterdir()] == ["new-1.json"]
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(ArgumentError, match="No run in"):
        give(place.parent, ["save"], wait_s=0)


def test_many_commands_are_carried_out_a_few_after_each_step(tmp_path: Path) -> None:
    num = 3 * MOST_ORDERS + 1
    inbox = Inbox(tmp_path)
    trainer, sends = run(tmp_path, *[command("log", 1 + i) for i in range(num)], max_steps=STEPS, logging_steps=100)
    steps = [entry["step"] for entry in read(tmp_path).of("command")]
    assert len(steps) == num
    assert max(map(steps.count, steps)) == MOST_ORDERS
    assert [answer["step"] for answer in sends.answers()] == steps
    assert trainer.state.logging_steps == num
    run(tmp_path / "again", live_control=str(tmp_path), step=0, logging_steps=100)
    assert [entry["step"] for entry in read(tmp_path / "again").of("command")] == steps
    for _ in range(MOST_WAITING + 10):
        inbox.send(command("save"))
    assert len(inbox.take()) == MOST_TAKEN
    assert len(inbox.take(most=3)) == 3


def test_journal_with_very_many_commands_at_step_does_not_hold_run_up(tmp_path: Path) -> None:
    run(tmp_path / "told", command("log", 3), logging_steps=100)
    journal = tmp_path / "told" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "command")
    journal.write_text("".join([*lines[:number], *[lines[number]] * 50_000, *lines[number + 1 :]]))
    run(tmp_path / "again", live_control=str(tmp_path / "told"), step=0, logging_steps=100)
    steps = [entry["step"] for entry in read(tmp_path / "again").of("command")]
    assert max(map(steps.count, steps)) == MOST_ORDERS


@pytest.mark.parametrize("ends", [RuntimeError("lost"), SystemExit(3), KeyboardInterrupt(), OverflowError("big")])
def test_what_ends_the_thread_is_said_once_and_it_goes_on(
    ends: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Inbox.take
    calls: list[int] = []

    def take(self: Inbox, most: int) -> Any:
        calls.append(most)
        if len(calls) <= 2:
            raise ends
        return plain(self, most)

    monkeypatch.setattr(Inbox, "take", take)
    monkeypatch.setattr("trainwright.capabilities.control.extension.LOOKS_EVERY_S", 0.01)
    _, sends = run(tmp_path, command("save"))
    assert [answer["refused"] for answer in sends.answers()] == [None]
    assert caplog.text.count("Commands to this run may be lost") == 1
    assert type(ends).__name__ in caplog.text


NUMBERS = [10**309, -(10**400), 10**30, 1e400, float("nan"), "9" * 400, "1e999", True, None, [1], {"a": 1}]


@pytest.mark.parametrize("name", ["lr", "log", "profile"])
def test_number_of_any_form_is_refused_and_next_command_is_carried_out(name: str, tmp_path: Path) -> None:
    """Also those that Python cannot turn into a float, or reads only in part."""
    messages = [command(name, value) for value in NUMBERS]
    _, sends = run(tmp_path, *messages, command("save"))
    *refused, saved = sends.answers()
    assert all(answer["step"] is None and answer["refused"] for answer in refused)
    assert saved["refused"] is None


@given(st.lists(st.floats(0, allow_infinity=True) | st.sampled_from([5e-324, 1e-320, 1e308]), min_size=1, max_size=6))
@pytest.mark.parametrize("tensor", [None, torch.float32, torch.float64])
def test_rates_stay_finite_and_above_0_after_any_commands(tensor: Any, rates: list[float]) -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [
        {"params": [parameter], "lr": rate if tensor is None else torch.tensor(rate, dtype=tensor)}
        for parameter, rate in zip(parameters, (1e-3, 1e-12), strict=True)
    ]
    optimizer = torch.optim.SGD(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for rate in rates:
        before = [float(group["lr"]) for group in optimizer.param_groups]
        try:
            set_rate(optimizer, schedule, parse_command(["lr", rate]).value or 0)
        except ArgumentError:
            assert [float(group["lr"]) for group in optimizer.param_groups] == before
        now = [float(group["lr"]) for group in optimizer.param_groups]
        assert all(math.isfinite(value) and value > 0 for value in [*now, *map(float, schedule.base_lrs)])
        assert now[1] / now[0] == pytest.approx(1e-9, rel=1e-4)


def test_rate_below_the_smallest_whole_number_is_never_the_start_of_another() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1e-320)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ArgumentError, match="out of range"):
        set_rate(optimizer, schedule, 1e-3)
    assert optimizer.param_groups[0]["lr"] == 1e-320


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sav"], "'sav' is not a command. Did you mean save?"),
        (["save", "now"], "save takes no value"),
        (["lr"], "lr takes a learning rate above 0"),
        (["lr", "fast"], "lr fast: it takes a learning rate above 0"),
        (["lr", "0"], "lr 0: it takes"),
        (["lr", "nan"], "lr nan: it takes"),
        (["lr", "1e-320"], "lr 1e-320: it takes"),
        (["lr", "1e-31"], "lr 1e-31: it takes"),
        (["lr", "1e7"], "lr 1e7: it takes"),
        (["lr", "1" + "0" * 310], "it takes a learning rate"),
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
