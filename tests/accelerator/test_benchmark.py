"""The measurements for GPUs run on an accelerator, in their tiny form, and name a model that does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import on_the_standin

pytestmark = [pytest.mark.process, pytest.mark.framework]


@pytest.mark.slow  # eight runs
def test_cells_measure_and_name_a_model_that_does_not_fit(tmp_path: Path) -> None:
    found = on_the_standin("benchmark.out_of_memory", folder=tmp_path)
    assert found["machine"]["device"] == "Stand-in"
    for name, cell in found["fits"].items():
        assert cell["tokens_per_second"] > 0, name
        assert cell["peak_gib"] is not None, name
    assert {cell["failed"] for cell in found["too big"].values()} == {"out of memory"}
