"""Models and trainers in a module that another process can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MeanOfLabels(nn.Module):
    """Its loss is a mean over the labels of a batch that count: batches with fewer of them count too much."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class SumOfLabels(MeanOfLabels):
    """Its loss grows with the batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = super().forward(x, labels)
        return {**outputs, "loss": outputs["loss"] * len(x)}


class OwnGenerator(MeanOfLabels):
    """Draws from a generator that no checkpoint knows."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.number += 1 if self.training else 0
        return super().forward(x * (1 + 0.1 * self.number), labels)


class Normed(MeanOfLabels):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.norm(x), labels)


def ragged(size: int = 16) -> list[dict[str, Any]]:
    """Six labels a sample, of which up to five are masked."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(6, 4, generator=generator),
            "labels": torch.tensor([(i + j) % 3 if j >= i % 6 else -100 for j in range(6)]),
        }
        for i in range(size)
    ]
