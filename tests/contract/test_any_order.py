"""The quick tier in random order, while other processes keep all cores busy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow  # it is the whole quick tier, at half its speed
@pytest.mark.timeout(1800)
def test_quick_tests_pass_in_random_order_on_busy_cores() -> None:
    seed = int(time.time())
    command = [sys.executable, "-m", "pytest", "-m", "quick", "-n", "auto", "--dist", "worksteal", "--busy"]
    command += ["-p", "no:cacheprovider", "-p", "randomly", "--randomly-dont-reset-seed", f"--randomly-seed={seed}"]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True)
    assert done.returncode == 0, f"make shuffled SEED={seed}\n{done.stdout[-8000:]}"
