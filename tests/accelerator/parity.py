"""Rows of the parity table on the stand-in, in both libraries; runs in a process of its own."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

from ..parity.rows import ROWS
from ..parity.run import train
from ..parity.sides import OURS, REFERENCE, assert_same


def differences(folder: Path, ids: list[str]) -> dict[str, Any]:
    """Returns the rows that differ, with the reason, and those that the original does not run."""
    wrong: dict[str, str] = {}
    not_there: dict[str, str] = {}
    warnings.simplefilter("ignore")
    for row in ROWS:
        if row.id not in ids:
            continue
        try:
            theirs = train(row, REFERENCE, use_cpu=False)
        except Exception as error:  # what it refuses or cannot do on this device
            not_there[row.id] = f"{type(error).__name__}: {error}"
            continue
        try:
            ours = train(row, OURS, use_cpu=False)
            assert all(value.device.type == "accel" for value in ours.weights.values())  # type: ignore[union-attr]
            assert_same(ours, theirs)
        except Exception as error:
            wrong[row.id] = f"{error}\n{''.join(traceback.format_exception(error)[-3:])}"
    return {"wrong": wrong, "not_there": not_there}
