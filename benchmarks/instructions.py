"""Machine instructions of training steps, which no other work on the machine changes, counted by valgrind's callgrind.

One process under valgrind imports the libraries once, and forks for each job, so that no job sees what another left.
A job counts from the end of one step to the end of a later one, and ends there. For x86-64 Linux.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

# A request to valgrind (valgrind.h): four rotations that leave a register as it was, and an exchange without effect.
CODE = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
REQUESTS = {name: 0x43540000 + number for number, name in enumerate(("dump", "zero", "toggle", "dump_at", "start"))}


def can_count() -> bool:
    """Returns whether valgrind is there, and its requests are known for this machine."""
    return shutil.which("valgrind") is not None and platform.machine() == "x86_64" and sys.platform == "linux"


@functools.cache
def _memory() -> mmap.mmap:
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(CODE)
    return memory


def _request(name: str) -> None:
    place = ctypes.addressof(ctypes.c_char.from_buffer(_memory()))
    arguments = (ctypes.c_uint64 * 6)(REQUESTS[name])
    ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(place)(ctypes.addressof(arguments))


class Counts:
    """Counts from the end of one step to the end of another, and ends this process there."""

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last

    def step_done(self, step: int) -> None:
        if step == self._first:
            gc.collect()
            gc.freeze()  # what was made before is collected neither here nor there
            _request("start")
        elif step == self._last:
            _request("dump")
            os._exit(0)


def run_jobs(jobs: Iterable[tuple[str, str, Callable[[], None], int]]) -> None:
    """Runs jobs, each in a fork, and prints a line for each: its row, subject, steps, process and exit code."""
    for row, subject, job, steps in jobs:
        child = os.fork()
        if child == 0:
            try:
                job()
            except BaseException:
                sys.__stderr__.write(f"{row}, {subject}:\n{traceback.format_exc()}")  # type: ignore[union-attr]
            os._exit(1)
        _, status = os.waitpid(child, 0)
        print(json.dumps([row, subject, steps, child, status]), flush=True)


def counted(command: list[str]) -> dict[str, dict[str, float]]:
    """Runs a script under valgrind that calls `run_jobs`; returns millions of instructions a step by row, subject."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/counts.%p"]
        errors = Path(folder, "errors")
        with errors.open("w") as stderr:
            running = subprocess.Popen(
                [*valgrind, sys.executable, "-W", "ignore", *command],
                text=True,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
        with running:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith('["'):
                    row, subject, steps, process, status = json.loads(line)
                    if status != 0:
                        raise RuntimeError(f"{row}, {subject} failed:\n{errors.read_text()[-5000:]}")
                    text = Path(folder, f"counts.{process}.1").read_text()
                    (total,) = re.findall(r"^totals: (\d+)", text, re.M)
                    found.setdefault(row, {})[subject] = int(total) / steps / 1e6
                    print(f"{row}, {subject}: {found[row][subject]:.3f} million", file=sys.stderr, flush=True)
        if running.wait() != 0 or not found:
            raise RuntimeError(errors.read_text()[-5000:])
    return found
