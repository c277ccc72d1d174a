"""Quarantine: samples that are left out of training, as a file of the output directory has them, one a line.

Of samples 0 to 5, with 2 and 3 in quarantine, an epoch in the order 4 2 0 3 5 1 becomes 4 0 5 1. A position in it is
one of the whole order: after 4 0 it is 4, of 6. A resume finds it whatever is in quarantine then: what comes before it
is done, and what comes after it is trained unless it is left out.

Where the order of an epoch cannot be computed (a sampler's), and in the rest of an epoch in which samples come into
quarantine, it keeps its length: the next sample of the dataset takes the place of one that is left out. Batches that
are formed by length lose the sample.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from trainwright._types import is_count
from trainwright.errors import DataError

QUARANTINE_NAME = "quarantine.jsonl"


def read_quarantine(folder: str | Path) -> set[int]:
    """Reads which samples are left out in an output directory; none if there is no file.

    A last line that was not finished is not read; a DataError if another one holds what no run writes.
    """
    path = Path(folder) / QUARANTINE_NAME
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    found = set()
    for number, line in enumerate(lines, start=1):
        try:
            sample = json.loads(line)["sample"]
        except (ValueError, TypeError, KeyError, RecursionError):
            sample = None
        if not is_count(sample):
            raise DataError(f'{path}, line {number}: {line[:80]!r} is not of the form {{"sample": 17}}.')
        found.add(sample)
    return found


def add_to_quarantine(folder: str | Path, samples: Iterable[int]) -> None:
    """Appends indices of samples to the file in an output directory, which is made if it is not there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / QUARANTINE_NAME).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps({"sample": int(sample)}) + "\n" for sample in samples))


def substitutes(left_out: Collection[int], num_samples: int) -> dict[int, int]:
    """Returns which sample takes the place of each one that is left out; a DataError if none would be left.

    Indices beyond the end of the dataset have no effect.
    """
    left_out = {sample for sample in left_out if sample < num_samples}
    if left_out and len(left_out) >= num_samples:
        raise DataError(f"All {num_samples} samples are in quarantine. Delete {QUARANTINE_NAME}, or lines of it.")
    found: dict[int, int] = {}
    for sample in left_out:
        other = sample
        while other in left_out:
            other = (other + 1) % num_samples
        found[sample] = other
    return found


def without(group: list[Any], left_out: Collection[int]) -> list[Any]:
    """Returns a batch formed by length (indices, or rows of pieces of samples) without what is left out of it."""
    if group and isinstance(group[0], list):
        return [row for one in group if (row := without(one, left_out))]
    return [one for one in group if (one[0] if isinstance(one, tuple) else one) not in left_out]
