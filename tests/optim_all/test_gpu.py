"""On CUDA: what needs it trains, saves and resumes there, and paged states are paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .table import ON_CUDA, ROWS, Row, losses, make_trainer
from .test_optimizer_laws import StopAt

pytestmark = pytest.mark.gpu
PAGED = [row for row in ROWS if row.name.startswith("paged_")]
HERE = [row for row in ROWS if row.name in ("muon", "adamw_torch_8bit", "adamw_8bit", "galore_adamw", "lomo")]


@pytest.mark.parametrize("row", [*ON_CUDA, *PAGED, *HERE], ids=str)
def test_it_trains_and_resumes(row: Row, tmp_path: Path) -> None:
    row.needs()
    settings: dict[str, Any] = {"use_cpu": False, "num_train_epochs": 4}
    whole = make_trainer(tmp_path / "whole", row, **settings)
    whole.train()
    assert next(whole.model.parameters()).is_cuda
    assert losses(whole)[-1] < losses(whole)[0]
    make_trainer(tmp_path / "parts", row, callbacks=[StopAt(5)], **settings).train()
    second = make_trainer(tmp_path / "parts", row, **settings)
    second.train(resume_from_checkpoint=True)
    assert losses(second) == pytest.approx(losses(whole), rel=1e-3)
