"""The fixture of the checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .bench import Bench, untouched_globals


@pytest.fixture
def bench(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Bench]:
    with untouched_globals():
        yield Bench(tmp_path, monkeypatch, capsys, caplog)
