"""CheckFacts: what the checks look at. Whoever fills them in knows the trainer; the checks know only these values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright._types import Batch
from trainwright.config.plans import StepPlan
from trainwright.config.protocol import Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """Results of the first optimizer step.

    Attributes:
        loss: of its window, as it is logged; None where it was not read.
        without_gradient: trainable parameters that the backward pass did not reach.
        seconds: how long it took; None where that says nothing about the steps to come.
    """

    loss: float | None
    without_gradient: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFacts:
    """Facts for the checks; None for an unknown one, without which its checks do not run.

    Attributes:
        batches: micro-batches of the first step, as the collator made them.
        columns: entries of a sample, before those that the model does not take are dropped.
        taken: entries that the model takes, or its collator asks for; None where nothing is dropped.
        label_names: inputs that are labels.
        loss_is_the_models: nothing of the user's stands between the model's loss and the step's.
        failure: what went wrong when a batch or a step was tried.
        folder: where checkpoints go.
        checkpoint_bytes: estimated size of one.
        free_bytes: on the disk of `folder`.
        rehearse: evaluates one batch as an evaluation would; returns the names of its metrics, or raises.
        max_elements: parameters that are looked at one by one; more take too long before every run.
        is_brief: only what is wrong is wanted.
    """

    args: Arguments  # any TrainingArguments
    model: nn.Module
    device: torch.device
    processing_class: object = None
    optimizer: Optimizer | None = None
    plan: StepPlan | None = None
    batches: Sequence[Batch] | None = None
    columns: tuple[str, ...] | None = None
    taken: frozenset[str] | None = None
    label_names: tuple[str, ...] = ()
    can_return_loss: bool = False
    loss_is_the_models: bool = True
    step: FirstStep | None = None
    failure: str | None = None
    folder: Path | None = None
    checkpoint_bytes: int | None = None
    free_bytes: int | None = None
    rehearse: Callable[[], Iterable[str]] | None = None
    supports_bf16: bool | None = None
    max_elements: int | None = None
    is_brief: bool = False
