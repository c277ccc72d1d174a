"""The end of a child process: nothing of it is left, not even its entry in the table of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from trainwright.support import child_process, deadline
from trainwright.support.child_process import ChildProcess

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
REAL_S = 30.0


def wait_until_reaped(pid: int) -> None:
    """Fails if a process stays a zombie; nothing here starts a process, which would reap it."""
    end = time.monotonic() + REAL_S
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < end, "it stays a zombie"
        time.sleep(0.01)


@pytest.mark.process
@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs the table of processes")
def test_a_child_that_dies_after_the_wait_for_it_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "STOP_LIMIT_S", 0.0)
    child = ChildProcess(SLEEPS, dict(os.environ), max_bytes=1000)
    child.end_group()
    wait_until_reaped(child.pid)
    assert child.describe_end() == "SIGKILL"
    child.close()


@pytest.mark.process
@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="needs the table of processes")
def test_a_command_that_dies_after_the_wait_for_it_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "KILLED_S", 0.0)
    process = subprocess.Popen(SLEEPS, start_new_session=True)
    deadline.end_group(process)
    wait_until_reaped(process.pid)


@pytest.mark.process
def test_a_worker_that_is_forked_meanwhile_does_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for the end of a pipe, and a process that is forked then would have it for as long as it lives."""
    begins = threading.Event()
    has_forked = threading.Event()
    original: Any = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec(*args: Any) -> Any:
        begins.set()
        has_forked.wait(0.5)
        return original(*args)

    monkeypatch.setattr(subprocess, "_fork_exec", fork_exec)
    started: list[ChildProcess] = []
    thread = threading.Thread(
        target=lambda: started.append(ChildProcess([sys.executable, "-c", ""], dict(os.environ), max_bytes=100))
    )
    thread.start()
    assert begins.wait(10.0)
    worker = os.fork()
    if worker == 0:
        time.sleep(60.0)
        os._exit(0)
    try:
        has_forked.set()
        thread.join(10.0)
        assert not thread.is_alive()
        assert started[0].describe_end() in ("exit code 0", "SIGKILL")
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        thread.join()
        started[0].close()
