"""Numbers with units, as people read them: sizes of memory, counts, durations."""

from __future__ import annotations

SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
DURATIONS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def size_text(num_bytes: float) -> str:
    """Returns a size: `1.234 GB`."""
    unit, name = next((one for one in SIZES if num_bytes >= one[0]), (1, "B"))
    return f"{num_bytes / unit:.4g} {name}"


def count_text(value: float) -> str:
    """Returns a number in three digits: `1.23 M`."""
    unit, name = next((one for one in COUNTS if abs(value) >= 0.9995 * one[0]), (1, ""))
    return f"{value / unit:.3g} {name}".rstrip()


def duration_text(seconds: float) -> str:
    """Returns a duration in its two largest units: `3 min 12 s`."""
    for unit, name, part, part_name in DURATIONS:
        if round(seconds) >= unit:
            whole, rest = divmod(round(seconds / part), unit // part)
            return f"{whole} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{seconds:.3g} s"
