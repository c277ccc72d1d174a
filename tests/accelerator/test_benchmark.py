"""The benchmark for GPUs runs on an accelerator, in its tiny form, and no cell that fails loses the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from .benchmark import TOO_BIG
from .children import on_the_standin

pytestmark = [pytest.mark.process, pytest.mark.framework]


@pytest.mark.slow  # twelve runs of two trainers and a loop
def test_a_model_that_does_not_fit_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    found = on_the_standin("benchmark.out_of_memory", folder=tmp_path)
    assert found["code"] == 0
    assert found["found"]["device"] == "Stand-in"
    for cell in found["found"]["shapes"]:
        if cell["shape"] == TOO_BIG:
            assert cell["failed"] == "out of memory"
        else:
            assert cell["tokens_per_second"] > 0
            assert cell["ratio"] > 0
            assert cell["peak_gib"] is not None
    names = {cell["shape"] for cell in found["found"]["shapes"]}
    assert names == {"Qwen3-0.6B", TOO_BIG, "Llama-3.1-8B LoRA"}
    assert sum("out of memory" in line for line in found["table"]) == 4


def test_a_benchmark_ends_when_its_time_is_over(tmp_path: Path) -> None:
    found = on_the_standin("benchmark.no_time", folder=tmp_path)
    assert found["code"] == 1
    reasons = {cell["failed"] for cell in (*found["found"]["shapes"], *found["found"]["packing"].values())}
    assert reasons == {"no time left"}
