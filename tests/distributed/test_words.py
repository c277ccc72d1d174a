"""What two processes say: each line once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from .._support.two_processes import run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = """
import sys
from tests._support.small import data, make_trainer

folder, has_bar = sys.argv[1], sys.argv[2] == "bar"
trainer = make_trainer(
    folder, max_steps=4, logging_steps=1, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
    eval_dataset=data.vectors(8), disable_tqdm=not has_bar, log_level="info" if has_bar else "passive", use_cpu=True,
)
trainer.train()
trainer.save_metrics("train", {"train_loss": 1.0})
trainer.log_metrics("train", {"train_loss": 1.0})
"""


@pytest.mark.parametrize("shown", ["bar", "plain"])
def test_each_line_is_said_once(shown: str, tmp_path: Path) -> None:
    out = run(SCRIPT, str(tmp_path / "run"), shown, folder=tmp_path, timeout_s=200).out
    lines = Counter(line.strip() for line in out.splitlines() if line.strip())
    logs = [line for line in lines if " loss=" in line or " eval_loss=" in line]
    assert len(logs) == 6, out
    assert sum("***** train metrics" in line for line in lines.elements()) == 1
    own = [line for line in lines if line in logs or line.startswith(("batch ", "length ", "optimizer ", "time "))]
    assert {line: lines[line] for line in own if lines[line] > 1} == {}
    assert sum(line.startswith("batch ") for line in lines) == 1
