"""The gate takes the slow tests in rounds: each run the next group of them, and a group that failed again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
[tool.pytest.ini_options]
addopts = ["-p", "pytest_split.plugin", "-v"]
markers = ["slow", "gpu", "quick", "smoke", "lint"]
"""
# Other plug-ins take seconds to load.
PLAIN = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "WORKERS": "", "TEST_WORKERS": ""}
TESTS = """
import pytest

pytestmark = pytest.mark.slow

def test_first(): {first}
def test_second(): {second}
def test_third(): {third}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A project with three slow tests, the gate, the Makefile and an environment in which lint passes."""
    suite = tmp_path / "checkout"
    for name in ("Makefile", ".ci/run"):
        (suite / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, suite / name)
    (suite / "pyproject.toml").write_text(CONFIG)
    (suite / "constraints.txt").write_text("torch==0\n")
    for name in ("requirements-data.txt", "requirements-optim.txt", "requirements-engines.txt"):
        (suite / name).touch()
    for folder in ("sources", "laws", "contract"):
        (suite / "tests" / folder).mkdir(parents=True)
    for place, mark in (("test_quick", "quick"), ("sources/test_rule", "lint"), ("test_more", "filterwarnings")):
        source = f"import pytest\n\n@pytest.mark.{mark}\ndef test_passes(): pass\n"
        (suite / "tests" / f"{place}.py").write_text(source)
    write(suite)
    programs = suite / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "mkdocs"):
        command = f'exec {sys.executable} "$@"' if name == "python" else "true"
        (programs / name).write_text(f"#!/bin/sh\n{command}\n")
        (programs / name).chmod(0o755)
    for stamp in (".torch", ".run", ".test", ".dev", ".ray", ".engines"):
        (suite / ".venv" / stamp).touch()
    (suite / "requirements-gpu.txt").touch()
    (suite / ".venv-gpu").mkdir()
    (suite / ".venv-gpu/.gpu").touch()
    with (suite / "Makefile").open("a") as targets:
        targets.write("\ngpu-rehearsal:\n\ttrue\n")  # in place of its minutes
    return suite


def write(suite: Path, first: str = "pass", second: str = "pass", third: str = "pass") -> None:
    (suite / "tests/test_slow.py").write_text(TESTS.format(first=first, second=second, third=third))


def gate(suite: Path, **settings: str) -> tuple[int, list[str]]:
    """Runs `.ci/run` with three rounds; returns its exit code and the slow tests that ran."""
    ours = ("MAKE", "MFLAGS", "PYTEST", "SLOW_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    cache = suite.parent / "cache"  # outside of the checkout, as the user's is
    env |= {**PLAIN, "XDG_CACHE_HOME": str(cache), "GIT_DIR": str(cache), "SLOW_ROUNDS": "3", **settings}
    done = subprocess.run(["bash", ".ci/run"], cwd=suite, capture_output=True, text=True, timeout=100, env=env)
    return done.returncode, re.findall(r"test_slow\.py::test_(\w+) (?:PASSED|FAILED)", done.stdout)


def test_runs_of_the_gate_cover_all_slow_tests_and_begin_again(suite: Path) -> None:
    assert [gate(suite) for _ in range(4)] == [(0, ["first"]), (0, ["second"]), (0, ["third"]), (0, ["first"])]


def test_a_failure_fails_the_gate_and_its_round_runs_again(suite: Path) -> None:
    write(suite, first="assert False")
    assert gate(suite) == (2, ["first"])
    write(suite)
    assert gate(suite) == (0, ["first"])
    assert gate(suite) == (0, ["second"])


def test_an_empty_round_passes_but_a_suite_without_slow_tests_does_not(suite: Path) -> None:
    (suite / "tests/test_slow.py").write_text("")
    assert gate(suite) == (0, [])
    assert gate(suite, SLOW_ROUNDS="1") == (2, [])


def test_a_round_that_exceeds_its_limit_fails(suite: Path) -> None:
    write(suite, first="import time; time.sleep(90)")
    assert gate(suite, SLOW_LIMIT_S="5")[0] == 124
