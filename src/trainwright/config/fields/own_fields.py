"""Fields of the core that transformers 5.23 does not have: ours, older ones with an effect still, those of generation.

`our_fields.py` joins ours with the fields of the capabilities.
"""

# ruff: noqa: RUF009 -- tunable(), fixed() and not_compared() make a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.config.setting import (
    BY_RULES,
    MAYBE_COUNT,
    MIXTURE,
    NOT_NEGATIVE,
    ORDER,
    RATE,
    FieldGroup,
    Range,
    fixed,
    not_compared,
    tunable,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OlderFields(FieldGroup, group="Older names, honoured"):
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


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class CoreFields(FieldGroup, group="Ours"):
    """Fields that transformers does not have, of the core; those of capabilities are in their folders."""

    layerwise_lr_decay: float | None = tunable(
        None,
        "Each layer learns at this share of the rate of the layer above it, above 0 to 1 (None: all alike).",
        on_resume=RATE,
        limits=BY_RULES,
    )
    lr_groups: dict[str, Any] | str | None = tunable(
        None,
        "Rates by parameter: {pattern of names: rate, or a factor such as '0.1x'}; the first that fits decides.",
        on_resume=RATE,
        syntax=("dict",),
    )
    loss_weighting: str | None = tunable(
        None,
        "Weights of mean losses: batches (alike), items (by labels), original (HF's); None: by model.",
        choices=("batches", "items", "original"),
    )
    loss_kernel: str | None = tunable(
        None,
        "Loss of a causal language model without its logits: auto, chunked, liger, cce (None: the model's own).",
        choices=("auto", "chunked", "liger", "cce"),
    )
    speed: dict[str, Any] | str | None = not_compared(
        None,
        "auto: measure before step 1 which settings are faster, and keep proved ones; or a choice, {setting: value}.",
        syntax=("dict",),
    )
    eval_sampling_strategy: str = tunable(
        "sequential",
        "Batches of an evaluation: sequential, or by_length (less padding; results keep the order of the data).",
        choices=("sequential", "by_length"),
    )
    max_tokens_per_batch: int | None = tunable(
        None,
        "Batches of samples of similar length, with at most this number of tokens, padding included.",
        limits=MAYBE_COUNT,
    )
    packing: str | None = tunable(
        None,
        "Packs whole samples into rows of packing_length: best_fit (None: one sample a row).",
        choices=("best_fit",),
    )
    packing_length: int | None = tunable(
        None, "Tokens of a row that packing fills.", limits=Range(2, whole=True, optional=True)
    )
    packing_overflow: str = tunable(
        "error",
        "A sample longer than packing_length: error, or split over rows.",
        choices=("error", "split"),
    )
    dataloader_timeout: float = tunable(
        0.0,
        "Seconds to wait for a batch of the workers, after which an error shows the stack of the hanging one "
        "(0: without end).",
        limits=NOT_NEGATIVE,
    )
    hang_timeout: float = fixed(
        0.0,
        "Seconds without a finished step after which all processes show their stacks and end (0: never).",
        limits=NOT_NEGATIVE,
    )
    max_train_time: str | None = fixed(  # numbers too; argument parsers want one type that text converts to
        None,
        "Save and stop in time to end within this: '8h', '1h30m', a number of seconds (None: no limit).",
        syntax=("duration",),
    )
    save_async: bool | None = tunable(
        None,
        "Write checkpoints asynchronously (None: unless your code looks at their files; True: even then).",
        bare_flag=True,
    )
    save_failure: str = fixed(
        "stop",
        "When a checkpoint cannot be written, as on a full disk: stop training, or continue without it.",
        choices=("stop", "continue"),
    )
    pad_to_multiple_of: int | None = fixed(
        None,
        "The default collator pads to a multiple of this number of tokens, so there are fewer shapes to compile.",
        limits=MAYBE_COUNT,
    )
    save_every: str | None = fixed(
        None,
        "Save when the last save is this long ago, in addition to save_strategy: '20min', '1h', a number of seconds.",
        syntax=("duration",),
    )
    save_keep_every: str | None = tunable(
        None,
        "With save_total_limit: beyond the limit, keep one checkpoint for each such length of time, as '2h'.",
        syntax=("duration",),
    )
    save_keep_every_steps: int | None = tunable(
        None,
        "With save_total_limit: beyond the limit, keep the checkpoints of steps that are multiples of this.",
        limits=MAYBE_COUNT,
    )
    save_on_exception: bool = tunable(False, "When training ends with an error, save the last finished step first.")
    signal_grace_s: float = fixed(
        10.0,
        "Seconds after a signal that ends a run in which further ones do not abort its save (Ctrl-C twice does).",
        limits=NOT_NEGATIVE,
    )
    slurm_requeue: bool = fixed(
        False, "When SIGTERM or SIGUSR1 ends a job of Slurm, put it back into the queue once the checkpoint is saved."
    )
    preflight: bool = tunable(
        True, "Look at the first batches and the first step of a training, and warn of probable mistakes."
    )
    seed_samples: bool = tunable(
        False,
        "Random draws in samples and the collator depend on seed, epoch and sample only, not on the number of workers.",
    )
    profile: str | None = tunable(  # numbers too; argument parsers want one type that text converts to
        None,
        "Trace steps with torch's profiler into output_dir/profile: '10-15', or a number of steps after the first two.",
    )
    shuffle_method: str = tunable(
        "auto",
        "Shuffling: permutation (an array of indices), feistel (computed, no memory), auto (that above 2^24 rows).",
        on_resume=ORDER,
        choices=("auto", "permutation", "feistel"),
    )
    reproduce: str | None = fixed(
        None,
        "Restores the original's numbers where docs/migrate.md lists a correction: transformers (None: corrected).",
        choices=("transformers",),
        since="0.3",
    )
    mixture: dict[str, float | str] | str | None = tunable(
        None,
        "Shares of the datasets of a dict: {name: 0.3, 'all' or '2 epochs'} (None: each row once an epoch).",
        on_resume=MIXTURE,
        syntax=("dict",),
        limits=BY_RULES,
        since="0.3",
    )
    mixture_unit: str = tunable(
        "samples",
        "Unit of the shares of mixture: samples, or tokens.",
        on_resume=MIXTURE,
        choices=("samples", "tokens"),
        since="0.3",
    )
    mixture_schedule: list[tuple[float, dict[str, float]]] | str | None = tunable(
        None,
        "Shares that change: [(0, {name: share}), (1000, {...})], by step, or by share of the run (0.5).",
        on_resume=MIXTURE,
        syntax=("dict",),
        limits=BY_RULES,
        since="0.3",
    )
    mixture_schedule_type: str = tunable(
        "stages",
        "How shares change from one entry of mixture_schedule to the next: stages (at its step), or linear.",
        on_resume=MIXTURE,
        choices=("stages", "linear"),
        since="0.3",
    )
    id_column: str | None = not_compared(
        None,
        "Column with the names of rows in the ledger, the quarantine and messages (None: index, or line of a file).",
        since="0.3",
    )
    journal: bool | None = not_compared(
        None,
        "Record the run in journal.jsonl (None: if it saves or has a tracker).",
        since="0.3",
    )
    cooldown: str | None = tunable(
        None,
        "Shape in which the rate falls from its present value to 0, from a branch or a longer max_steps on.",
        on_resume="the rate falls from its present value to 0 at the end of the run",
        choices=("linear", "cosine", "1-sqrt"),
        since="0.3",
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
