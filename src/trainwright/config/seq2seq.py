"""Seq2SeqTrainingArguments: five fields more, for models that generate in evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.config.arguments import TrainingArguments
from trainwright.config.fields import GenerationFields


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(GenerationFields, TrainingArguments):
    """TrainingArguments for Seq2SeqTrainer."""
