"""Rounds of a long suite: a budget of time, a shard of the files, and a record from which the next round starts.

Every result is appended to the record as it comes, so that a round that is killed has left what it found. The next one
runs what failed, then what never ran, then what ran longest ago; what passed with the same sources is left out. No
test starts once the budget is used up, nor one that is known to last longer than what is left of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

SOURCES = ("src", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "constraints.txt")


@dataclass(frozen=True)
class Result:
    """Last known result of one test.

    Attributes:
        test: node id.
        outcome: "passed", "failed" or "skipped".
        seconds: setup, call and teardown.
        sources: digest of the sources it ran with.
        round: start of the round, in seconds since the epoch.
    """

    test: str
    outcome: str
    seconds: float
    sources: str
    round: float


def read(record: Path) -> dict[str, Result]:
    """Returns the newest result of each test; a line that was cut off while it was written is left out."""
    results = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        results[result.test] = result
    return results


def digest(root: Path) -> str:
    """Returns a digest of all source files, with their names."""
    whole = hashlib.sha256()
    for file in sorted(_files(root)):
        whole.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def _files(root: Path) -> Iterator[Path]:
    for name in SOURCES:
        path = root / name
        yield from (
            [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        )


def number_of(text: str, *, below: int) -> int:
    """Returns a number below `below` that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % below


def file_of(test: str) -> str:
    return test.split("::")[0]


def parse_shard(text: str) -> tuple[int, int]:
    """Returns index (from 0) and number of shards of "2/5"."""
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise argparse.ArgumentTypeError(f"a shard is written as 2/5, not {text!r}")
    return int(index) - 1, int(number)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rounds")
    group.addoption(
        "--record", type=Path, metavar="FILE", help="keep results here, and start where the last round ended"
    )
    group.addoption("--budget-s", type=float, metavar="SECONDS", help="start no test after this time")
    group.addoption("--shard", type=parse_shard, metavar="K/N", help="only the K-th of N parts of the files")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record"):
        config.pluginmanager.register(Round(config), "round")


@pytest.hookimpl(trylast=True)  # after a mark expression has selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a shard, whole files by a digest of their names: the tests of a file share what is costly to make."""
    if (shard := config.getoption("shard")) is not None:
        index, number = shard
        here = [item for item in items if number_of(file_of(item.nodeid), below=number) == index]
        config.hook.pytest_deselected(items=[item for item in items if item not in here])
        items[:] = here


class Round:
    """One run of the suite with a record."""

    def __init__(self, config: pytest.Config) -> None:
        if config.getoption("numprocesses", None):
            raise pytest.UsageError("--record is for one process: without -n")
        self.start, self.clock = time.time(), time.monotonic()
        self.record: Path = config.getoption("record")
        self.record.parent.mkdir(parents=True, exist_ok=True)
        budget_s: float | None = config.getoption("budget_s")
        self.budget_s = float("inf") if budget_s is None else budget_s
        self.sources = digest(config.rootpath)
        self.before = read(self.record)
        self.seconds: dict[str, float] = {}
        self.outcomes: dict[str, str] = {}
        self.num_done = self.num_left = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if not self._is_done(item)]
        done = [item for item in items if self._is_done(item)]
        if done:
            config.hook.pytest_deselected(items=done)
        self.num_done, self.num_left = len(done), len(left)
        items[:] = sorted(left, key=self._turn)

    def _is_done(self, item: pytest.Item) -> bool:
        last = self.before.get(item.nodeid)
        return last is not None and last.outcome != "failed" and last.sources == self.sources

    def _turn(self, item: pytest.Item) -> tuple[int, float]:
        """Failed before new before old; new files in an order that differs with the sources, for want of a record."""
        last = self.before.get(item.nodeid)
        if last is None:
            return 1, number_of(self.sources + file_of(item.nodeid), below=2**32)
        return (0, 0.0) if last.outcome == "failed" else (2, last.round)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leaves a test for the next round if there is no time for it; the first one always runs."""
        last = self.before.get(item.nodeid)
        left_s = self.budget_s - (time.monotonic() - self.clock)
        if self.outcomes and (left_s <= 0 or (last is not None and last.seconds > left_s)):
            return True
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        known = self.outcomes.get(test, "passed")
        if report.failed or (report.skipped and known == "passed"):
            known = report.outcome
        self.outcomes[test] = known
        if report.when == "teardown" or report.failed:  # a failure at once: the teardown may hang
            self._append(Result(test, known, round(self.seconds[test], 2), self.sources, self.start))

    def _append(self, result: Result) -> None:
        with self.record.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing left to run is a success; nothing run of what was left is none."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.num_done and not self.num_left:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ran, done = len(self.outcomes), self.num_done
        sentence = (
            f"{ran} ran, {self.num_left - ran} are left for the next round, {done} passed before with these sources"
        )
        terminalreporter.write_line(sentence)


def failures_since(record: Path, start: float) -> list[str]:
    """Returns the tests whose newest result is a failure in a round that began at `start` or later."""
    return [r.test for r in read(record).values() if r.outcome == "failed" and r.round >= start]


if __name__ == "__main__":  # after a round was killed: did a test fail in it?
    failed = failures_since(Path(sys.argv[1]), float(sys.argv[2]))
    print(*(f"failed: {test}" for test in failed), sep="\n")
    sys.exit(1 if failed else 0)
