"""Metrics for the console, and as files at the root of the output directory."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright._types import plain_numbers, printable, recordable, write_text

logger = logging.getLogger(__name__)


def metrics_format(metrics: Mapping[str, object]) -> dict[str, object]:
    """Formats metrics for the console: memory in MB, times as h:mm:ss, FLOPs in GF, other floats to four decimals.

    Args:
        metrics: values by name.

    Returns:
        A new dict with the formatted values.
    """
    return {name: _readable(name, value) for name, value in metrics.items()}


def print_metrics(split: str, metrics: Mapping[str, object]) -> None:
    """Prints the metrics of a split ("train", "eval", ...), one a line."""
    shown = {printable(str(name)): printable(str(value)) for name, value in metrics_format(metrics).items()}
    names = max((len(name) for name in shown), default=0)
    values = max((len(value) for value in shown.values()), default=0)
    print(f"***** {printable(split)} metrics *****")
    for name in sorted(shown):
        print(f"  {name: <{names}} = {shown[name]:>{values}}")


def save_metrics(output_dir: str | Path, split: str, metrics: Mapping[str, object], *, combined: bool = True) -> None:
    """Writes metrics to a file.

    Args:
        output_dir: folder; made if missing.
        split: the file is `<split>_results.json`.
        metrics: JSON values by name.
        combined: add them to `all_results.json` too.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / f"{split}_results.json", dict(metrics))
    if combined:
        path = folder / "all_results.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _write_json(path, {**before, **metrics})


def record_of(values: Mapping[str, object], named: set[str]) -> dict[str, Any]:  # JSON
    """Returns the values that the record of a run can hold; warns about each other one that is not `named` already."""
    dropped: dict[str, str] = {}
    kept = recordable(values, dropped)
    for name in (name for name in dropped if name not in named):
        logger.warning(
            "The metric %s is %s, which the record of a run cannot hold: it is left out of log_history and "
            "trainer_state.json. Return numbers (or text, or lists of them) from compute_metrics, and log them.",
            printable(name), dropped[name],
        )  # fmt: skip
    named.update(dropped)
    return kept


denumpify_detensorize = plain_numbers  # the original's name


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    write_text(path, json.dumps(record_of(values, set()), indent=4, sort_keys=True))


def _readable(name: str, value: Any) -> object:  # any value that a user logs
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        seconds = datetime.timedelta(seconds=int(value))
        return f"{seconds}.{int((abs(value) % 1) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
