"""Units as people read them."""

from __future__ import annotations

import pytest

from trainwright.support.units import count_text, duration_text, size_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.01234, "0.0123 s"),
        (12.34, "12.3 s"),
        (59.7, "1 min"),
        (192, "3 min 12 s"),
        (3599.8, "1 h"),
        (7320, "2 h 2 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_counts_and_sizes_take_the_unit_that_leaves_few_digits() -> None:
    assert [count_text(value) for value in (0, 1e-5, 7, 999.4, 999.9, 1234567.0, 8e9, -5000)] == [
        "0",
        "1e-05",
        "7",
        "999",
        "1 k",
        "1.23 M",
        "8 B",
        "-5 k",
    ]
    assert [size_text(size) for size in (7, 1764, 51_250_000_000, 2e15)] == ["7 B", "1.764 KB", "51.25 GB", "2000 TB"]
