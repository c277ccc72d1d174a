"""Rows of the parity table on the stand-in accelerator, bit by bit against transformers' trainer there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..parity.rows import ROWS
from .children import on_the_standin

pytestmark = [pytest.mark.process, pytest.mark.framework]

IDS = list(dict.fromkeys(row.id for row in ROWS))
NUM_PARTS = 15  # of the table, each in a process of its own; `make test` runs the first
PARTS = [IDS[part::NUM_PARTS] for part in range(NUM_PARTS)]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_PARTS))])
def test_training_ends_with_the_weights_and_the_log_of_transformers(part: int, tmp_path: Path) -> None:
    found = on_the_standin("parity.differences", PARTS[part], folder=tmp_path)
    assert found["wrong"] == {}
    assert found["not_there"].keys() <= NOT_IN_THE_ORIGINAL


# Rows that transformers does not run on a device that it has no name for.
NOT_IN_THE_ORIGINAL: frozenset[str] = frozenset()
