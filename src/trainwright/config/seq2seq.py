"""Seq2SeqTrainingArguments: five fields more, for models that generate in evaluation."""

# ruff: noqa: RUF009 -- option() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainwright.config.arguments import TrainingArguments
from trainwright.config.fields import option


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """TrainingArguments for Seq2SeqTrainer."""

    group: ClassVar[str] = "Generation"

    sortish_sampler: bool = option(
        False, "Train on batches of samples of similar length, the longest first (group_by_length)."
    )
    predict_with_generate: bool = option(False, "Generate in evaluation and prediction, for metrics such as ROUGE.")
    generation_max_length: int | None = option(
        None, "Tokens at most, a decoder-only model's prompt included (None: the model's own setting)."
    )
    generation_num_beams: int | None = option(None, "Beams of the search (None: the model's own setting).")
    generation_config: str | Path | Any | None = option(  # Any: a GenerationConfig, which is not imported here
        None, "GenerationConfig to use: an instance, the name of a model, a directory or a file."
    )
