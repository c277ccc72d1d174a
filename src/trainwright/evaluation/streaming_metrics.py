"""Metrics with a state of their own: any object with `update` (or `add_batch`) and `compute`.

torchmetrics and `evaluate` have such objects; their names for the two arguments are translated. They get the output of
the model: logits, unless `preprocess_logits_for_metrics` changes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainwright._types import Nested, python_number
from trainwright.errors import DataError
from trainwright.tensor_tree import nested_numpify

PREDICTIONS = ("predictions", "preds", "pred", "y_pred", "logits", "input")
REFERENCES = ("references", "target", "targets", "labels", "label_ids", "y_true")


def is_streaming(metric: object) -> bool:
    """Returns True if a metric has a state of its own, and is no function of an EvalPrediction."""
    feeds = callable(getattr(metric, "update", None)) or callable(getattr(metric, "add_batch", None))
    return feeds and callable(getattr(metric, "compute", None)) and not isinstance(metric, type)


class StreamingMetric:
    """Runs one evaluation with such an object, which is reset first, and moved to the device if it can move."""

    def __init__(self, metric: Any, device: torch.device | None = None) -> None:
        self._metric = metric
        self._takes_arrays = not callable(getattr(metric, "update", None))
        self._feed: Callable[..., object] = metric.add_batch if self._takes_arrays else metric.update
        self._names = _names_of(self._feed)
        self._name = type(metric).__name__
        if callable(getattr(metric, "reset", None)):
            metric.reset()
        if isinstance(metric, torch.nn.Module) and device is not None:
            metric.to(device)

    @property
    def adds_processes_up(self) -> bool:
        """True if `compute` itself combines the processes, so that each adds its own batches."""
        parts = [*self._metric.values()] if isinstance(self._metric, torch.nn.ModuleDict) else [self._metric]
        return bool(parts) and all(callable(getattr(part, "sync", None)) for part in parts)

    def add(self, predictions: Nested, references: Nested) -> None:
        """Adds one batch: predictions and labels, with one row for each sample."""
        if self._takes_arrays:
            predictions, references = nested_numpify(predictions), nested_numpify(references)
        if self._names is None:
            self._feed(predictions, references)
        else:
            self._feed(**dict(zip(self._names, (predictions, references), strict=True)))

    def result(self) -> dict[str, Any]:
        """Computes the metric of all batches: a dict, or a number that is named after the metric's class."""
        value = self._metric.compute()
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(python_number(value), (int, float)):
            return {self._name: value}
        raise DataError(
            f"{self._name}.compute() returned a {type(value).__name__}; it must return a dict of names and numbers, or "
            "one number."
        )


def _names_of(feed: Callable[..., object]) -> tuple[str, str] | None:
    """Returns the names of a metric's parameters for predictions and references; None to pass them by position."""
    try:
        parameters = inspect.signature(feed).parameters
    except (TypeError, ValueError):
        return None
    found = [next((name for name in names if name in parameters), None) for names in (PREDICTIONS, REFERENCES)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])
