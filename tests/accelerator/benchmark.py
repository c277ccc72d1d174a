"""The benchmark for GPUs in its tiny form on the stand-in; runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from .._support import standin
from .children import ROOT

TOO_BIG = "Llama-3.2-1B"
LIMIT = 8_000_000  # bytes of a device on which the tiny models fit


def out_of_memory(folder: Path) -> dict[str, Any]:
    """Returns what the benchmark prints where one of its models does not fit into the device's memory."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    gpu: Any = importlib.import_module("gpu")
    plain = gpu.ShapeWork.model

    def model(work: Any, attention: str = "sdpa") -> Any:
        if work.name == TOO_BIG:
            work.sizes["vocab_size"] = 40_000
        return plain(work, attention)

    gpu.ShapeWork.model = model
    standin.limit_memory(LIMIT)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = gpu.main(["--tiny", "--shapes"])
    line, *table = out.getvalue().splitlines()
    return {"code": code, "found": json.loads(line), "table": table}


def no_time(folder: Path) -> dict[str, Any]:
    """Returns the exit code and the cells of a benchmark whose time is over before it begins."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    gpu: Any = importlib.import_module("gpu")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = gpu.main(["--tiny", "--minutes", "0"])
    return {"code": code, "found": json.loads(out.getvalue().splitlines()[0])}
