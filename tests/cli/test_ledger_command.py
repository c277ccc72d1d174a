"""`trainwright ledger`: samples by loss and visits, with their texts, for a person, a program and the quarantine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainwright._types import LEDGER_NAME
from trainwright.data.ledger import Ledger, write_table
from trainwright.data.quarantine import read_quarantine

from .commands import call, done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ledger = Ledger()
    one = np.ones(1, np.int64)
    for step, (sample, loss) in enumerate([(0, 0.5), (3, 2.0), (1, 0.25), (3, 4.0)], start=1):
        ledger.add(np.array([sample]), step=one * step, visits=one, tokens=one, loss_sum=np.array([loss]))
    about = {"step": 4, "num_samples": 6, "sources": {"a": 2, "b": 4}, "is_mean": False}
    table = ledger.table(about, locate=lambda sample: ("a", sample) if sample < 2 else ("b", sample - 2))
    write_table(table, tmp_path / LEDGER_NAME)
    rows = [{"text": f"text {number}", "label": "x"} for number in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_each_question_is_answered(folder: Path) -> None:
    def asked(*words: str) -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(done("ledger", str(folder), *words, "--json"))
        return found

    assert [(one["sample"], one["mean_loss"], one["visits"]) for one in asked("top", "-n", "2")] == [
        (3, 3.0, 2),
        (0, 0.5, 1),
    ]
    assert asked("never") == [{"sample": 2}, {"sample": 4}, {"sample": 5}]
    assert [(one["sample"], one["source"], one["row"]) for one in asked("repeated")] == [(3, "b", 1)]
    assert [(one["source"], one["samples"], one["mean_loss"]) for one in asked("by-source")] == [
        ("a", 2, 0.375),
        ("b", 1, 3.0),
    ]
    data = str(folder / "data.jsonl")
    assert [one["text"] for one in asked("text", "--data", data)] == ["text 0 | x", "text 1 | x", "text 3 | x"]
    assert [one["text"] for one in asked("never", "--data", data)] == ["text 2 | x", "text 4 | x", "text 5 | x"]


def test_rows_are_printed_and_the_quarantine_takes_them(folder: Path) -> None:
    shown = done("ledger", str(folder), "-n", "1", "--data", str(folder / "data.jsonl"), "--quarantine", str(folder))
    assert shown.splitlines()[0].split() == [
        "sample",
        "source",
        "row",
        "visits",
        "tokens",
        "mean_loss",
        "last_loss",
        "last_step",
        "text",
    ]
    assert "text 3" in shown
    assert read_quarantine(folder) == {3}


def test_what_cannot_be_answered_is_said(folder: Path) -> None:
    assert "is not one of: top, never" in call("ledger", str(folder), "best").output
    refused = call("ledger", str(folder / "elsewhere"))
    assert refused.exit_code == 2
    assert "train with ledger=True" in refused.output
    assert "lists sources" in call("ledger", str(folder), "by-source", "--quarantine", str(folder)).output
