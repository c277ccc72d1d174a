"""The notebook of examples/, cell by cell in a real kernel, with fewer rows than a reader trains on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .._support import kernel

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"
pytestmark = [pytest.mark.examples, pytest.mark.more, pytest.mark.process, pytest.mark.timeout(600)]


def test_each_cell_runs_and_the_model_answers(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells[0].startswith("%pip install"), "the packages are there already"
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "it is kept without outputs"
    shown = []
    with kernel.running(tmp_path) as running:
        for source in cells[1:]:
            cell = running.run(
                source.replace("rows[:3000]", "rows[:120]").replace("[600:]", "[40:]").replace("[:600]", "[:40]")
            )
            assert cell.of("error") == [], source
            shown.append(cell)
    assert "loss" in shown[2].of("display")[0].html
    (answers,) = shown[-1].of("result")
    assert answers.text.count("'label'") == 2
    assert (tmp_path / "reviews/model.safetensors").is_file()
