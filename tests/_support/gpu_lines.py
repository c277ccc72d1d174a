"""A plug-in for runs on a GPU: outcome and figures of each test as a line of JSON, written as soon as it is known.

A run that is cut off keeps its lines. A process whose device is lost, after which nothing works there, ends, and the
tests go on in a fresh one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LOST = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")
_lost: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Appends a test with what it recorded (`record_property`) to `$OUT/gpu.jsonl`."""
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        line = {"test": item.name, "outcome": report.outcome, "took_s": round(report.duration, 1)}
        if report.failed and call.excinfo is not None:
            line["failed"] = str(call.excinfo.value)[:300]
            if any(mark in line["failed"] for mark in LOST):
                _lost.append(item.name)
        out = Path(os.environ.get("OUT", "build/gpu"))
        with (out / "gpu.jsonl").open("a") as lines:
            print(json.dumps(line | dict(report.user_properties), default=str), file=lines)
    return report  # type: ignore[no-any-return]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _lost and "PYTEST_XDIST_WORKER" in os.environ:
        print(f"the device was lost in {_lost[0]}", flush=True)
        os._exit(1)
