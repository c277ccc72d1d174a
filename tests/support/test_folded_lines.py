"""Lines of the plan fit a terminal, and stay whole in a pipe."""

from __future__ import annotations

import sys

import pytest

from trainwright.support.log_handler import fold_line

LINE = "optimizer adamw_torch_fused, learning rate 0.0001, linear after 10 warm-up steps, on cpu in full precision"


def test_a_line_is_folded_below_its_first_word_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    first, second = fold_line(LINE).splitlines()
    assert len(first) <= 80
    assert second.startswith(" " * 10)
    assert f"{first} {second.lstrip()}" == LINE
    monkeypatch.setenv("COLUMNS", "120")
    assert fold_line(LINE) == LINE


def test_a_path_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    path = "/runs/with-a-long-name/and-another-one/checkpoint-1200"
    assert path in fold_line(f"resumes   {path}: step 1200, 3 batches into epoch 2").split()[1]


def test_a_line_stays_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert fold_line(LINE) == LINE
