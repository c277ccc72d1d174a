"""The argument of evaluation that transformers does not have."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, tunable


class EvaluationOrderFields(FieldGroup):
    """The batches of an evaluation."""

    eval_sampling_strategy: str = tunable(
        "sequential",
        "Batches of an evaluation: sequential, or by_length (less padding; results keep the order of the data).",
        choices=("sequential", "by_length"),
        place=5,
    )
