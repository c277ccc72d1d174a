"""Figures of these tests as lines of JSON, written as soon as they are known: a run that is cut off keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Read once by torch, at its first product of matrices; without it none is deterministic on CUDA.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """Appends outcome and figures (`record_property`) of a test to `$OUT/gpu.jsonl`."""
    report = yield
    out = os.environ.get("OUT")
    if out and (report.when == "call" or report.outcome != "passed"):
        line = {"test": item.name, "outcome": report.outcome, "took_s": round(report.duration, 1)}
        if report.failed:
            line["failed"] = str(call.excinfo.value)[:300] if call.excinfo else "?"
        with (Path(out) / "gpu.jsonl").open("a") as lines:
            print(json.dumps(line | dict(report.user_properties), default=str), file=lines)
    return report


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Puts back what full determinism and compilation change for the whole process."""
    import torch

    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch._dynamo.reset()
