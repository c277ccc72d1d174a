"""LossRule: the only arithmetic on a loss between the model's output and `backward`.

A window is the micro-batches of one optimizer step. Two kinds of losses come in:

    counted   the model (or `compute_loss_func`) got the number of items in the window and divided its sum by it.
              Micro-batch losses then add up to the window's mean; nothing is left to do.
    mean      each micro-batch came as its own mean. The window's loss is the mean of these means: divide by the
              number of micro-batches.

Which of them the user's own code returns cannot be read from its signature: its loss is computed once more with twice
the number of items. It is half as large if it is counted, and unchanged if it is a mean (`LossFinding`).

Worked example: a window of two micro-batches with 3 and 1 label tokens, losses per token (1, 2, 3) and (6).
    counted   6/4 + 6/4          = 3.0     the mean over the 4 tokens, as one batch of both would give
    mean      (2.0 + 6.0) / 2    = 4.0     the original's arithmetic for modules that return a mean

Items are counted as the loss counts them: a causal loss compares position i with label i + 1, so label 0 is never
a target and must not enter the divisor; with sequences of S tokens that would be wrong by (S - 1)/S.

    items     a mean again, but weighted by the items it was taken over (`loss_weighting="items"`; the default for
              whatever gets the number of items and ignores it, as BERT does): the window's loss is the mean over all
              its items, whatever the micro-batches' sizes:  2.0 * 3/4 + 6.0 * 1/4 = 3.0

An auxiliary loss that a model adds to its own (a mixture of experts' balance) is a mean over each micro-batch, not a
share of the window's sum: it is weighted by the micro-batch's share of the window's samples, so that a window's
auxiliary loss does not grow with the number of its micro-batches.

    LossOutput  the loss function itself says over how many items its mean is taken: a `LossOutput` with `num_items`.
                The window's total is known when its last micro-batch is done, so gradients of loss x items are added
                up and divided by the items of all micro-batches and processes before they are clipped.

With P processes that average gradients, a counted loss was divided by the items of all processes, so it is multiplied
by P to undo the averaging. The tail of an epoch may give them unequal parts: a mean is then weighted by its part, and a
filler batch, which keeps a process in step, has weight 0 and its items are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from trainwright._types import IGNORE_INDEX, Batch, Model, Nested, TailBatch, output_logits
from trainwright.support.counterparts import Counterpart

# Factor of losses that are multiplied by their items until their sum is known, for the range of fp16. A power of two
# rounds nothing.
ITEM_SCALE = 2.0**-10
EXACT_IN_FP32 = 2**24  # up to here fp32 has all whole numbers


@dataclass
class LossOutput:
    """Loss of a micro-batch that says how it is normalised; `compute_loss`, `compute_loss_func` or a model returns it.

    The loss of a step is the mean over the items of all its micro-batches and processes, and that of an evaluation the
    mean over the items of all batches. No setting of the arguments or the trainer changes that.

    Args:
        loss: mean over `num_items`, a scalar with its graph.
        num_items: items of this micro-batch that the mean is taken over: a number, or a scalar tensor, which is not
            read back. None: nothing is said, and the loss counts as a tensor without a `LossOutput` does.
        metrics: name -> number for `Trainer.record`, or a dict of its arguments. A number is a mean over `num_items`.
        outputs: predictions of a model in addition to its loss: a mapping, or one value.
        sample_losses: loss of each sample of the micro-batch, for the ledger (`ledger=True`); detached.

    Example:
        >>> return LossOutput(losses[mask].mean(), num_items=mask.sum(), metrics={"margin": margin})
    """

    loss: torch.Tensor
    num_items: torch.Tensor | float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)  # numbers, scalar tensors, and dicts of arguments
    outputs: Any = None  # returned by the user's model
    sample_losses: torch.Tensor | None = None

    def predictions(self) -> Mapping[str, Any]:
        """Returns `outputs` by name."""
        return self.outputs if isinstance(self.outputs, Mapping) else {"outputs": self.outputs}

    def recorded(self) -> dict[str, dict[str, Any]]:
        """Returns the arguments of `record` for each metric."""
        weight = {} if self.num_items is None else {"weight": self.num_items}
        return {
            name: dict(value) if isinstance(value, Mapping) else {"value": value, **weight}
            for name, value in self.metrics.items()
        }

    def with_items(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss and its items as a scalar; of a loss over no items, which may be NaN, 0 and 0."""
        given: Any = 0 if stands_in(batch) else self.num_items
        items = given.detach() if isinstance(given, torch.Tensor) else torch.full((), given, device=self.loss.device)
        items = items.to(self.loss.device, torch.float32)
        return torch.where(items > 0, self.loss, 0.0), items


# So that wrappers of models (FSDP, DDP) find the tensors.
torch.export.register_dataclass(LossOutput, serialized_type_name="trainwright.LossOutput")


