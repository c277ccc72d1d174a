"""Fields of what a run writes: logs, evaluations, checkpoints, the best model, and uploads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.config.aliases import Item, Organization, Renamed, Switch
from trainwright.config.enums import HubStrategy, IntervalStrategy, SaveStrategy
from trainwright.config.fields.setting import (
    BY_RULES,
    COUNT,
    FIXED,
    MAYBE_COUNT,
    NOT_COMPARED,
    TUNABLE,
    FieldGroup,
    Range,
    setting,
)

# ruff: noqa: RUF009 -- setting() makes a dataclass field


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SavingFields(FieldGroup, group="Saving"):
    save_only_model: bool = setting(
        False, "Save the model alone: smaller, but training cannot resume from it.", **TUNABLE
    )
    save_strategy: SaveStrategy | str = setting(
        "steps", "When to save: no, steps, epoch, best.", **TUNABLE, enum=SaveStrategy, summarized=True
    )
    save_steps: float = setting(
        500,
        "Steps between checkpoints; below 1: share of all steps.",
        **TUNABLE,
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    save_on_each_node: bool = setting(False, "Save on each node, for nodes without a shared disk.", **TUNABLE)
    save_total_limit: int | None = setting(
        None,
        "Checkpoints to keep, the best and the newest always (None: all).",
        **TUNABLE,
        limits=Range(1, whole=True, optional=True, only_warns=True, hint="All checkpoints are kept, as with None."),
    )
    enable_jit_checkpoint: bool = setting(False, "On SIGTERM, save a checkpoint before ending.", **TUNABLE)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HubFields(FieldGroup, group="Hub"):
    push_to_hub: bool = setting(False, "Upload the model to the Hub.", **FIXED)
    hub_token: str | None = setting(
        None,
        "Access token (None: that of the login); never written out.",
        **NOT_COMPARED,
        secret=True,
        formerly={"push_to_hub_token": Renamed()},
    )
    hub_private_repo: bool | None = setting(None, "Make the repository private (None: the owner's default).", **FIXED)
    hub_model_id: str | None = setting(
        None,
        "Repository: 'name' or 'owner/name' (None: name of output_dir).",
        **FIXED,
        formerly={"push_to_hub_model_id": Renamed(), "push_to_hub_organization": Organization()},
    )
    hub_strategy: HubStrategy | str = setting(
        "every_save", "end, every_save, checkpoint, all_checkpoints.", **FIXED, enum=HubStrategy
    )
    hub_always_push: bool = setting(False, "Upload even while the previous upload is not finished.", **FIXED)
    hub_revision: str | None = setting(None, "Branch to upload to (None: the main one).", **FIXED)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class BestModelFields(FieldGroup, group="Best model"):
    load_best_model_at_end: bool = setting(False, "After training, load the best checkpoint.", **TUNABLE)
    metric_for_best_model: str | None = setting(
        None,
        "Metric that decides which is best (None: loss).",
        on_resume="judges from here on; the best so far was found by the old one",
        searchable=True,
    )
    greater_is_better: bool | None = setting(
        None,
        "Direction of that metric (None: False if it ends in 'loss').",
        on_resume="judges from here on; the best so far was found the other way round",
        searchable=True,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ResumeFields(FieldGroup, group="Saving"):
    ignore_data_skip: bool = setting(False, "On resume, start the epoch's data again.", **TUNABLE)
    restore_callback_states_from_checkpoint: bool = setting(
        False, "On resume, restore the state that callbacks saved, over what was passed.", **TUNABLE
    )


# ruff: noqa: RUF009 -- setting() makes a dataclass field


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
        "passive", "Level of the main process' messages (passive: leave as it is).", **NOT_COMPARED, choices=LOG_LEVELS
    )
    log_level_replica: str = setting("warning", "The same for the other processes.", **NOT_COMPARED, choices=LOG_LEVELS)
    disable_tqdm: bool | None = setting(
        None, "No progress bar (None: bar unless only errors are shown).", **NOT_COMPARED
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
