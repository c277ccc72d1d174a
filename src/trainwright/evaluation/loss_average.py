"""Mean loss of an evaluation, weighted by the number of items of each batch.

Worked example: batches of 3 and 1 label tokens with mean losses 2.0 and 6.0 come to (3 * 2.0 + 1 * 6.0) / 4 = 3.0, the
mean over tokens; the mean of the two means would be 4.0. Processes add up their sums and their numbers of items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class LossAverage:
    """Collects mean losses of batches with their numbers of items; read back once, at the end."""

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | int] = field(default_factory=list)

    def add(self, loss: torch.Tensor, weight: torch.Tensor | int) -> None:
        self.values.append(loss.detach().float() if loss.dim() == 0 else loss.detach().float().mean())
        self.weights.append(weight)

    def mean(self, *, skip_non_finite: bool, total: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """Returns the mean over the items of all processes; None where there was no loss.

        Args:
            skip_non_finite: leave out batches with a non-finite loss, where there are others.
            total: sums a tensor over all processes.
        """
        if not self.values:
            return None
        values = torch.stack(self.values).cpu().double()
        weights = torch.stack([torch.as_tensor(w).cpu() for w in self.weights]).double()
        counts = weights > 0
        finite = counts & torch.isfinite(values)
        sums = [_weighted(values, weights, counts), _weighted(values, weights, finite)]
        sums.append(torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)]))
        every, only_finite, unweighted = total(torch.stack(sums)).cpu()
        chosen = only_finite if skip_non_finite and only_finite[1] > 0 else every
        chosen = chosen if chosen[1] > 0 else unweighted
        return float(chosen[0] / chosen[1])


def _weighted(values: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.stack([(values[chosen] * weights[chosen]).sum(), weights[chosen].sum()])
