"""The journal: what is in it, what counts of it, and that it costs and endangers nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainwright import TrainerCallback
from trainwright.journal import record
from trainwright.journal.record import FileJournal, read

from .._support.small import StopAt, data, make_trainer, train


def of_run(*entries: dict[str, Any]) -> record.Record:
    return record.make_run_record([{"run": "a", **entry} for entry in entries])


def log(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "log", "step": step, "values": {"loss": loss}}


def test_a_resume_supersedes_what_the_dead_run_logged_after_its_step() -> None:
    resumed = of_run(
        {"kind": "start", "step": 0}, log(2, 2.0), log(4, 4.0), log(6, 6.0), {"kind": "resume", "step": 4}, log(6, 60.0)
    )
    assert resumed.values == {"loss": {2: 2.0, 4: 4.0, 6: 60.0}}
    stopped_early = of_run({"kind": "start", "step": 0}, log(2, 2.0), log(4, 4.0), {"kind": "resume", "step": 2})
    assert stopped_early.series("loss") == ([2], [2.0])


def test_there_is_one_value_for_name_and_step_and_later_one_wins() -> None:
    twice = of_run(log(2, 1.0), log(2, 3.0), {"kind": "evaluation", "step": 2, "values": {"eval_loss": 5.0}})
    assert twice.logs() == [(2, {"loss": 3.0, "eval_loss": 5.0})]


def test_half_line_of_a_killed_process_is_left_out_and_spoils_nothing(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path, "a")
    journal.write("start", step=0)
    with open(journal.path, "a") as file:
        file.write('{"kind": "log", "run": "a", "st')
    journal.write("log", step=1, values={"loss": float("nan")})
    assert [entry["kind"] for entry in read(tmp_path).entries] == ["start", "log"]
    assert read(tmp_path).values["loss"] == {1: "nan"}  # strict JSON has no NaN


def test_the_last_run_of_a_directory_is_read_unless_another_is_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        FileJournal(tmp_path, name).write("start", step=0)
    assert read(tmp_path).run_id == "second"
    assert read(tmp_path, "first").run_id == "first"
    with pytest.raises(ValueError, match="has no run third"):
        read(tmp_path, "third")


def test_a_training_writes_what_it_is_and_what_happens(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path / "run",
        max_steps=4,
        num_train_epochs=1,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=data.vectors(4),
        hub_token="hf_secret",
    )
    frozen = next(trainer.model.parameters()).requires_grad_(False)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    num_trained = num_parameters - frozen.numel()
    train(trainer)
    text = (tmp_path / "run" / record.JOURNAL_NAME).read_text()
    assert "hf_secret" not in text
    journal = read(tmp_path / "run")
    kinds = [entry["kind"] for entry in journal.entries]
    assert kinds[0] == "start"
    assert kinds[-2:] == ["end", "time"]
    assert [entry["step"] for entry in journal.of("save")] == [2, 4]
    start = journal.of("start")[0]
    assert start["data"]["train"]["samples"] == 26
    assert start["environment"]["packages"]["torch"]
    assert start["model"] == {"class": "ReturnsDict", "parameters": num_parameters, "trained_parameters": num_trained}
    assert 1e6 < journal.of("save")[0]["peak_memory_bytes"] <= journal.of("time")[0]["peak_memory_bytes"]
    assert start["changed"]["learning_rate"] == 1e-2
    assert start["arguments"]["hub_token"] == "<HUB_TOKEN>"
    history = {}
    for entry in trainer.state.log_history:
        history.setdefault(entry["step"], {}).update({k: v for k, v in entry.items() if k != "step"})
    assert journal.logs() == sorted(history.items())


def test_resumed_run_continues_the_journal_with_the_values_of_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {"max_steps": 9, "save_strategy": "steps", "save_steps": 4}
    train(make_trainer(tmp_path / "whole", **settings))

    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 7:
                raise RuntimeError("the end of step 7")

    with pytest.raises(RuntimeError, match="step 7"):
        train(make_trainer(tmp_path / "cut", callbacks=[Fails()], **settings))
    failed = read(tmp_path / "cut").of("failed")[0]
    assert failed["error"] == "RuntimeError"
    assert "the end of step 7" in failed["traceback"]
    train(make_trainer(tmp_path / "cut", **settings), resume_from_checkpoint=True)
    whole = read(tmp_path / "whole")
    cut = read(tmp_path / "cut")
    assert cut.of("resume")[0]["step"] == 4
    assert cut.series("loss") == whole.series("loss")
    assert len((tmp_path / "cut" / record.JOURNAL_NAME).read_text().splitlines()) > len(cut.entries)


def test_what_package_warns_of_in_run_is_written_down_with_its_step(tmp_path: Path) -> None:
    import logging

    class Warns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                logging.getLogger("trainwright.somewhere").warning("%s is %s", "the sky", "falling")
                logging.getLogger("trainwright.somewhere").info("not this")
                logging.getLogger("another").warning("nor that")

    train(
        make_trainer(
            tmp_path / "run",
            max_steps=3,
            save_strategy="no",
            save_total_limit=1,
            journal=True,
            callbacks=[Warns()],
            log_level="info",
        )
    )
    logging.getLogger("trainwright.somewhere").warning("after the run")
    before, warning = read(tmp_path / "run").of("warning")
    assert (before["step"], before["text"][:16]) == (0, "save_total_limit"), "said before the journal begins"
    assert (warning["step"], warning["text"]) == (2, "the sky is falling")
    assert warning["source"] == "trainwright.somewhere"


def test_the_journal_is_not_touched_between_two_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(record.OpenFile, "append", lambda file, line: written.append(json.loads(line)["kind"]))
    train(make_trainer(tmp_path, max_steps=6, logging_steps=3, save_strategy="no", journal=True))
    assert written == ["start", "log", "log", "log", "end", "time"]


def test_a_journal_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.makedirs(tmp_path / "run" / record.JOURNAL_NAME)  # a directory lies where the file would
    trainer = make_trainer(tmp_path / "run", callbacks=[StopAt(3)], log_level="warning", journal=True)
    train(trainer)
    assert trainer.state.global_step == 3
    assert caplog.text.count("cannot be written") == 1


def test_another_process_than_the_first_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, save_strategy="no", journal=True)
    monkeypatch.setattr(type(trainer), "is_world_process_zero", lambda self: False)
    train(trainer)
    assert not (tmp_path / record.JOURNAL_NAME).exists()


class FailsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("as planned")


def test_run_that_fails_before_first_log_or_save_leaves_nothing_in_directory(tmp_path: Path) -> None:
    """Scripts that look for an empty directory begin again there."""
    fails = FailsAt(2)
    trainer = make_trainer(tmp_path / "run", callbacks=[fails], logging_steps=3, save_strategy="steps")
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.train()
    assert list((tmp_path / "run").iterdir()) == []
    fails.step = 4
    with pytest.raises(RuntimeError, match="as planned"):
        trainer.train()
    assert [entry["kind"] for entry in read(tmp_path / "run").entries] == ["start", "log", "failed", "time"]
    with pytest.raises(RuntimeError, match="as planned"):
        make_trainer(tmp_path / "run", callbacks=[FailsAt(1)], logging_steps=3, save_strategy="steps").train()
    assert [entry["kind"] for entry in read(tmp_path / "run").entries] == ["start", "failed", "time"], "it was there"


def test_a_run_that_neither_saves_nor_tracks_leaves_nothing_in_its_directory(tmp_path: Path) -> None:
    make_trainer(tmp_path / "run", max_steps=2, save_strategy="no", report_to="none").train()
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_a_journal_does_not_follow_a_link(target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = tmp_path / "theirs"
    if target == "a file":
        theirs.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / record.JOURNAL_NAME).symlink_to(theirs)
    make_trainer(tmp_path / "run", max_steps=2, log_level="warning", save_strategy="steps").train()
    assert caplog.text.count("it is a symbolic link, which is not followed; delete it") == 1
    assert not theirs.exists() if target == "nothing" else theirs.read_text() == "precious"


def test_a_journal_that_becomes_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    journal = record.FileJournal(tmp_path, "run")
    journal.write("log", step=1, values={})
    (tmp_path / record.JOURNAL_NAME).rename(tmp_path / "moved")
    (tmp_path / record.JOURNAL_NAME).symlink_to(tmp_path / "moved")
    journal.write("log", step=2, values={})
    assert len((tmp_path / "moved").read_text().splitlines()) == 1
    journal.close()


def test_a_pipe_in_place_of_the_journal_does_not_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / record.JOURNAL_NAME)
    make_trainer(tmp_path, max_steps=2, log_level="warning", save_strategy="steps").train()
    assert "it is not a regular file; delete it" in caplog.text


@pytest.mark.parametrize("name", ["training_args.json", "training_args.bin"])
def test_files_of_arguments_take_the_place_of_a_link(name: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(theirs)
    make_trainer(tmp_path / "run").save_model()
    assert theirs.read_text() == "precious"
    assert not (tmp_path / "run" / name).is_symlink()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "model.safetensors",
        "training_args.bin",
        "training_args.json",
    ]
