"""A partner that hangs is left or ended after a limit, and what was waited for is not lost.

Each test fails by its own limit of time, which is far above that of the wait.
"""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from trainwright.capabilities.async_evaluation.evaluators import EvaluationProcess
from trainwright.capabilities.async_evaluation.requests import EvaluationRequest, Requests
from trainwright.capabilities.mirror import remote
from trainwright.capabilities.mirror.remote import RemoteStore
from trainwright.capabilities.mirror.sources import find_newest
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.cli import mcp_server
from trainwright.distributed import watchdog
from trainwright.errors import CheckpointError, ProcessFailedError
from trainwright.hub import uploader
from trainwright.hub.outbox import Ticket
from trainwright.journal import record
from trainwright.preflight import prove
from trainwright.state import memory_tracker
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.support.deadline import HangsError, call_within, run_command

pytestmark = [pytest.mark.timeout(120)]


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """Yields an event for which a partner waits until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def program(folder: Path, name: str, *lines: str) -> Path:
    """Writes a program for the shell."""
    path = folder / name
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- calls and commands ------------------------------------------------------------------------------------------------


def test_a_call_returns_raises_or_hangs(forever: threading.Event) -> None:
    def fail() -> None:
        raise SystemExit(3)

    assert call_within(60, lambda: 3, what="it") == 3
    with pytest.raises(SystemExit):
        call_within(60, fail, what="it")
    with pytest.raises(HangsError, match=r"it has not answered for 0\.1 s"):
        call_within(0.1, forever.wait, what="it")


def test_what_a_call_that_fails_had_is_freed_at_once() -> None:
    """A file that is half written must not be flushed later, by a garbage collection on any thread."""
    freed = threading.Event()

    def fail() -> None:
        held = threading.local()  # anything that can be referred to weakly
        weakref.finalize(held, freed.set)
        raise ValueError

    gc.disable()
    try:
        with suppress(ValueError):
            call_within(60, fail, what="it")
        until(freed.is_set)
    finally:
        gc.enable()


@pytest.mark.process
@pytest.mark.parametrize("last", ["sleep 1000", "echo done"], ids=["hangs", "leaves a child with its output"])
def test_a_command_is_ended_with_its_children(last: str, tmp_path: Path) -> None:
    command = program(tmp_path, "command", "sleep 1000 &", f"echo $! > {tmp_path}/pid", last)
    if last == "echo done":
        assert run_command([str(command)], seconds=60).stdout == "done\n"
    else:
        with pytest.raises(Exception, match="timed out"):
            run_command([str(command)], seconds=1)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: is_gone(pid))


@pytest.mark.process
def test_a_git_that_leaves_a_child_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "git", "sleep 1000 &", "echo abc")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert record.commit.__wrapped__(str(tmp_path)) == "abc, with changes"


@pytest.mark.process
def test_a_command_of_an_agent_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = program(tmp_path, "python", "sleep 1000")
    monkeypatch.setattr(mcp_server, "sys", SimpleNamespace(executable=str(hanging)))
    output = asyncio.run(mcp_server.run_command(["runs"], tmp_path, environment={}, limit_s=0.5))
    assert output.exit_code is None
    assert "it took longer than 0.5 s" in output.messages


@pytest.mark.process
def test_a_process_of_a_proof_that_never_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = program(tmp_path, "python", "exec sleep 1000")
    monkeypatch.setattr(prove, "sys", SimpleNamespace(executable=str(hanging), path=[]))
    with pytest.raises(ProcessFailedError):
        prove.get_gradients({"settings": b"x" * 1_000_000}, num_processes=2, timeout_s=1.0)


# -- stores ------------------------------------------------------------------------------------------------------------


class HangingClient:
    """A client of a store that answers nothing any more."""

    protocol = "s3"

    def __init__(self, forever: threading.Event) -> None:
        self._forever = forever

    def invalidate_cache(self, path: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: self._forever.wait()


@pytest.fixture
def store(forever: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteStore]:
    found = RemoteStore("memory://hangs/run")
    monkeypatch.setattr(found, "_fs", HangingClient(forever))
    monkeypatch.setattr(remote, "CALL_LIMIT_S", 0.1)
    with found.shared():
        yield found


STORE_CALLS: dict[str, Callable[[RemoteStore, Path], object]] = {
    "names": lambda store, path: store.names(),
    "find": lambda store, path: store.find("x"),
    "manifest": lambda store, path: store.manifest(3),
    "put": lambda store, path: store.put(path, "journal.jsonl"),
    "get": lambda store, path: store.get("journal.jsonl", path.parent / "run"),
    "create": lambda store, path: store.overwrite("lease", b""),
    "read": lambda store, path: store.retried(lambda: store.read("lease")),
    "modified": lambda store, path: store.modified("lease"),
    "delete": lambda store, path: store.delete(["lease"]),
}


@pytest.mark.parametrize("call", STORE_CALLS)
def test_a_store_that_hangs_is_an_error(call: str, store: RemoteStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"has not answered for 0\.1 s"):
        STORE_CALLS[call](store, tmp_path / "file")


def test_a_resume_with_a_store_that_hangs(store: RemoteStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_newest(local, store.url, why_not=lambda found: None)
    (tmp_path / "checkpoint-3").mkdir()
    Manifest(step=3, run_id="run").write(tmp_path / "checkpoint-3")
    found = find_newest(local, store.url, why_not=lambda found: None)
    assert found is not None
    assert found.path.name == "checkpoint-3"
    assert caplog.text.count("has not answered") == 1


def test_the_hub_that_hangs_at_the_end(
    forever: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploader, "END_LIMIT_S", 0.2)
    one = uploader.Uploader(tmp_path, "me/model")
    monkeypatch.setattr(one, "_upload", lambda *args, **settings: forever.wait())
    upload = one._outbox.put(Ticket(repo="me/model", message="x"), linked={}, copied={})
    assert one.finish() == [upload]
    assert "The Hub has not answered" in caplog.text
    assert "trainwright push" in caplog.text
    assert one._lane._is_abandoned, "the end of the process waits for it no more"
    assert upload.folder.is_dir()
    forever.set()


# -- threads and processes of a run ------------------------------------------------------------------------------------


def test_a_sampler_of_memory_that_hangs(forever: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tracker, "END_LIMIT_S", 0.1)
    tracker = TrainerMemoryTracker()
    tracker.start("train")
    monkeypatch.setattr(tracker, "cpu_mem_used", lambda: forever.wait() and 0)
    time.sleep(0.1)
    tracker.abandon()
    assert tracker.cur_stage is None


def test_a_watchdog_whose_store_hangs(forever: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "END_LIMIT_S", 0.1)
    asked = threading.Event()

    def check(keys: list[str]) -> bool:
        asked.set()
        return forever.wait() and False

    store: Any = SimpleNamespace(check=check)
    one = watchdog.Watchdog(store, rank=0, num_processes=2, hang_timeout_s=0.0)
    assert asked.wait(60)
    one.close()


SPEAKER = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    for _ in range(int(sys.argv[1])):
        print(json.dumps({"alive": True}), flush=True)
        time.sleep(0.5)
    if sys.argv[2] == "hangs":
        time.sleep(1000)
    print(json.dumps({"failed": "answered"}), flush=True)
"""


@pytest.mark.process
@pytest.mark.parametrize(("num_batches", "kind"), [(0, "hangs"), (2, "hangs"), (8, "answers")])
def test_an_evaluating_process_that_hangs(num_batches: int, kind: str, tmp_path: Path) -> None:
    """It may take as long as it does, if it goes on; otherwise it is started again once, and given up then."""
    (tmp_path / "scratch").mkdir()
    words = [sys.executable, "-c", SPEAKER, str(num_batches), kind]
    requests = Requests(tmp_path)
    process = EvaluationProcess(words, os.environ, scratch=tmp_path / "scratch", requests=requests, limit_s=3.0)
    process.start()
    try:
        assert process.find_problem(60) == ""
        requests.begin("step-2")
        process.submit(EvaluationRequest(name="step-2", step=2, epoch=0.0, max_steps=8))
        until(lambda: process.num_open == 0)
        process.wait(60)
        [(_, result)] = process.take()
    finally:
        process.stop()
    if kind == "hangs":
        assert "has finished no batch for 3 s, 2 times" in result.missing
    else:
        assert result.error == "answered"
