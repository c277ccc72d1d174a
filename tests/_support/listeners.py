"""Which extensions of a run listen to an event."""

from __future__ import annotations

from typing import Any

from trainwright.loop.extension import Extensions


def find_listeners(extensions: Extensions, event: str) -> tuple[Any, ...]:
    """Returns the methods that a run calls at an event; none for an event that only `Extensions` itself calls."""
    tables = (extensions, extensions.saving, extensions.reporting)
    found: tuple[Any, ...] = next((getattr(table, event) for table in tables if event in vars(table)), ())
    return found
