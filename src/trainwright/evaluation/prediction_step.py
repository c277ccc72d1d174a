"""One batch of an evaluation: forward, and the output taken apart into loss, logits and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainwright._types import Batch
from trainwright.tensor_tree import nested_detach


def split_outputs(outputs: Any, ignore_keys: Sequence[str], *, has_loss: bool) -> Any:
    """What of a model's output is a prediction: all but the loss and the ignored entries; alone if it is one thing."""
    if isinstance(outputs, Mapping):
        skipped = {*ignore_keys, "loss"} if has_loss else set(ignore_keys)
        logits: Any = tuple(value for key, value in outputs.items() if key not in skipped and value is not None)
    else:
        logits = outputs[1:] if has_loss else outputs
        if isinstance(logits, (tuple, list)):  # without labels a model may return None where the loss would be
            logits = tuple(value for value in logits if value is not None)
    logits = nested_detach(logits)
    return logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits


def labels_of(inputs: Batch, label_names: Sequence[str]) -> Any:
    """The labels of a batch, alone if there is one kind; taken before the loss, which may pop them."""
    labels = nested_detach(tuple(inputs.get(name) for name in label_names))
    return labels[0] if len(labels) == 1 else labels


def prediction_step(
    inputs: Batch,
    *,
    label_names: Sequence[str],
    returns_loss: bool,
    loss_only: bool,
    ignore_keys: Sequence[str],
    loss_and_outputs: Callable[[Batch], tuple[torch.Tensor, Any]],
    outputs_only: Callable[[Batch], Any],
) -> tuple[torch.Tensor | None, Any, Any]:
    """Loss, logits and labels of a prepared batch, each None where there is none.

    `loss_and_outputs` and `outputs_only` run the model; the first is used when the batch has all labels, or when the
    model computes a loss without any.
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