class LossFinding(Enum):
    """How a loss changed when it was computed once more with twice the number of items."""

    DIVIDED = "divided"  # half as large
    MEAN = "mean"  # unchanged
    MIXED = "mixed"  # anything else


TOLERANCE = 1e-4  # relative; a loss of lower precision is compared to a few of its roundings


def compare_losses(loss: float, with_twice: float, *, rounding: float) -> LossFinding | None:
    """Returns what a loss is, given its value with the number of items and with twice that number.

    `rounding` is the relative precision of the loss. None if the values show nothing: they are zero, or not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(with_twice)) or loss == 0.0:
        return None
    tolerance = max(TOLERANCE, 4 * rounding)
    if math.isclose(with_twice, loss, rel_tol=tolerance):
        return LossFinding.MEAN
    if math.isclose(2 * with_twice, loss, rel_tol=tolerance):
        return LossFinding.DIVIDED
    return LossFinding.MIXED


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """Settled when a run (or an evaluation) starts; one that `is_open`, at its first micro-batch."""

    counts_items: bool = False  # the model's forward or `compute_loss_func` takes `num_items_in_batch`
    shifts_labels: bool = False  # label 0 of each row is never a target
    # True: losses arrive scaled for the window; False: they are means; None: counted losses are scaled
    is_scaled: bool | None = None
    has_loss_func: bool = False  # a `compute_loss_func` makes the loss, which is taken as scaled without a count too
    weights_items: bool = False  # weigh the mean of a micro-batch by its items
    is_open: bool = False  # the loss is the user's own: whether it is a mean is found by a `LossFinding`
    is_mean: bool = False  # it was found to be one, although it was given the count
    aux_coefficient: float = 0.0  # factor with which the model added its output `aux_loss` to its loss; 0: it adds none
    num_processes: int = 1  # processes that average gradients, if items are counted over all of them; else 1

    def count(self, window: Sequence[Batch]) -> torch.Tensor | None:
        """Returns the label items of a window that enter the loss, a scalar on the labels' device; None if unused."""
        if not (self.counts_items or self.weights_items) or not window or not has_labels(window[0]):
            return None
        try:
            # One operation less: a float that is small enough counts as exactly as an integer.
            num_labels = sum(self._targets(batch).numel() for batch in window)
            is_small = self.num_processes == 1 and num_labels <= EXACT_IN_FP32
            dtype = torch.float32 if is_small else None
            counts = [self._num_items(batch, dtype) for batch in window]
        except (TypeError, AttributeError):  # labels that are no single tensor (object detection): nothing to count
            return None
        return counts[0] if len(counts) == 1 else torch.stack(counts).sum()

    def weight(self, batch: Batch, label_names: Sequence[str], batch_size: int) -> torch.Tensor | int:
        """Over how many items the mean loss of an evaluation batch was taken: label items, or samples without them."""
        if type(batch) is not dict:
            if not isinstance(batch, Mapping):  # a list, a tuple, an object: its labels have no name
                return batch_size
            if stands_in(batch):
                return 0
        labels = batch.get("labels") if "labels" in label_names or not label_names else batch.get(label_names[0])
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or "labels" not in batch:
            return batch_size
        targets = self._targets(batch)
        if targets.is_cpu and targets.dim() == 1:  # without torch's operations, most of a small model's batch
            return len(targets) - targets.tolist().count(IGNORE_INDEX)
        if targets.is_cpu:
            return int(np.count_nonzero(targets.numpy() != IGNORE_INDEX))
        return targets.ne(IGNORE_INDEX).sum()

    def apply(
        self,
        loss: torch.Tensor,
        batch: Batch,
        num_items: torch.Tensor | int | None,
        *,
        micro_batches: int,
        share: float,
    ) -> torch.Tensor:
        """The loss to differentiate, from the result of `compute_loss` for a micro-batch.

        `share` is below 1 for a part of a micro-batch that was cut because it did not fit: its part of the samples.
        """
        if self._arrives_scaled(num_items):
            return loss * 0.0 if stands_in(batch) else loss
        if self.weights_items and num_items is not None and has_labels(batch):
            if micro_batches == share == self.num_processes == 1:
                return loss
            return loss * (self._num_items(batch) * self.num_processes / num_items)
        if isinstance(batch, TailBatch):
            loss = loss * batch.weight
        if share != 1:
            loss = loss * share
        return loss if micro_batches == share == 1 else loss / micro_batches

    def compute_mean(self, loss: torch.Tensor, batch: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Returns the mean loss of a micro-batch, given the result of `compute_loss`."""
        if num_items is None or not self._arrives_scaled(num_items) or not has_labels(batch):
            return loss
        items = self._num_items(batch).to(loss.device) * self.num_processes
        return loss * (num_items / items.clamp(min=1))

    def settled(self, finding: LossFinding, *, weighting: str | None) -> LossRule:
        """Returns the rule for a loss about which this was found.

        `weighting` is the user's `loss_weighting`: a loss that is neither half as large nor unchanged is a mean with
        it. Without it, such a loss is taken as the original takes it, which is how an open rule takes every loss.
        """
        if finding is LossFinding.DIVIDED:
            return replace(self, is_open=False, is_scaled=True)
        if finding is LossFinding.MEAN or weighting is not None:
            by_items = weighting != "batches"
            return replace(self, is_open=False, is_scaled=False, is_mean=True, weights_items=by_items)
        return replace(self, is_open=False)

    def _arrives_scaled(self, num_items: torch.Tensor | int | None) -> bool:
        if self.is_scaled is not None:
            return self.is_scaled
        return self.has_loss_func or (self.counts_items and num_items is not None)

    def weigh_auxiliary(self, loss: torch.Tensor, outputs: Any, *, sample_share: float) -> torch.Tensor:
        """The loss with the model's auxiliary part weighted by the micro-batch's share of the window's samples."""
        auxiliary = self.auxiliary(outputs)
        return loss if auxiliary is None or sample_share == 1.0 else loss - (1.0 - sample_share) * auxiliary

    def undo_averaging(self, loss: torch.Tensor, outputs: Any, num_items: torch.Tensor | int | None) -> torch.Tensor:
        """Multiplies a counted loss by the processes over which its gradient will be averaged.

        Not its auxiliary part: that is a mean on each process, which averaging leaves right.
        """
        if self.num_processes == 1 or num_items is None or not self.counts_items or self.is_mean:
            return loss
        auxiliary = self.auxiliary(outputs)
        scaled = loss * self.num_processes
        return scaled if auxiliary is None else scaled - (self.num_processes - 1) * auxiliary

    def auxiliary(self, outputs: Any) -> torch.Tensor | None:
        """Returns the part of the loss that the model added to its loss over labels."""
        if self.aux_coefficient == 0.0 or not isinstance(outputs, Mapping):
            return None
        auxiliary = outputs.get("aux_loss")
        return None if auxiliary is None else self.aux_coefficient * auxiliary

    def for_one_process(self) -> LossRule:
        """The same for a loss that is not averaged over processes: an evaluation's."""
        return self if self.num_processes == 1 else replace(self, num_processes=1)

    def _num_items(self, batch: Batch, dtype: torch.dtype | None = None) -> torch.Tensor:
        count = self._targets(batch).ne(IGNORE_INDEX).sum(dtype=dtype)
        return count * 0 if self.num_processes > 1 and stands_in(batch) else count

    def _targets(self, batch: Batch) -> torch.Tensor:
        if "shift_labels" in batch:  # already shifted by the collator
            return batch["shift_labels"]  # type: ignore[no-any-return]
        labels: torch.Tensor = batch["labels"]
        return labels[..., 1:] if self.shifts_labels else labels


def stands_in(batch: object) -> bool:
    """Returns whether a batch only keeps its process in step, so that nothing of it counts."""
    return isinstance(batch, TailBatch) and batch.num_samples == 0


def has_labels(batch: object) -> bool:
    """Returns whether a batch has an entry `labels`; a list, a tuple and a tensor have no entries by name."""
    if type(batch) is not dict and isinstance(batch, (list, tuple, torch.Tensor)):
        return False
    try:
        return "labels" in batch  # type: ignore[operator]
    except TypeError:  # an object without entries
        return False


# -- label smoothing ---------------------------------------------------------------------------------------------------


@dataclass
class LabelSmoother(Counterpart, original="transformers.trainer_pt_utils"):
    """Mixes the one-hot target with the uniform one: `(1 - epsilon) * nll + epsilon * mean over classes`.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

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
            labels: int64; `ignore_index` for labels that do not count.
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


class LossQuestioner(Protocol):
    """Finds out whether the user's own loss is a mean; see `capabilities.loss_question`."""

    def ask(
        self,
        compute_loss: Callable[[Any, Batch, Any], Any],
        model: Model,
        inputs: Batch,
        num_items: torch.Tensor | int | None,
        *,
        compares: bool,
    ) -> None: ...
    def compare(self, loss: torch.Tensor | LossOutput, num_items: torch.Tensor | int | None) -> None: ...


@dataclass(slots=True)
class LossScaling:
    """How the losses of a run are scaled.

    Attributes:
        rule: fixed when the run starts, or by `question`; None determines it for each step.
        question: finds out whether the user's own loss is a mean, at the first micro-batch for which this matters; None
            if it is known.
        note: the answer to that question in words; empty without one.
    """

    rule: LossRule | None = None
    question: LossQuestioner | None = None
    note: str = ""
