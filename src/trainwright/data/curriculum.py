"""The former place of `Curriculum` and `LedgerColumns`, which pickles name. They are public in `trainwright`."""

from __future__ import annotations

from typing import Any

from trainwright.capability_table import CAPABILITIES, load


def __getattr__(name: str) -> Any:
    return load(f"{CAPABILITIES}.curriculum.curriculum:{name}")
