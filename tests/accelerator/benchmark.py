"""The measurements for GPUs in their tiny form on the stand-in; runs in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from .._support import standin
from .children import ROOT

TOO_BIG = 40_000  # words
LIMIT = 8_000_000  # bytes of a device on which the tiny models fit
CELLS = (
    "Qwen3-0.6B, 8192 x 2 | hand",
    "Qwen3-0.6B, 8192 x 2 | trainwright",
    "chat, Qwen3-0.6B, to 2048 | trainwright, packed",
    "Llama-3.1-8B LoRA, 4096 x 2 x 8 | trainwright, attention kept",
)


def out_of_memory(folder: Path) -> dict[str, Any]:
    """Returns what cells find on a device on which a model fits, and then what they find for one that does not."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    gpu: Any = importlib.import_module("gpu")
    loops: Any = importlib.import_module("on_gpu.loops")
    standin.limit_memory(LIMIT)
    found = {"machine": gpu.machine(), "fits": {name: gpu.found_in(name, is_tiny=True) for name in CELLS}}
    loops.TINY = dataclasses.replace(loops.TINY, vocabulary=TOO_BIG)
    return found | {"too big": {name: gpu.found_in(name, is_tiny=True) for name in CELLS}}
