"""Metrics for the console, and as files at the root of the output directory."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright._types import write_text


def metrics_format(metrics: Mapping[str, object]) -> dict[str, object]:
    """Formats metrics for the console: memory in MB, times as h:mm:ss, FLOPs in GF, other floats to four decimals."""
    return {name: _readable(name, value) for name, value in metrics.items()}


def print_metrics(split: str, metrics: Mapping[str, object]) -> None:
    """Prints the metrics of a split ("train", "eval", ...), one a line."""
    shown = metrics_format(metrics)
    names = max((len(str(name)) for name in shown), default=0)
    values = max((len(str(value)) for value in shown.values()), default=0)
    print(f"***** {split} metrics *****")
    for name in sorted(shown):
        print(f"  {name: <{names}} = {shown[name]!s:>{values}}")


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


def plain_numbers(value: Any) -> Any:  # of the type that came in, but for the numbers
    """Converts numpy scalars and one-element tensors at any depth into Python numbers, for JSON."""
    if isinstance(value, Mapping):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain_numbers(item) for item in value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


denumpify_detensorize = plain_numbers  # the original's name


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    write_text(path, json.dumps(values, indent=4, sort_keys=True))


def _readable(name: str, value: Any) -> object:  # any value that a user logs
    if "_mem_" in name:
        return f"{value >> 20}MB"
    if "_runtime" in name:
        seconds = datetime.timedelta(seconds=int(value))
        return f"{seconds}.{int((abs(value) % 1) * 100):02d}"
    if name == "total_flos":
        return f"{int(value) >> 30}GF"
    return round(value, 4) if isinstance(value, float) else value
