"""The table field -> check. The modules of checks fill it; test_every_field.py reads it."""

from __future__ import annotations

from collections.abc import Callable

from .bench import Bench

Check = Callable[[Bench], None]

CHECKS: dict[str, Check] = {}
MARKS: dict[str, list[str]] = {}
COMPANIONS: dict[str, str] = {}
"""Fields that act only beside another one, and the reason. Each has a check too: that this is said, or that the value
is carried to where the switch will look for it."""


def shows(*names: str, marks: str = "") -> Callable[[Check], Check]:
    """Makes a function the check of these fields, with marks of pytest. A field has one check."""

    def register(check: Check) -> Check:
        for name in names:
            assert name not in CHECKS, f"{name} has two checks"
            CHECKS[name] = check
            MARKS[name] = marks.split()
        return check

    return register


def companion(name: str, reason: str) -> Callable[[Check], Check]:
    """As `shows`, for a field without an effect of its own."""
    COMPANIONS[name] = reason
    return shows(name)
