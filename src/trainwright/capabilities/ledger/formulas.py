"""The formula by which a model computes its loss from logits and labels, found by trial.

The usual formula whose mean equals the loss of the first micro-batch is used. The cross-entropy of tokens is not
recomputed if the backward pass keeps its log-probabilities, so that the values only need to be looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from trainwright._types import IGNORE_INDEX, Batch

IGNORED = -1.0  # value of a label that does not count: the losses here are never negative
AT_ONCE = 2**24  # limit of logits with log-probabilities in memory at once
MOST_DEPTH = 4  # operations between a cross-entropy and the loss
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2}  # tolerance for rounding of a loss
ROUNDING = 1e-4  # the same for other dtypes


class Formula(NamedTuple):
    """Formula by which a model computes its loss from logits and labels."""

    # "ce", "mse", "bce"; or, with token losses in place of logits, "given" by a loss kernel, or "kept" for the backward
    # pass (`find_kept_losses`)
    kind: str
    shifts: bool = False  # the logits at position i are compared with label i + 1
    smoothing: float = 0.0  # weight of the uniform target
    depth: int = 0  # operations below the loss at which the cross-entropy is, if it is "kept"

    def flat(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits (values, ...) and labels in a form that can be concatenated with other micro-batches."""
        if self.kind == "kept":
            return logits, labels
        if self.kind in ("mse", "bce"):
            return logits.reshape(len(labels), -1), labels.reshape(len(labels), -1)
        if logits.ndim == 2 and self.kind == "ce":
            return logits, labels.reshape(-1)
        if self.shifts:
            logits = logits[:, :-1]
            labels = labels[:, 1:]
        return logits.reshape(-1, *logits.shape[2:]), labels.reshape(-1)

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the values for flat logits and labels, float32."""
        if self.kind in ("given", "kept"):
            return logits.masked_fill(labels == IGNORE_INDEX, IGNORED)
        if self.kind != "ce":
            logits = logits.float()
            labels = labels.float()
            function = functional.mse_loss if self.kind == "mse" else functional.binary_cross_entropy_with_logits
            return function(logits, labels, reduction="none").mean(dim=1)
        size = max(AT_ONCE // logits.shape[-1], 1)
        parts = [
            functional.cross_entropy(one.float(), label, reduction="none", label_smoothing=self.smoothing)
            for one, label in zip(torch.split(logits, size), torch.split(labels, size), strict=True)
        ]
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        return values.masked_fill_(labels == IGNORE_INDEX, IGNORED)


def list_formulas(logits: torch.Tensor, labels: torch.Tensor, *, shifts: bool, smoothing: float) -> Iterator[Formula]:
    """Yields the formulas that may have produced a loss from tensors of these shapes, most likely first."""
    if not labels.is_floating_point():
        if labels.ndim >= 2 and logits.shape[:-1] == labels.shape:
            yield from (Formula("ce", one, smoothing) for one in (shifts, not shifts))
        elif logits.ndim == 2 and len(logits) == labels.numel() and logits.shape[1] > 1:
            yield Formula("ce", smoothing=smoothing)
        if labels.ndim == 2 and logits.shape == labels.shape:
            yield from (Formula("given", one) for one in (shifts, not shifts))
    if logits.numel() == labels.numel():
        yield from (Formula("mse"), Formula("bce"))


def find_formula(
    logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor, *, mean: float, shifts: bool, smoothing: float
) -> Formula | None:
    """Returns the formula by which a model computed the loss of a micro-batch; None if it is none of the known ones.

    Args:
        logits: of the micro-batch.
        labels: its labels, on the same device.
        loss: its loss, a scalar with its graph.
        mean: the mean loss of its labels, as the loss says.
        shifts: the model compares the logits at a position with the next label.
        smoothing: weight of the uniform target.
    """
    logits = logits.detach()
    labels = labels.detach()
    allowed = max(TOLERANCE.get(one.dtype, ROUNDING) for one in (logits, loss))
    for formula in list_formulas(logits, labels, shifts=shifts, smoothing=smoothing):
        values = formula.losses(*formula.flat(logits, labels))
        found = float(values[values != IGNORED].mean())
        if abs(found - mean) <= allowed * max(abs(mean), 1.0):
            may_be_kept = formula.kind == "ce" and labels.ndim == 2 and not smoothing
            kept = _find_kept(loss, values, labels, shifts=formula.shifts) if may_be_kept else None
            return formula if kept is None else kept
    return None


def _find_kept(loss: torch.Tensor, values: torch.Tensor, labels: torch.Tensor, *, shifts: bool) -> Formula | None:
    """Returns where the backward pass of a micro-batch keeps the losses of its tokens; None if it does not."""
    values = values[values != IGNORED]
    for depth in range(MOST_DEPTH):
        kept = find_kept_losses(loss, depth)
        if kept is not None and kept[0].numel() in (labels.numel(), labels.numel() - len(labels) * shifts):
            counted = kept[0][kept[1] != IGNORE_INDEX]
            is_same = counted.shape == values.shape and torch.allclose(
                counted.float(), values, rtol=ROUNDING, atol=ROUNDING
            )
            return Formula("kept", shifts, depth=depth) if is_same else None
    return None


def find_kept_losses(loss: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the losses of the labels of a cross-entropy, and the labels, from the tensors its backward pass keeps.

    `depth`: operations between the cross-entropy and the loss, such as a division. None if another operation is found.
    """
    node: Any = loss.grad_fn  # torch has no types for the nodes of its graph
    for _ in range(depth):
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
    if type(node).__name__ != "NllLossBackward0":
        return None
    with torch.no_grad():
        labels = node._saved_target
        return functional.nll_loss(node._saved_self, labels, reduction="none", ignore_index=IGNORE_INDEX), labels


def find_tensors(
    outputs: Any, inputs: Batch, collated: Batch, *, given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns logits, or their substitute, and labels of a forward pass on one device; None if there are none."""
    if not hasattr(inputs, "get") or not hasattr(collated, "get"):  # labels are found by name
        return None
    logits = given
    if logits is None and isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif logits is None:
        many = outputs if isinstance(outputs, (tuple, list)) else ()
        logits = next((one for one in many if isinstance(one, torch.Tensor) and one.ndim), None)
    for name in ("shift_labels", "labels"):
        labels = inputs.get(name, collated.get(name))
        if isinstance(labels, torch.Tensor) and labels.ndim and isinstance(logits, torch.Tensor) and logits.ndim:
            return logits, labels if labels.device == logits.device else labels.to(logits.device, non_blocking=True)
    return None
