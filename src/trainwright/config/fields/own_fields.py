"""Fields that transformers 5.23 does not have: ours, older ones that still have an effect; and those of generation."""

# ruff: noqa: RUF009 -- setting() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.fields.setting import (
    BY_RULES,
    COUNT,
    FIXED,
    MAYBE_COUNT,
    NOT_COMPARED,
    NOT_NEGATIVE,
    ORDER,
    RATE,
    TUNABLE,
    FieldGroup,
    Range,
    setting,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OlderFields(FieldGroup, group="Older names, honoured"):
    """Of v4.34, gone from transformers since, and still with an effect here."""

    overwrite_output_dir: bool | None = setting(
        None,
        "A fresh start in an output_dir with checkpoints: True deletes them, False refuses, None keeps them.",
        **NOT_COMPARED,
        bare_flag=True,
    )
    logging_dir: str | None = setting(
        None, "Directory of TensorBoard's files (None: under output_dir).", **NOT_COMPARED, syntax=("path",)
    )
    past_index: int = setting(
        -1,
        "Index of the past state among the outputs, fed to the next step (-1: none).",
        **TUNABLE,
        limits=Range(-1, whole=True, hint="-1 feeds no past state."),
    )
    save_safetensors: bool = setting(
        True, "Write weights as safetensors; else with torch, as pytorch_model.bin.", **FIXED
    )
    use_legacy_prediction_loop: bool = setting(
        False, "Evaluate and predict through `prediction_loop`, so that an override of it is called.", **FIXED
    )
    tpu_num_cores: int | None = setting(None, "Number of TPU cores.", **FIXED, limits=MAYBE_COUNT)
    ray_scope: str = setting("last", "Ray: which result of a trial counts: last, avg, all, ...", **FIXED)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OurFields(FieldGroup, group="Ours"):
    """Not in transformers."""

    layerwise_lr_decay: float | None = setting(
        None,
        "Each layer learns at this share of the rate of the layer above it, above 0 to 1 (None: all alike).",
        on_resume=RATE,
        searchable=True,
        limits=BY_RULES,
    )
    lr_groups: dict[str, Any] | str | None = setting(
        None,
        "Rates by parameter: {pattern of names: rate, or a factor such as '0.1x'}; the first that fits decides.",
        on_resume=RATE,
        searchable=True,
        syntax=("dict",),
    )
    loss_weighting: str | None = setting(
        None,
        "Micro-batches whose loss is a mean: batches (alike), items (by labels), original (HF's); None: by model.",
        **TUNABLE,
        choices=("batches", "items", "original"),
    )
    max_tokens_per_batch: int | None = setting(
        None,
        "Batches of samples of similar length, up to so many tokens with padding, in place of a batch size.",
        **TUNABLE,
        limits=MAYBE_COUNT,
        shares_name=True,
    )
    packing: str | None = setting(
        None,
        "Packs whole samples into rows of packing_length: best_fit (None: one sample a row).",
        **TUNABLE,
        choices=("best_fit",),
        shares_name=True,
    )
    packing_length: int | None = setting(
        None,
        "Tokens of a row that packing fills.",
        **TUNABLE,
        limits=Range(2, whole=True, optional=True),
        shares_name=True,
    )
    packing_overflow: str = setting(
        "error",
        "A sample longer than packing_length: error, or split over rows.",
        **TUNABLE,
        choices=("error", "split"),
        shares_name=True,
    )
    dataloader_timeout: float = setting(
        0.0,
        "Seconds to wait for a batch of the workers, after which an error shows the stack of the one that hangs "
        "(0: without end).",
        **TUNABLE,
        limits=NOT_NEGATIVE,
    )
    hang_timeout: float = setting(
        0.0,
        "Seconds without a finished step after which all processes show their stacks and end (0: never).",
        **FIXED,
        limits=NOT_NEGATIVE,
    )
    max_train_time: str | None = setting(  # numbers too; argument parsers want one type that text converts to
        None,
        "Save and stop in time to end within this: '8h', '1h30m', a number of seconds (None: no limit).",
        **FIXED,
        syntax=("duration",),
    )
    save_async: bool | None = setting(
        None,
        "Write checkpoints asynchronously (None: unless your code looks at their files; True: even then).",
        **TUNABLE,
        bare_flag=True,
    )
    save_failure: str = setting(
        "stop",
        "When a checkpoint cannot be written, as on a full disk: stop training, or continue without it.",
        **FIXED,
        choices=("stop", "continue"),
    )
    output_dir_wait_s: float = setting(
        0.0,
        "Seconds to wait for another live run that holds output_dir, before this one is refused (0: at once).",
        **NOT_COMPARED,
        limits=NOT_NEGATIVE,
    )
    pad_to_multiple_of: int | None = setting(
        None,
        "The default collator pads to a multiple of so many tokens, so there are fewer shapes to compile.",
        **FIXED,
        limits=MAYBE_COUNT,
        shares_name=True,
    )
    save_every: str | None = setting(
        None,
        "Save when the last save is this long ago, beside save_strategy: '20min', '1h', a number of seconds.",
        **FIXED,
        syntax=("duration",),
    )
    save_keep_every: str | None = setting(
        None,
        "With save_total_limit: beyond the limit, keep one checkpoint for each such length of time, as '2h'.",
        **TUNABLE,
        syntax=("duration",),
    )
    save_keep_every_steps: int | None = setting(
        None,
        "With save_total_limit: beyond the limit, keep the checkpoints of steps that are multiples of this.",
        **TUNABLE,
        limits=MAYBE_COUNT,
    )
    save_on_exception: bool = setting(
        False, "When training ends with an error, save the last finished step first.", **TUNABLE
    )
    signal_grace_s: float = setting(
        10.0,
        "Seconds after a signal that ends a run in which further ones do not abort its save (Ctrl-C twice does).",
        **FIXED,
        limits=NOT_NEGATIVE,
    )
    slurm_requeue: bool = setting(
        False,
        "When SIGTERM or SIGUSR1 ends a job of Slurm, put it back into the queue once the checkpoint is saved.",
        **FIXED,
    )
    preflight: bool = setting(
        True,
        "Look at the first batches and the first step of a training, and warn of what is probably not meant.",
        **TUNABLE,
    )
    seed_samples: bool = setting(
        False,
        "Random draws in samples and the collator depend on seed, epoch and sample only, not on the number of workers.",
        **TUNABLE,
    )
    profile: str | None = setting(  # numbers too; argument parsers want one type that text converts to
        None,
        "Trace steps with torch's profiler into output_dir/profile: '10-15', or so many after the first two.",
        **TUNABLE,
    )
    shuffle_method: str = setting(
        "auto",
        "Shuffling: permutation (an array of indices), feistel (computed, no memory), auto (that above 2^24 rows).",
        on_resume=ORDER,
        searchable=True,
        choices=("auto", "permutation", "feistel"),
    )
    on_nonfinite: str = setting(
        "skip",
        "When loss or gradient is not finite: skip the update, roll back, stop before it, warn and update, ignore.",
        **TUNABLE,
        choices=("skip", "rollback", "stop", "warn", "ignore"),
    )
    incidents: bool = setting(
        True,
        "Write batch, weights and random states of a bad step, an error or a hang into output_dir/incidents.",
        **TUNABLE,
    )
    on_spike: str = setting(
        "off",
        "When loss or gradient norm is far above the steps before: warn, skip the update, roll back, stop.",
        **TUNABLE,
        choices=("off", "warn", "skip", "rollback", "stop"),
    )
    spike_threshold: float = setting(
        6.0,
        "A spike is further above the median than so many robust deviations (1.4826 times the MAD).",
        **TUNABLE,
        limits=Range(0, open_low=True),
    )
    spike_window: int = setting(128, "Accepted steps that on_spike compares a step with.", **TUNABLE, limits=COUNT)
    spike_warmup: int = setting(
        64, "Accepted steps before on_spike compares the first one; at most spike_window.", **TUNABLE, limits=COUNT
    )
    max_skipped_steps: int = setting(
        20,
        "Skipped steps in a row after which training stops with an error (0: any number).",
        **TUNABLE,
        limits=Range(0, whole=True),
    )
    max_rollbacks: int = setting(
        3, "Rollbacks to the same snapshot; the next one ends training.", **TUNABLE, limits=COUNT
    )
    rollback_every: int = setting(
        50,
        "Steps between two snapshots in host memory for rollbacks (0: they go back to the newest checkpoint).",
        **TUNABLE,
        limits=Range(0, whole=True),
    )
    rollback_skip_samples: int = setting(
        0, "Samples after a rollback that are left out too, in whole steps.", **TUNABLE, limits=Range(0, whole=True)
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class GenerationFields(FieldGroup, group="Generation"):
    """Of Seq2SeqTrainingArguments alone."""

    sortish_sampler: bool = setting(
        False, "Train on batches of samples of similar length, the longest first (group_by_length).", **TUNABLE
    )
    predict_with_generate: bool = setting(
        False, "Generate in evaluation and prediction, for metrics such as ROUGE.", **TUNABLE
    )
    generation_max_length: int | None = setting(
        None,
        "Tokens at most, a decoder-only model's prompt included (None: the model's own setting).",
        **TUNABLE,
        limits=MAYBE_COUNT,
    )
    generation_num_beams: int | None = setting(
        None, "Beams of the search (None: the model's own setting).", **TUNABLE, limits=MAYBE_COUNT
    )
    generation_config: str | Path | Any | None = setting(  # Any: a GenerationConfig, which is not imported here
        None,
        "GenerationConfig to use: an instance, the name of a model, a directory or a file.",
        **TUNABLE,
        syntax=("maybe_path",),
    )
