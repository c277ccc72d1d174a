"""The host does not wait for the device to cut a batch that was copied ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from .children import on_the_standin

pytestmark = pytest.mark.process


def test_a_batch_that_was_copied_ahead_is_cut_without_a_wait(tmp_path: Path) -> None:
    found = on_the_standin("long_context_cuts.waits", folder=tmp_path)
    assert len(found) == 16
    for name, of in found.items():
        _, rows, how = name.split(", ")
        assert of["masked"] is (rows in ("padded", "packed")), name
        assert of["waits"] == (0 if how == "prefetched" else 1), name
