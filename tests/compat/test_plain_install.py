"""What a plain installation has is enough: no door of ours needs a package that only some features need."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from .._support.subprocesses import run_python

SCRIPT = str(Path(__file__).with_name("plain_install.py"))
WITH_TRL = pytest.param("trl", marks=pytest.mark.skipif(find_spec("trl") is None, reason="needs trl"))


@pytest.mark.process
@pytest.mark.parametrize("extra", ["", WITH_TRL])
def test_every_door_opens(extra: str) -> None:
    run_python(SCRIPT, *extra.split())
