"""Fields of logs, trackers and evaluations."""

# ruff: noqa: RUF009 -- setting() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.config.aliases import Item, Renamed, Switch
from trainwright.config.enums import IntervalStrategy
from trainwright.config.fields.setting import (
    BY_RULES,
    COUNT,
    FIXED,
    MAYBE_COUNT,
    PER_START,
    TUNABLE,
    FieldGroup,
    Range,
    setting,
)

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LoggingFields(FieldGroup, group="Logging"):
    logging_strategy: IntervalStrategy | str = setting(
        "steps", "When to log: no, steps, epoch.", **TUNABLE, enum=IntervalStrategy, summarized=True
    )
    logging_steps: float = setting(
        500,
        "Steps between logs; below 1: share of all steps.",
        **TUNABLE,
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    logging_first_step: bool = setting(False, "Log the first step too.", **TUNABLE)
    log_on_each_node: bool = setting(True, "One process of each node logs at log_level; False: of one node.", **FIXED)
    logging_nan_inf_filter: bool = setting(True, "Leave non-finite losses out of the logged mean.", **TUNABLE)
    include_num_input_tokens_seen: str | bool = setting(
        "no",
        "Count input tokens: no, all, non_padding (True: all). Costs a little communication.",
        **TUNABLE,
        choices=("no", "all", "non_padding"),
        formerly={"include_tokens_per_second": Switch("all", also=(True, "non_padding"))},
    )
    log_level: str = setting(
        "passive",
        "Level of the main process' messages (passive: leave as it is).",
        on_resume=PER_START,
        searchable=False,
        choices=LOG_LEVELS,
    )
    log_level_replica: str = setting(
        "warning", "The same for the other processes.", on_resume=PER_START, searchable=False, choices=LOG_LEVELS
    )
    disable_tqdm: bool | None = setting(
        None, "No progress bar (None: bar unless only errors are shown).", on_resume=PER_START, searchable=False
    )
    report_to: list[str] | str | None = setting("none", "Trackers: a name, several, all (installed), or none.", **FIXED)
    run_name: str | None = setting(
        None, "Name of the run for the trackers (None: each tracker's own default).", **FIXED
    )
    project: str = setting("huggingface", "Project under which trackers file the run.", **FIXED)
    trackio_space_id: str | None = setting(None, "Trackio: Space that shows the run.", **FIXED)
    trackio_bucket_id: str | None = setting(None, "Trackio: bucket that stores the run.", **FIXED)
    trackio_static_space_id: Literal[False] | str | None = setting(
        None, "Trackio: static Space published at the end (False: none).", **FIXED
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class EvaluationFields(FieldGroup, group="Evaluation"):
    eval_strategy: IntervalStrategy | str = setting(
        "no",
        "When to evaluate: no, steps, epoch.",
        **TUNABLE,
        enum=IntervalStrategy,
        summarized=True,
        formerly={"evaluation_strategy": Renamed()},
    )
    eval_steps: float | None = setting(
        None,
        "Steps between evaluations; below 1: share of all steps (None: logging_steps).",
        **TUNABLE,
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    eval_delay: float = setting(
        0,
        "Epochs or steps (as eval_strategy) before the first evaluation.",
        **TUNABLE,
        limits=Range(0, optional=True, only_warns=True),
    )
    per_device_eval_batch_size: int = setting(
        8,
        "Samples per device and forward pass in evaluation.",
        **TUNABLE,
        limits=COUNT,
        formerly={"per_gpu_eval_batch_size": Renamed(reads=int)},
    )
    prediction_loss_only: bool = setting(False, "Return only the loss from evaluation and prediction.", **TUNABLE)
    eval_on_start: bool = setting(False, "Evaluate once before the first step.", **TUNABLE)
    eval_do_concat_batches: bool = setting(
        True, "Join the predictions of all batches; False: lists of batches.", **TUNABLE
    )
    eval_use_gather_object: bool = setting(
        False, "Gather nested objects, not only tensors, across processes.", **TUNABLE
    )
    eval_accumulation_steps: int | None = setting(
        None,
        "Batches whose predictions stay on the device before they move to the CPU (None: all).",
        **TUNABLE,
        limits=MAYBE_COUNT,
    )
    include_for_metrics: list[str] = setting(
        None,
        "What compute_metrics gets besides predictions and labels: inputs, loss.",
        **TUNABLE,
        factory=list,
        formerly={"include_inputs_for_metrics": Item("inputs")},
    )
    batch_eval_metrics: bool = setting(
        False, "Call compute_metrics after each batch, with compute_result last.", **TUNABLE
    )
