"""Runs Python in a process of its own, with the package and the tests on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, in which a script finds `trainwright` and `tests`, and computes on one thread."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run_python(
    *arguments: str, cwd: Path | None = None, timeout_s: float = 250, code: int | None = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGUMENTS` to its end, and keeps what it writes.

    Args:
        arguments: of the interpreter: a script, or `-c` or `-m`, and what comes after it.
        cwd: its working directory; this process's by default.
        timeout_s: seconds after which it is killed and the test fails.
        code: the exit code that it must have; None for any.
        more: further environment variables.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert code in (None, done.returncode), f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done
