"""Compiled blocks (`torch_compile="regional"`) of models in parts: as many graphs and the same numbers as elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.engines import needs
from .._support.two_processes import run
from .layouts import MODEL, write_model

SCRIPT = Path(__file__).with_name("regional.py")
pytestmark = [pytest.mark.slow, pytest.mark.process]  # two processes, two trainings each, a compilation
ZERO = [pytest.param(f"zero {stage}", marks=needs("deepspeed")) for stage in (1, 2)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor parallel", *ZERO])
def test_compiled_blocks_of_a_model_in_parts_learn_the_same(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path / MODEL)
    done = run(SCRIPT, str(tmp_path), kind, folder=tmp_path, environment={"DS_ACCELERATOR": "cpu"})
    for told in done.told:
        assert 1 <= told["graphs"] <= (3 if kind == "tensor parallel" else 2)  # of the first shapes, and of any
        plain = told["plain"]
        compiled = told["compiled"]
        assert len(plain["losses"]) == 4
        assert compiled["files"] == plain["files"]
        for name in ("losses", "norms", "evaluated"):
            assert compiled[name] == pytest.approx(plain[name], rel=1e-5)
