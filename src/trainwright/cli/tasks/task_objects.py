"""What a task hands to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class TaskObjects:
    """The objects of a Trainer's constructor, and what to say about them.

    Attributes:
        train, eval: samples; `eval` is None where nothing is held out.
        about: a few words for the person who watches.
        overrides: TrainingArguments that the task decides where the recipe does not.
    """

    model: nn.Module
    train: Any
    eval: Any
    processing_class: Any
    data_collator: Any = None
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits: Callable[..., Any] | None = None
    about: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)


def shown(names: list[str], most: int = 8) -> str:
    """Labels as a line shows them."""
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
