"""The gate and its rounds of slow tests: a failure counts although the round is cut off, and each round continues."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = ["--import-mode=importlib", "-p", "tests._support.rounds"]
markers = ["slow", "gpu"]
"""
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WORKERS": "", "TEST_WORKERS": ""}  # other plugins take seconds to load
TESTS = """
import signal, time
import psutil, pytest

pytestmark = pytest.mark.slow

def test_first(): {first}
def test_second(): {second}
def test_third(): {third}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A project with three slow tests, the gate, the Makefile and an environment in which lint passes."""
    suite = tmp_path / "checkout"
    for name in ("Makefile", ".ci/run", "tests/_support/rounds.py"):
        (suite / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, suite / name)
    (suite / "pyproject.toml").write_text(CONFIG)
    (suite / "constraints.txt").write_text("torch==0\n")
    for name in ("requirements-data.txt", "requirements-optim.txt", "requirements-engines.txt"):
        (suite / name).touch()
    (suite / "tests/test_quick.py").write_text("def test_passes(): pass\n")
    write(suite)
    programs = suite / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "mkdocs"):
        does = f'exec {sys.executable} "$@"' if name == "python" else "true"
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for stamp in (".torch", ".run", ".dev", ".ray", ".engines"):
        (suite / ".venv" / stamp).touch()
    return suite


# As if the clock of the nearest `timeout` had run out (the gate's: it may itself run below another one, as on the CI
# machine): no time that a busy machine could need for the first test.
HANGS = """
    limit = next(p for p in psutil.Process().parents() if p.name() == "timeout")
    limit.send_signal(signal.SIGALRM)
    time.sleep(90)
"""


def write(suite: Path, first: str = "pass", second: str = "pass", third: str = "pass") -> None:
    (suite / "tests/test_slow.py").write_text(TESTS.format(first=first, second=second, third=third))


def cache_of(suite: Path) -> Path:
    """Returns the user's cache, outside of the checkout as it is outside of tests."""
    return suite.parent / "cache"


def results(suite: Path) -> list[tuple[str, str]]:
    """Returns test and outcome of each line of the gate's record."""
    lines = (cache_of(suite) / "trainwright/slow_tests.jsonl").read_text().splitlines()
    return [(line["test"].split("::")[1], line["outcome"]) for line in map(json.loads, lines)]


def gate(suite: Path, **settings: str) -> tuple[int, str]:
    """Runs `.ci/run` with a budget for every test, whatever its default; returns its exit code and output."""
    ours = ("MAKE", "MFLAGS", "PYTEST", "SLOW_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(["bash", ".ci/run"], cwd=suite, capture_output=True, text=True, timeout=100,
                          env={**env, **PLAIN, "XDG_CACHE_HOME": str(cache_of(suite)), "SLOW_BUDGET_S": "90",
                               **settings})  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def slow(suite: Path, *options: str) -> tuple[int, list[str]]:
    """Runs a round of the slow tests; returns its exit code and the tests that ran, in order."""
    command = [sys.executable, "-m", "pytest", "-vp", "no:cacheprovider", "-m", "slow", "--record", "record", *options]
    done = subprocess.run(command, cwd=suite, capture_output=True, text=True, timeout=100, env={**os.environ, **PLAIN})
    return done.returncode, re.findall(r"::test_(\w+) (?:PASSED|FAILED)", done.stdout)


def test_a_failure_before_the_budget_is_used_up_fails_the_gate(suite: Path) -> None:
    write(suite, first="assert False")
    code, out = gate(suite, SLOW_BUDGET_S="0")
    assert code != 0
    assert "1 failed" in out
    assert "2 are left for the next round" in out


@pytest.mark.parametrize(("first", "expected"), [("assert False", 1), ("pass", 0)])
def test_a_failure_before_the_gate_kills_a_test_that_hangs_fails_it(suite: Path, first: str, expected: int) -> None:
    write(suite, first=first, second=HANGS)
    code, out = gate(suite)
    assert code == expected, out
    assert "killed at their limit" in out
    assert ("failed: tests/test_slow.py::test_first" in out) == bool(expected)


def test_rounds_that_are_cut_off_run_everything_and_the_gate_passes(suite: Path) -> None:
    rounds = [gate(suite, SLOW_BUDGET_S="0") for _ in range(4)]
    assert [code for code, _ in rounds] == [0, 0, 0, 0], rounds
    left = [re.findall(r"(\d) ran, (\d) are left .* (\d) passed before", out)[0] for _, out in rounds]
    assert left == [("1", "2", "0"), ("1", "1", "1"), ("1", "0", "2"), ("0", "0", "3")]
    assert [test for test, _ in results(suite)] == ["test_first", "test_second", "test_third"]


def test_what_failed_runs_first_and_what_ran_longest_ago_before_the_rest(suite: Path) -> None:
    write(suite, second="assert False")
    assert slow(suite) == (1, ["first", "second", "third"])
    assert slow(suite) == (1, ["second"])  # the others passed with these sources
    write(suite)
    assert slow(suite, "--budget-s", "0") == (0, ["second"])
    assert slow(suite, "--budget-s", "0") == (0, ["first"])
    assert slow(suite) == (0, ["third"])
    assert slow(suite) == (0, [])
    write(suite, third="pass ")  # new sources: all again, the oldest results first
    assert slow(suite) == (0, ["second", "first", "third"])


def test_a_test_known_to_last_longer_than_what_is_left_waits_for_a_round_of_its_own(suite: Path) -> None:
    assert slow(suite) == (0, ["first", "second", "third"])
    record = suite / "record"
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    lines[1]["seconds"] = 5000
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(suite, third="pass ")
    assert slow(suite, "--budget-s", "4000") == (0, ["first", "third"])
    assert slow(suite, "--budget-s", "4000") == (0, ["second"])


def test_no_test_is_no_success(suite: Path) -> None:
    code, ran = slow(suite, "-k", "nothing_has_this_name")
    assert (code, ran) == (pytest.ExitCode.NO_TESTS_COLLECTED, [])


def test_shards_are_whole_files_and_together_everything(suite: Path) -> None:
    for number in range(6):
        shutil.copy(suite / "tests/test_slow.py", suite / f"tests/test_slow_{number}.py")
    with ThreadPoolExecutor(3) as pool:  # beside each other, with one record
        shards = list(pool.map(lambda k: slow(suite, "--shard", f"{k}/3"), (1, 2, 3)))
    assert [code for code, _ in shards] == [0, 0, 0]
    assert all(len(ran) % 3 == 0 and len(ran) < 21 for _, ran in shards)
    assert sum(len(ran) for _, ran in shards) == 21
    assert slow(suite) == (0, [])  # the record has them all
