"""Host: memory and processes of the machine that this process runs on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")  # the control groups of this process
SAME_START_S = 1.0  # start times of one process differ by less


def in_notebook() -> bool:
    """Returns True in the process of a Jupyter kernel, which can show HTML; a fork of it cannot."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    kernel = getattr(shell, "kernel", None)
    return kernel is not None and getattr(getattr(kernel, "session", None), "pid", os.getpid()) == os.getpid()


def available_bytes() -> int:
    """Bytes that this process may still take: of the machine's memory, or its container's if that is less.

    Those of the page cache that the system frees when they are needed count as available.
    """
    import psutil

    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *(left for group in _cgroups() if (left := _left_in(group)) is not None)]))


@cache
def memory_bytes() -> int:
    """Returns the memory of this machine."""
    import psutil

    return int(psutil.virtual_memory().total)


@cache
def num_cpus() -> int | None:
    """Returns the number of logical processors of this machine; None if unknown."""
    import psutil

    return psutil.cpu_count()


@cache  # a fork has another id
def read_start_time(pid: int) -> float:
    """Returns when a process that runs began, in seconds since the epoch."""
    import psutil

    return psutil.Process(pid).create_time()


def _cgroups() -> Iterator[Path]:
    """Yields the folders of this process's control group and its parents, for cgroup versions 1 and 2."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for kinds, path in (line.split(":", 2)[1:] for line in lines if line.count(":") >= 2):
        if kinds == "" or "memory" in kinds.split(","):
            root = CGROUP / ("memory" if kinds else "")
            group = root / path.strip("/")
            yield from (one for one in (group, *group.parents) if one.is_relative_to(root))


def _left_in(group: Path) -> int | None:
    """Bytes that a control group may still use; None if it has no limit ("max") or does not exist."""
    limit = "memory.max"
    used = "memory.current"
    cache_name = "inactive_file"
    if not (group / limit).exists():
        limit = "memory.limit_in_bytes"
        used = "memory.usage_in_bytes"
        cache_name = "total_inactive_file"
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        most, now = (int((group / name).read_text(encoding="ascii")) for name in (limit, used))
    except (OSError, ValueError):
        return None
    return most - now + int(stat.get(cache_name, 0))


def peak_bytes() -> int:
    """Most resident memory that this process has had at a time; on Windows too."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def is_process_alive(pid: int, *, began: float | None = None) -> bool:
    """Returns whether a process of this machine is running; a zombie is not.

    Process numbers are reused: with `began` (seconds since the epoch), only a process that started then counts.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return began is None or bool(abs(process.create_time() - began) < SAME_START_S)
    except psutil.AccessDenied:
        return began is None
    except psutil.Error:
        return False


def find_process_scope() -> tuple[str, str]:
    """Returns the scope of a process number: the machine; its boot and process namespace, "" if there are none."""
    return socket.gethostname(), _boot_and_namespace()


@cache
def _boot_and_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system
        return ""
