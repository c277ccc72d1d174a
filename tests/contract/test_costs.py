"""What `make test` leaves out for its cost: by a record that names tests which are there."""

from __future__ import annotations

import re

import pytest

from .._support import costs
from .._support.tiers import CASES_LIMIT_S, QUICK_LIMIT_S, affordable_cases


def test_each_recorded_test_is_there() -> None:
    """One that is renamed is measured anew: `make test ARGS=--store-costs`."""
    recorded = [name.split("::", 1) for name in costs.recorded_costs()]
    sources = {path: (costs.ROOT / path).read_text(encoding="utf-8") for path, _ in recorded}
    names = {path: set(re.findall(r"^ *(?:def|class) (\w+)", text, re.MULTILINE)) for path, text in sources.items()}
    assert [f"{path}::{name}" for path, name in recorded if not names[path].issuperset(name.split("::"))] == []


@pytest.mark.parametrize(
    ("cost_s", "num_cases", "cases"),
    [
        (0.0, 5, {0, 1, 2, 3, 4}),
        (CASES_LIMIT_S / 5, 5, {0, 1, 2, 3, 4}),
        (CASES_LIMIT_S / 5, 10, {0, 2, 4, 6, 8}),
        (QUICK_LIMIT_S, 1, {0}),
        (2 * QUICK_LIMIT_S, 1, set()),
        (2 * QUICK_LIMIT_S, 10, set()),
    ],
)
def test_as_many_cases_as_there_is_time_for(cost_s: float, num_cases: int, cases: set[int]) -> None:
    assert affordable_cases(cost_s, num_cases) == cases
