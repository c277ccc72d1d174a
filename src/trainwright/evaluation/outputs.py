"""Results of evaluations, predictions and trainings, and the step that makes them of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trainwright._types import Batch, Nested
from trainwright.tensor_tree import nested_detach


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


# -- one batch: forward, and the output split into loss, logits and labels ---------------------------------------------


def split_outputs(outputs: Nested, ignore_keys: Sequence[str], *, has_loss: bool) -> Nested:
    """Returns the predictions in a model's output, detached, alone if there is one: no loss and no ignored entry.

    The loss is the entry `loss` of a mapping, the first element of a tuple, if `has_loss`.
    """
    if isinstance(outputs, Mapping):
        skipped = {*ignore_keys, "loss"} if has_loss else set(ignore_keys)
        logits: Nested = tuple(value for key, value in outputs.items() if key not in skipped and value is not None)
    else:
        logits = outputs[1:] if has_loss else outputs
        if isinstance(logits, (tuple, list)):  # without labels a model may return None where the loss would be
            logits = tuple(value for value in logits if value is not None)
    logits = nested_detach(logits)
    return logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits


def labels_of(inputs: Batch, label_names: Sequence[str]) -> Nested:
    """Returns the labels of a batch, detached, alone if there is one kind; read before the loss, which may pop them."""
    labels = nested_detach(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def prediction_step(
    inputs: Batch,
    *,
    label_names: Sequence[str],
    returns_loss: bool,
    loss_only: bool,
    ignore_keys: Sequence[str],
    loss_and_outputs: Callable[[Batch], tuple[torch.Tensor, Nested]],
    outputs_only: Callable[[Batch], Nested],
) -> tuple[torch.Tensor | None, Nested, Nested]:
    """Returns loss, logits and labels of a batch on the device, detached, each None where there is none.

    `loss_and_outputs` runs the model where the batch has all labels, or none are needed for a loss (`returns_loss`);
    `outputs_only` runs it without a loss. With `loss_only`, logits and labels are left out.
    """
    has_labels = bool(label_names) and all(inputs.get(name) is not None for name in label_names)
    with_loss = has_labels or (not label_names and returns_loss)
    labels = labels_of(inputs, label_names) if with_loss and not loss_only else None
    with torch.no_grad():
        if with_loss:
            loss, outputs = loss_and_outputs(inputs)
            loss = loss.detach() if loss.dim() == 0 else loss.detach().mean()
        else:
            loss, outputs = None, outputs_only(inputs)
    if loss_only:
        return loss, None, None
    return loss, split_outputs(outputs, ignore_keys, has_loss=with_loss), labels
