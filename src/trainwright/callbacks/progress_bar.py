"""The bar of a training: tqdm's, with a rate and a time left that evaluations do not disturb, and the latest values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm

FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{left}, {rate_fmt}{postfix}]"
WITHOUT_END = "{n_fmt} steps [{elapsed}, {rate_fmt}{postfix}]"
SHOWN = {"loss": "loss", "learning_rate": "lr", "train_tokens_per_second": "tokens/s"}


def training_bar(*, total: int | None, done: int, step_s: Callable[[], float | None],
                 left_s: Callable[[], float | None]) -> Any:  # fmt: skip
    """A bar that asks for the seconds of a step and of what is left."""

    class Bar(tqdm):  # type: ignore[type-arg]  # which class it is depends on where it is drawn: terminal or notebook
        @property
        def format_dict(self) -> Any:
            values = super().format_dict
            step, left = step_s(), left_s()
            values["rate"] = 1 / step if step else values["rate"]
            values["left"] = "?" if left is None else tqdm.format_interval(round(left))
            return values

    return Bar(total=total, initial=done, dynamic_ncols=True, unit=" steps",
               bar_format=WITHOUT_END if total is None else FORMAT)  # fmt: skip


def latest(logs: Mapping[str, Any]) -> str:
    """What the bar has room for."""
    found = [f"{short} {compact(logs[name])}" for name, short in SHOWN.items() if isinstance(logs.get(name), float)]
    return ", ".join(found)


def compact(value: float) -> str:
    """1234567.0 -> 1.23M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
