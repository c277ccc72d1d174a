"""Two processes generate what one does: every sample once, in order, whatever the lengths on either of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .._support.two_processes import Done, run

# Seconds on a quiet machine; both launches may have to wait for the first test.
pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(640)]
SCRIPT = Path(__file__).with_name("generates.py")
ROWS = ("t5-1", "t5-3", "llama-1", "llama-3")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("two")
    return run(SCRIPT, str(folder), folder=folder, timeout_s=300)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    return run(SCRIPT, str(folder), folder=folder, processes=1, timeout_s=300).told[0]


@pytest.mark.parametrize("row", ROWS)
def test_predictions_and_labels_are_those_of_one_process(done: Done, alone: dict[str, Any], row: str) -> None:
    for rank in (0, 1):
        told = done.told[rank][row]
        assert cut(told["predictions"]) == cut(alone[row]["predictions"])
        assert cut(told["labels"]) == cut(alone[row]["labels"])
        assert told["rows"] == 7
        assert told["loss"] == pytest.approx(alone[row]["loss"], rel=1e-6)


@pytest.fixture(scope="module", params=["fsdp", "zero"])
def in_parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    if request.param == "zero":
        pytest.importorskip("deepspeed", reason="heavy; installed for the slow tests (requirements-engines.txt)")
    folder = tmp_path_factory.mktemp("parts")
    environment = {"DS_ACCELERATOR": "cpu"}
    return run(SCRIPT, str(folder), request.param, folder=folder, timeout_s=300, environment=environment)


@pytest.mark.parametrize("row", ROWS)
def test_a_model_in_parts_generates_the_same(in_parts: Done, alone: dict[str, Any], row: str) -> None:
    for rank in (0, 1):
        told = in_parts.told[rank][row]
        assert cut(told["predictions"]) == cut(alone[row]["predictions"])
        assert told["loss"] == pytest.approx(alone[row]["loss"], rel=1e-5)
        assert told["during"] == alone[row]["during"]


@pytest.mark.parametrize("row", ROWS)
def test_evaluations_within_a_run_see_the_same(done: Done, alone: dict[str, Any], row: str) -> None:
    assert done.told[0][row]["during"] == done.told[1][row]["during"] == alone[row]["during"]
    assert len(alone[row]["during"]) == 2


def cut(rows: list[list[int]]) -> list[list[int]]:
    """Without what fills a row up: how far depends on what else is in its batch."""
    return [[token for token in row if token not in (0, -100)] for row in rows]
