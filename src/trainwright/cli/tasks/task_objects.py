"""TaskObjects: the objects that a task passes to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor

from trainwright._types import JSONObject

Dataset: TypeAlias = Any  # rows of ours, a list, or a datasets.Dataset
Processor: TypeAlias = "PreTrainedTokenizerBase | BaseImageProcessor"


@dataclass(frozen=True, kw_only=True)
class TaskObjects:
    """Objects of a Trainer's constructor, and a text about them.

    Attributes:
        train, eval: samples; `eval` is None where nothing is held out.
        about: short text for the console.
        overrides: TrainingArguments that the task decides where the recipe does not.
    """

    model: nn.Module
    train: Dataset
    eval: Dataset | None
    processing_class: Processor | None
    data_collator: Callable[..., object] | None = None
    compute_metrics: Callable[..., dict[str, float]] | None = None
    preprocess_logits: Callable[..., object] | None = None
    about: str = ""
    overrides: JSONObject = field(default_factory=dict)


def shown(names: list[str], most: int = 8) -> str:
    """Joins at most `most` labels for one line."""
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
