"""Two runs in one output_dir: the second is refused or waits, whatever runs where; what was killed blocks nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainwright import Trainer, TrainerCallback, get_last_checkpoint
from trainwright.capabilities.lease import lease
from trainwright.errors import ArgumentError

from .._support import forked, two_processes
from .._support.small import StopAt, data, make_trainer

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}

SCRIPT = """
import os, sys, time
from tests._support.small import make_trainer
from trainwright import TrainerCallback

folder, wait_s = sys.argv[1], float(sys.argv[2])

class Holds(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            print("HOLDS", flush=True)
            while not os.path.exists(folder + "/go"):
                time.sleep(0.01)

trainer = make_trainer(folder, save_strategy="steps", save_steps=2, max_steps=4, callbacks=[Holds()],
                       log_level="warning", output_dir_wait_s=wait_s)
trainer.train(resume_from_checkpoint="auto")
print("DONE", trainer.state.global_step)
"""


class At(TrainerCallback):
    """Calls a function when a step is done."""

    def __init__(self, step: int, act: Any) -> None:
        self.step = step
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


def leases(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".lease")]


def run_that_holds(folder: Path) -> forked.Process:
    """A run that stands still after step 3 until there is a file `go`."""
    process = forked.start(["-c", SCRIPT, str(folder), "0"], merge_output=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.strip() == "HOLDS":
            return process
    pytest.fail(f"it never held the directory: {lines}")


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_second_process_is_refused_and_one_after_a_signal_is_not(number: signal.Signals, tmp_path: Path) -> None:
    process = run_that_holds(tmp_path)
    try:
        for resume in (None, "auto"):
            trainer = make_trainer(tmp_path, **SAVES)
            with pytest.raises(
                ArgumentError, match=rf"in use by process {process.pid} on .*, since .*output_dir_wait_s"
            ):
                trainer.train(resume_from_checkpoint=resume)
            assert trainer.state.global_step == 0
        written = str(tmp_path / "checkpoint-2")  # in the background
        for _ in range(600):
            if get_last_checkpoint(tmp_path) == written:
                break
            time.sleep(0.1)
        assert get_last_checkpoint(tmp_path) == written
    finally:
        process.send_signal(number)
        (tmp_path / "go").touch()
        process.communicate(60)
    assert leases(tmp_path) == ([".lease-1.json"] if number == signal.SIGKILL else [])
    trainer = make_trainer(tmp_path, **SAVES)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 4
    assert leases(tmp_path) == []


@pytest.mark.process
def test_a_second_process_waits_where_it_is_told_to(tmp_path: Path) -> None:
    first = run_that_holds(tmp_path)
    second = forked.start(["-c", SCRIPT, str(tmp_path), "60"], merge_output=True)
    assert second.stdout is not None
    waiting = second.stdout.readline()
    assert "Waiting for output_dir" in waiting
    assert f"process {first.pid} on" in waiting
    first.kill()
    first.communicate(60)
    (tmp_path / "go").touch()
    assert "DONE 4" in second.communicate(60)[0]


@pytest.mark.process
def test_the_ranks_of_one_run_share_a_lease_and_are_refused_together(tmp_path: Path) -> None:
    script = """
    import os
    from pathlib import Path
    from tests._support.small import make_trainer
    from tests._support.two_processes import tell
    from trainwright import TrainerCallback
    from trainwright.capabilities.lease.lease import Lease
    from trainwright.errors import ArgumentError

    class Lists(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            tell(held=[path.name for path in Path("run").glob(".lease*")])

    make_trainer("run", save_strategy="steps", save_steps=2, max_steps=2, callbacks=[Lists()]).train()
    tell(after=[path.name for path in Path("run").glob(".lease*")])
    other = Lease("run")
    if os.environ["RANK"] == "0":
        assert other.attempt() is None
    try:
        make_trainer("run", save_strategy="steps", save_steps=2, max_steps=2).train(resume_from_checkpoint="auto")
    except ArgumentError as error:
        tell(refused=str(error))
    """
    done = two_processes.run(script, folder=tmp_path)
    assert [told["held"] for told in done.told] == [[".lease-1.json"]] * 2
    assert done.told[0]["after"] == []  # the other one may look before the first has released it
    assert all("is in use by process" in told["refused"] for told in done.told)


def test_a_trainer_in_another_thread_is_refused_and_both_go_on(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def train_beside() -> None:
        try:
            make_trainer(tmp_path, **SAVES).train()
        except ArgumentError as error:
            raised.append(error)

    def start() -> None:
        thread = threading.Thread(target=train_beside)
        thread.start()
        thread.join()

    trainer = make_trainer(tmp_path, callbacks=[At(3, start)], **SAVES)
    trainer.train()
    assert trainer.state.global_step == 4
    assert f"process {os.getpid()}" in str(raised[0])
    assert ", this process" in str(raised[0])
    train_beside()
    assert len(raised) == 1


def test_a_trainer_trains_twice_and_another_after_it_and_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        raise LookupError

    trainer = make_trainer(tmp_path, **SAVES)
    trainer.train()
    trainer.train()
    with pytest.raises(LookupError):
        make_trainer(tmp_path, callbacks=[At(3, fail)], **SAVES).train()
    assert leases(tmp_path) == []
    make_trainer(tmp_path, **SAVES).train(resume_from_checkpoint="auto")
    assert leases(tmp_path) == []


def test_what_saves_nothing_needs_no_lease(tmp_path: Path) -> None:
    held: list[list[str]] = []

    def beside() -> None:
        other = make_trainer(
            tmp_path, save_strategy="no", max_steps=1, eval_dataset=make_trainer(tmp_path).train_dataset
        )
        other.train()
        other.evaluate()
        other.predict(other.eval_dataset)
        held.append(leases(tmp_path))

    make_trainer(tmp_path, callbacks=[At(3, beside)], **SAVES).train()
    assert held == [[".lease-1.json"]]


def test_a_directory_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is read-only: nobody is a user whom the system refuses while tests run as root."""
    write = Path.write_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name.startswith(".lease"):
            raise OSError(30, "Read-only file system")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", refuse)
    trainer = make_trainer(tmp_path, callbacks=[StopAt(1)], log_level="warning", **SAVES)
    trainer.train()
    assert trainer.state.global_step == 1
    assert "Read-only file system" in caplog.text


def test_a_save_ends_a_run_whose_directory_another_one_took_over(tmp_path: Path) -> None:
    def take_over() -> None:
        (tmp_path / ".lease-1.json").unlink()
        (tmp_path / ".lease-2.json").write_text("{}")

    with pytest.raises(Exception, match="belongs to"):
        make_trainer(tmp_path, callbacks=[At(1, take_over)], **SAVES).train()
    assert get_last_checkpoint(tmp_path) is None


def test_the_lease_is_touched_in_long_steps_evaluations_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lasts until another machine, for which the file is nearly stale, sees a sign of life."""
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    monkeypatch.setattr(lease.Holder, "is_alive", lambda holder: None)  # as another machine sees it
    long: list[str] = []

    def lasts(phase: str) -> None:
        (path,) = tmp_path.glob(".lease-*.json")
        os.utime(path, (time.time() - lease.STALE_S + 10,) * 2)
        elsewhere = lease.Lease(tmp_path)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            obstacle = elsewhere.attempt()
            assert obstacle is not None, f"it was taken over in {phase}"
            if obstacle.is_alive:
                return long.append(phase)
            time.sleep(0.02)
        pytest.fail(f"no sign of life in {phase}")

    class Slow(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            lasts("step")
            return super().training_step(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            lasts("evaluation")
            return super().prediction_step(*args, **kwargs)

        def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
            lasts("save")
            super()._save_optimizer_and_scheduler(*args, **kwargs)

    make_trainer(
        tmp_path,
        cls=Slow,
        max_steps=1,
        eval_dataset=data.vectors(4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
    ).train()
    assert sorted(set(long)) == ["evaluation", "save", "step"]
