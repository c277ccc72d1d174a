"""What tests cost: CPU seconds of those that cost most, in `tests/costs.json`, by which `make test` leaves them out.

`--store-costs` measures the tests that run, with the processes that they start, and writes the file anew for them. The
cost of a test with several cases is the median: the first test of a process pays for imports that others need too.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from . import forked

FILE = Path(__file__).parents[1] / "costs.json"
ROOT = FILE.parents[1]
RECORDED_S = 0.05  # what costs less is not in the file
_KEY = "cpu_s"


def test_name(nodeid: str) -> str:
    """Returns the id of a test without that of its case."""
    return nodeid.partition("[")[0]


@cache
def recorded_costs() -> dict[str, float]:
    """Returns CPU seconds by the name of a test."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def cost_s(item: pytest.Item) -> float:
    """Returns the CPU seconds of a test; 0.0 for one that costs little, or that nobody has measured."""
    return recorded_costs().get(test_name(item.nodeid), 0.0)


def used_s() -> float:
    """Returns the CPU seconds of this process, of those that it has waited for, and of forks that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system + forked.ended_cpu_s()


class CostRecorder:
    """Measures each test where it runs, and writes the file where the results arrive."""

    def __init__(self) -> None:
        self.measured = defaultdict[str, list[float]](list)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.user_properties.append((_KEY, -used_s()))
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append((_KEY, used_s()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        seconds = sum((float(str(value)) for key, value in report.user_properties if key == _KEY), 0.0)
        self.measured[test_name(report.nodeid)].append(seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        costs = recorded_costs() | {name: statistics.median(seconds) for name, seconds in self.measured.items()}
        recorded = {name: round(costs[name], 2) for name in sorted(costs) if costs[name] >= RECORDED_S}
        FILE.write_text(json.dumps(recorded, indent=0) + "\n", encoding="utf-8")
