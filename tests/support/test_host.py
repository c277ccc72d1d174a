"""Memory and processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainwright.support import host


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["", "job/step"], ids=["container", "nested"])
def test_a_limit_of_memory_counts_instead_of_the_machine(
    version: int, limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the process's own group, of one around it, and of a container, which sees its own as the root."""
    membership = tmp_path / "membership"
    membership.write_text({1: "5:cpu:/x\n4:memory:/job/step/task\n0::/\n", 2: "0::/job/step/task\n"}[version])
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "MEMBERSHIP", membership)
    machine = psutil.virtual_memory().available
    assert host.available_bytes() > 0.5 * machine
    group = tmp_path / ("memory" if version == 1 else "") / limited
    group.mkdir(parents=True, exist_ok=True)
    most, now = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    (group / most).write_text("1000000")
    (group / now).write_text("700000")
    (group / "memory.stat").write_text("anon 100\ninactive_file 50000\ntotal_inactive_file 50000\n")
    assert host.available_bytes() == 350_000
    (group / most).write_text("max" if version == 2 else str(2**63 - 4096))
    assert host.available_bytes() > 0.5 * machine


@pytest.mark.process
def test_a_process_is_alive_until_it_ends() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(process.pid).create_time()
    assert host.is_process_alive(process.pid)
    assert host.is_process_alive(process.pid, began=began)
    process.communicate(b"\n", timeout=60)
    assert not host.is_process_alive(process.pid)
    assert not host.is_process_alive(process.pid, began=began)


def test_a_later_process_with_the_number_of_an_earlier_one_is_another() -> None:
    began = psutil.Process().create_time()
    assert host.is_process_alive(os.getpid(), began=began + 0.5)
    assert not host.is_process_alive(os.getpid(), began=began - 60)
