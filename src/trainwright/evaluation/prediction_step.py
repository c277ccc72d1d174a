"""One batch of an evaluation: forward, and the output split into loss, logits and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from trainwright._types import Batch, Nested
from trainwright.tensor_tree import nested_detach


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
