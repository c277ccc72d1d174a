"""Results of evaluations, predictions and trainings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trainwright._types import Nested


class EvalPrediction:
    """Argument of `compute_metrics`. Unpacks as `predictions, labels` (and inputs, losses where asked for).

    Attributes:
        predictions: array, or tuple of arrays, with one row for each sample.
        label_ids: labels, shaped as the dataset has them.
        inputs: the model's main input, with `include_for_metrics=["inputs"]`.
        losses: one loss for each sample (that of its batch), with `include_for_metrics=["loss"]`.
    """

    def __init__(self, predictions: Nested, label_ids: Nested, inputs: Nested = None, losses: Nested = None) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses
        self.elements: tuple[Nested, ...] = (predictions, label_ids)
        self.elements += tuple(extra for extra in (inputs, losses) if extra is not None)

    def __iter__(self) -> Iterator[Nested]:
        return iter(self.elements)

    def __getitem__(self, index: int) -> Nested:
        if not 0 <= index < len(self.elements):
            raise IndexError(f"index {index} of an EvalPrediction with {len(self.elements)} elements")
        return self.elements[index]


class EvalLoopOutput(NamedTuple):
    """Result of an evaluation loop: arrays with one row for each sample (or tuples of them), metrics, samples."""

    predictions: Nested
    label_ids: Nested
    metrics: dict[str, float] | None
    num_samples: int | None


class PredictionOutput(NamedTuple):
    """Result of `predict()`: arrays with one row for each sample (or tuples of them), and metrics."""

    predictions: Nested
    label_ids: Nested
    metrics: dict[str, float] | None


class TrainOutput(NamedTuple):
    """Result of `train()`: optimizer steps done, mean loss, and metrics of speed."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
