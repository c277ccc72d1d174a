"""What evaluations and runs hand over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class EvalPrediction:
    """What `compute_metrics` receives. Unpacks as `predictions, labels` (and inputs, losses where asked for).

    Attributes:
        predictions: array, or tuple of arrays, with one row for each sample.
        label_ids: labels, shaped as the dataset has them.
        inputs: the model's main input, with `include_for_metrics=["inputs"]`.
        losses: one loss for each sample (that of its batch), with `include_for_metrics=["loss"]`.
    """

    def __init__(self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements: tuple[Any, ...] = (predictions, label_ids)
        self.elements += tuple(extra for extra in (inputs, losses) if extra is not None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"index {index} of an EvalPrediction with {len(self.elements)} elements")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]
