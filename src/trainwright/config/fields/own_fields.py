"""Fields that no other part owns: older ones with an effect still, `reproduce`, and those of generation."""

# ruff: noqa: RUF009 -- tunable(), fixed() and not_compared() make a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.setting import (
    MAYBE_COUNT,
    FieldGroup,
    Range,
    fixed,
    not_compared,
    tunable,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OlderFields(FieldGroup, group="Deprecated names"):
    """Fields of v4.34 that transformers has removed and that still have an effect here."""

    overwrite_output_dir: bool | None = not_compared(
        None,
        "A fresh start in an output_dir with checkpoints: True deletes them, False refuses, None keeps them.",
        bare_flag=True,
    )
    logging_dir: str | None = not_compared(
        None, "Directory of TensorBoard's files (None: under output_dir).", syntax=("path",)
    )
    past_index: int = tunable(
        -1,
        "Index of the past state among the outputs, fed to the next step (-1: none).",
        limits=Range(-1, whole=True, hint="-1 feeds no past state."),
    )
    save_safetensors: bool = fixed(True, "Write weights as safetensors; else with torch, as pytorch_model.bin.")
    use_legacy_prediction_loop: bool = fixed(
        False, "Evaluate and predict through `prediction_loop`, so that an override of it is called."
    )
    tpu_num_cores: int | None = fixed(None, "Number of TPU cores.", limits=MAYBE_COUNT)
    ray_scope: str = fixed("last", "Ray: which result of a trial counts: last, avg, all, ...")


class BehaviourFields(FieldGroup):
    """Which behaviour a run has where ours differs from transformers'."""

    reproduce: str | None = fixed(
        None,
        "Restores the original's numbers where docs/migrate.md lists a correction: transformers (None: corrected).",
        choices=("transformers",),
        since="0.3",
        place=38,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class GenerationFields(FieldGroup, group="Generation"):
    """Fields of Seq2SeqTrainingArguments alone."""

    sortish_sampler: bool = tunable(
        False, "Train on batches of samples of similar length, the longest first (group_by_length)."
    )
    predict_with_generate: bool = tunable(False, "Generate in evaluation and prediction, for metrics such as ROUGE.")
    generation_max_length: int | None = tunable(
        None,
        "Tokens at most, a decoder-only model's prompt included (None: the model's own setting).",
        limits=MAYBE_COUNT,
    )
    generation_num_beams: int | None = tunable(
        None, "Beams of the search (None: the model's own setting).", limits=MAYBE_COUNT
    )
    generation_config: str | Path | Any | None = tunable(  # Any: a GenerationConfig, which is not imported here
        None,
        "GenerationConfig to use: an instance, the name of a model, a directory or a file.",
        syntax=("maybe_path",),
    )
