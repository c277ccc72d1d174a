"""The parts of one evaluation, as `eval_loop.py` and `prediction_accumulator.py` share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainwright._types import Nested
from trainwright.config.plans import EvalPlan
from trainwright.hooks import Events, Gather
from trainwright.loss_normalization import LossRule

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalContext:
    """The parts of one evaluation.

    Attributes:
        model: as the engine prepared it, in evaluation mode.
        gather: collects a value of all processes, in the order of samples.
        total: sums a tensor over all processes.
        label_names: entries of a batch that are labels.
        main_input: entry of a batch that metrics get as `inputs`.
        compute_metrics: from an EvalPrediction to a dict, or an object that is fed by batches; None: loss only.
        preprocess_logits: applied to (logits, labels) of each batch before they are kept.
        needs_labels: whether metrics without labels are an error (evaluation) or not (prediction).
    """

    plan: EvalPlan
    model: nn.Module
    rule: LossRule
    events: Events
    gather: Gather
    total: Callable[[torch.Tensor], torch.Tensor]
    label_names: Sequence[str]
    device: torch.device | None = None
    main_input: str = "input_ids"
    compute_metrics: Callable[..., dict[str, Any]] | None = None
    preprocess_logits: Callable[[Nested, Nested], Nested] | None = None
    loss_only: bool = False
    needs_labels: bool = False
    keeps_results: bool = True
    ignore_keys: list[str] | None = None
