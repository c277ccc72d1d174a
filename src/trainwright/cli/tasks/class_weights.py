"""Weights of classes in the training loss: in balance with the training rows, or as the file lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from trainwright.cli.tasks.source import Labels, TaskSource
from trainwright.errors import did_you_mean
from trainwright.support.loss_normalization import LossOutput

BALANCED = "balanced"


class WeightedLoss:
    """Cross-entropy in which each sample has the weight of its class, as a `compute_loss_func`.

    The loss of a step is sum(w l) / sum(w) over all its samples, as torch's cross_entropy with `weight` has it for a
    batch. Evaluations take the plain mean: it can be compared between runs with other weights or none, and is the one
    that `trainwright eval` finds later.

    Args:
        named: weight of each label, in the order of their numbers.
    """

    def __init__(self, named: Mapping[str, float]) -> None:
        self.named = dict(named)
        self._weights = torch.tensor(list(named.values()), dtype=torch.float32)

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> LossOutput:
        """Returns the loss of a micro-batch, weighted if it has a graph."""
        losses = functional.cross_entropy(outputs["logits"].float(), labels, reduction="none")
        if not torch.is_grad_enabled():
            return LossOutput(losses.mean(), num_items=len(losses), sample_losses=losses)
        weights = self._weights.to(losses.device)[labels]
        total = weights.sum()
        return LossOutput((losses * weights).sum() / total, num_items=total, sample_losses=losses.detach())


def find_weighted_loss(material: TaskSource, labels: Labels, role: str) -> WeightedLoss | None:
    """Returns the loss with the weights of `data.class_weights`; None without them."""
    given = material.recipe.data.class_weights
    if given is None:
        return None
    if isinstance(given, dict):
        return WeightedLoss(_listed(material, labels, given))
    counts = Counter(labels.find(cell) for cell in material.column(material.train, role))
    missing = [name for number, name in enumerate(labels.names) if not counts[number]]
    if missing:
        material.wrong(
            f"the label {missing[0]} has no training row, so it cannot be balanced. Remove it from data.labels, or "
            "list the weights.",
            "data",
            "class_weights",
        )
    num_rows = counts.total()
    return WeightedLoss(
        {name: num_rows / (len(labels.names) * counts[number]) for number, name in enumerate(labels.names)}
    )


def _listed(material: TaskSource, labels: Labels, given: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the weights as the file lists them, 1 for a label that it leaves out."""
    found = dict.fromkeys(labels.names, 1.0)
    for label, weight in given.items():
        name = str(label)
        if name not in found:
            hint = did_you_mean(name, labels.names)
            material.wrong(
                f"there is no label {name!r}.{hint} Labels: {', '.join(labels.names[:8])}.", "data", "class_weights"
            )
        found[name] = float(weight)
    return found


def describe_weights(named: Mapping[str, float]) -> str:
    """Describes weights in a line."""
    return ", ".join(f"{name} {weight:.4g}" for name, weight in named.items())
