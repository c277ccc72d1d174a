"""The end of a child process: nothing of it is left, not even its entry in the table of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

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
