"""Seq2SeqTrainer: generation in evaluate and predict."""

from __future__ import annotations

from typing import Any

from trainwright.errors import NotYetError
from trainwright.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """Trains sequence-to-sequence models.

    Raises:
        NotYetError: with `predict_with_generate`, which this version does not have yet.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.args, "predict_with_generate", False):
            raise NotYetError(
                "predict_with_generate=True is not in this version of Trainwright. Train without it, and call "
                "model.generate() on your evaluation data."
            )
