"""The forty lines of `docs/libraries.md` log what TRL's SFTTrainer logs, with its data, collator and model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright

PAGE = Path(__file__).resolve().parents[2] / "docs" / "libraries.md"
OVERRIDES = {"log", "training_step", "prediction_step", "_save_checkpoint"}


def class_of_the_page() -> Any:
    (code,) = re.findall(r"```python\n(class SupervisedFineTuning.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 40
    namespace = {"Trainer": trainwright.Trainer, "LossOutput": trainwright.LossOutput, "torch": torch}
    exec(code, namespace)
    return namespace["SupervisedFineTuning"]


@pytest.mark.slow  # imports TRL, and trains with it
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_forty_lines_log_what_trl_logs(tmp_path: Path) -> None:
    from . import cases

    theirs = cases.sft(tmp_path / "trl", gradient_checkpointing=False)
    theirs.train()
    kind = class_of_the_page()
    assert not OVERRIDES & vars(kind).keys()
    args = trainwright.TrainingArguments(
        str(tmp_path / "ours"), **cases.SETTINGS, include_num_input_tokens_seen="non_padding", preflight=False
    )
    ours = kind(
        cases.llama(tmp_path / "again"),
        args=args,
        train_dataset=theirs.train_dataset,
        eval_dataset=theirs.eval_dataset,
        data_collator=theirs.data_collator,
        processing_class=cases.tokenizer("decoder"),
    )
    ours.train()
    pairs = list(zip(cases.logs(ours), cases.logs(theirs), strict=True))
    assert sum("entropy" in other for _, other in pairs) == 3
    assert sum("eval_entropy" in other for _, other in pairs) == 2
    for mine, other in pairs:
        for name, value in other.items():
            if name.endswith("num_tokens"):
                assert mine["num_input_tokens_seen"] == value
            elif name == "eval_loss":  # transformers weighs batches by samples, this package by tokens
                assert mine[name] == pytest.approx(value, rel=0.01)
            elif name != "total_flos":
                assert mine[name] == pytest.approx(value, rel=2e-5), name
