"""Memory and processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trainwright import host


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    machine = psutil.virtual_memory().available
    assert host.available_bytes() > 0.5 * machine
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("700000")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50000\n")
    assert host.available_bytes() == 350_000
    (tmp_path / "memory.max").write_text("max")
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
