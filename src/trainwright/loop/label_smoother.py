"""LabelSmoother: cross-entropy with smoothed targets (Szegedy et al. 2016, arXiv:1512.00567, section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from trainwright._types import IGNORE_INDEX, Nested, output_logits


@dataclass
class LabelSmoother:
    """Mixes the one-hot target with the uniform one: `(1 - epsilon) * nll + epsilon * mean over classes`.

    Args:
        epsilon: weight of the uniform target, 0 to 1.
        ignore_index: label that takes no part.
    """

    epsilon: float = 0.1
    ignore_index: int = IGNORE_INDEX

    def __call__(
        self,
        model_output: Nested,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Computes the smoothed loss of logits (batch, ..., classes) and labels (batch, ...), with its graph.

        Args:
            model_output: mapping with `logits`, or a tuple of which they are the first element.
            labels: int64; `ignore_index` where no label counts.
            shift_labels: whether position i is scored against label i + 1.
            num_items_in_batch: divisor of the sum; by default the number of labels that count.
        """
        logits: torch.Tensor = output_logits(model_output)
        if shift_labels:
            logits = logits[..., :-1, :].contiguous()
            labels = labels[..., 1:].contiguous()
        neg_log_prob = -functional.log_softmax(logits, dim=-1)
        targets = labels.unsqueeze(-1) if labels.dim() == neg_log_prob.dim() - 1 else labels
        ignored = targets.eq(self.ignore_index)
        nll = neg_log_prob.gather(dim=-1, index=targets.clamp(min=0)).masked_fill(ignored, 0.0)
        # Sum over classes in fp32: with half-precision logits and large vocabularies it overflows.
        uniform = neg_log_prob.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill(ignored, 0.0)
        count: torch.Tensor | int = (~ignored).sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(count, torch.Tensor):
            count = count.to(nll.device)
        nll_mean: torch.Tensor = nll.sum() / count
        uniform_mean: torch.Tensor = uniform.sum() / (count * neg_log_prob.shape[-1])
        return (1 - self.epsilon) * nll_mean + self.epsilon * uniform_mean
