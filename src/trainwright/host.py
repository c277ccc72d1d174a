"""Host: memory and processes of the machine that this process runs on."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
SAME_START_S = 1.0  # start times of one process differ by less


def available_bytes() -> int:
    """Bytes that this process may still take: of the machine's memory, or its container's if that is less.

    Those of the page cache that the system frees when they are needed count as available.
    """
    machine = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return machine
    return max(0, min(machine, limit - used + int(stat.get("inactive_file", 0))))


def is_process_alive(pid: int, *, began: float | None = None) -> bool:
    """Returns True if a process of this machine runs; one that has ended and was not waited for does not.

    Args:
        pid: number of the process.
        began: when it started, in seconds since the epoch: its number may belong to a later process now. None: any
            process of that number counts.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return began is None or bool(abs(process.create_time() - began) < SAME_START_S)
    except psutil.AccessDenied:
        return began is None
    except psutil.Error:
        return False


def place_of_this_process() -> tuple[str, str]:
    """Returns where a process number counts: the machine; its boot and process namespace, "" if there are none."""
    return socket.gethostname(), _boot_and_namespace()


@cache
def _boot_and_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system
        return ""
