"""Fields that the arguments share with transformers 5.23, in its names and defaults; it takes them by position too."""

# ruff: noqa: RUF009 -- tunable(), fixed() and not_compared() make a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainwright.config import aliases, enums
from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.setting import (
    ANY_NUMBER,
    ANY_WHOLE,
    BY_RULES,
    COUNT,
    LENGTH,
    MAYBE_COUNT,
    NOT_NEGATIVE,
    ORDER,
    PER_START,
    RATE,
    SHAPE,
    SHARE,
    SIZE,
    USUALLY_NOT_NEGATIVE,
    FieldGroup,
    Range,
    fixed,
    not_compared,
    tunable,
)


@dataclass(init=False, repr=False, eq=False)
class OutputFields(FieldGroup, group="Run"):
    output_dir: str | None = not_compared(
        None, "Directory for checkpoints and results (None: trainer_output).", syntax=("path",), summarized=True
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LengthFields(FieldGroup, group="Length and batch"):
    per_device_train_batch_size: int = tunable(
        8,
        "Samples per device and forward pass in training.",
        on_resume=SIZE,
        limits=COUNT,
        summarized=True,
        formerly={"per_gpu_train_batch_size": aliases.Renamed(reads=int)},
    )
    num_train_epochs: float = tunable(
        3.0, "Passes over the training data; may be a fraction.", on_resume=LENGTH, limits=ANY_NUMBER, summarized=True
    )
    max_steps: int = tunable(
        -1,
        "Optimizer steps to train, instead of num_train_epochs (-1: by epochs).",
        on_resume=LENGTH,
        limits=ANY_WHOLE,
        summarized=True,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OptimizerFields(FieldGroup, group="Optimizer and schedule"):
    learning_rate: float = tunable(5e-05, "Peak learning rate.", on_resume=RATE, limits=NOT_NEGATIVE, summarized=True)
    lr_scheduler_type: enums.SchedulerType | str = tunable(
        "linear", "How the rate moves after warm-up.", on_resume=SHAPE, enum=enums.SchedulerType, summarized=True
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = tunable(
        None, "More parameters of the schedule.", on_resume=SHAPE, syntax=("dict",)
    )
    warmup_steps: float = tunable(
        0,
        "Steps in which the rate rises from 0; below 1: share of all steps.",
        on_resume=SHAPE,
        limits=Range(0, hint="Below 1 it is a share of all steps."),
        summarized=True,
        formerly={
            "warmup_ratio": aliases.Renamed(
                convert=aliases.ratio_to_steps,
                back=aliases.steps_to_ratio,
                note=" with a share below 1",
                reads=float,
                yields=True,
            )
        },
    )
    optim: enums.OptimizerNames | str = tunable(
        "adamw_torch_fused",
        "Name of the optimizer.",
        enum=enums.OptimizerNames,
        summarized=True,
        formerly={"adafactor": aliases.Switch("adafactor")},
        older_values={"adamw_hf": "adamw_torch"},
        refused_values={"adamw_apex_fused": f"{aliases.APEX}, and a fused AdamW. Instead: optim='adamw_torch_fused'."},
    )
    optim_args: str | None = tunable(None, "More parameters of the optimizer: 'key=value,key=value'.")
    weight_decay: float = tunable(
        0.0, "Weight decay; not applied to biases and normalisation layers.", limits=USUALLY_NOT_NEGATIVE
    )
    adam_beta1: float = tunable(0.9, "Adam: decay of the running mean of gradients.", limits=SHARE)
    adam_beta2: float = tunable(0.999, "Adam: decay of the running mean of squared gradients.", limits=SHARE)
    adam_epsilon: float = tunable(1e-08, "Adam: added to the denominator.", limits=USUALLY_NOT_NEGATIVE)
    optim_target_modules: list[str] | str | None = tunable(
        None, "Modules that GaLore and APOLLO project: names, a regular expression, or 'all-linear'."
    )
    gradient_accumulation_steps: int = tunable(
        1, "Forward passes that make one optimizer step.", on_resume=SIZE, limits=COUNT, summarized=True
    )
    average_tokens_across_devices: bool = tunable(
        True, "Weigh the loss by the tokens of all processes, not of each process alone."
    )
    max_grad_norm: float = tunable(
        1.0,
        "Clip gradients to this global norm (0: no clipping).",
        limits=Range(0, optional=True, only_warns=True, hint="Nothing is clipped, as with 0."),
    )
    label_smoothing_factor: float = tunable(
        0.0, "Share of the target spread over all labels, 0 to below 1.", limits=SHARE
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PrecisionFields(FieldGroup, group="Precision and memory"):
    bf16: bool = tunable(False, "Train in mixed precision with bfloat16 (accelerators, and the CPU).", summarized=True)
    fp16: bool = tunable(False, "Train in mixed precision with float16 and a gradient scaler.", summarized=True)
    bf16_full_eval: bool = tunable(False, "Evaluate with all weights in bfloat16.")
    fp16_full_eval: bool = tunable(False, "Evaluate with all weights in float16.")
    tf32: bool | None = tunable(None, "TF32 matrix products on recent GPUs (None: torch's default).")
    activation_checkpointing: bool | None = tunable(
        None, "Recompute activations in the backward pass: less memory, more time.", bare_flag=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = tunable(
        None,
        "every_n_layers, offload, save='attention' (keep attention's output), and parameters of torch's checkpoint().",
        syntax=("dict",),
    )
    gradient_checkpointing: bool | None = tunable(
        None,
        "Older name of activation_checkpointing.",
        on_resume=PER_START,
        bare_flag=True,
        alias_of="activation_checkpointing",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = tunable(
        None,
        "Older name of activation_checkpointing_kwargs.",
        on_resume=PER_START,
        syntax=("dict",),
        alias_of="activation_checkpointing_kwargs",
    )
    torch_compile: bool | str = tunable(
        False,
        "Compile the model with torch.compile; regional: its repeated blocks, each class of them once.",
        choices=("regional",),
    )
    torch_compile_backend: str | None = tunable(
        None, "Backend of torch.compile (None: inductor); implies it.", formerly={"torchdynamo": aliases.Renamed()}
    )
    torch_compile_mode: str | None = tunable(
        None, "default, reduce-overhead, max-autotune, ...; implies torch_compile."
    )
    use_liger_kernel: bool = tunable(False, "Replace layers by Liger's fused kernels (package liger-kernel).")
    liger_kernel_config: dict[str, bool] | str | None = tunable(
        None, "Which of Liger's kernels: {'rope': true, ...}.", syntax=("dict",)
    )
    use_cache: bool = tunable(False, "Let the model keep its key-value cache in training.")
    neftune_noise_alpha: float | None = tunable(
        None, "Strength of NEFTune's noise on embeddings, e.g. 5.", limits=Range(0, optional=True)
    )
    torch_empty_cache_steps: int | None = tunable(
        None, "Free the device's cached memory at this interval of steps.", limits=MAYBE_COUNT
    )
    auto_find_batch_size: bool = tunable(False, "Out of memory: cut micro-batches, accumulate over the parts.")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SavingFields(FieldGroup, group="Saving"):
    save_only_model: bool = tunable(False, "Save the model alone: smaller, but training cannot resume from it.")
    save_strategy: enums.SaveStrategy | str = tunable(
        "steps", "When to save: no, steps, epoch, best.", enum=enums.SaveStrategy, summarized=True
    )
    save_steps: float = tunable(
        500,
        "Steps between checkpoints; below 1: share of all steps.",
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    save_on_each_node: bool = tunable(False, "Save on each node, for nodes without a shared disk.")
    save_total_limit: int | None = tunable(
        None,
        "Checkpoints to keep, the best and the newest always (None: all).",
        limits=Range(1, whole=True, optional=True, only_warns=True, hint="All checkpoints are kept, as with None."),
    )
    enable_jit_checkpoint: bool = tunable(False, "On SIGTERM, save a checkpoint before ending.")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HubFields(FieldGroup, group="Hub"):
    push_to_hub: bool = fixed(False, "Upload the model to the Hub.")
    hub_token: str | None = not_compared(
        None,
        "Access token (None: that of the login); never written out.",
        secret=True,
        formerly={"push_to_hub_token": aliases.Renamed()},
    )
    hub_private_repo: bool | None = fixed(None, "Make the repository private (None: the owner's default).")
    hub_model_id: str | None = fixed(
        None,
        "Repository: 'name' or 'owner/name' (None: name of output_dir).",
        formerly={"push_to_hub_model_id": aliases.Renamed(), "push_to_hub_organization": aliases.Organization()},
    )
    hub_strategy: enums.HubStrategy | str = fixed(
        "every_save", "end, every_save, checkpoint, all_checkpoints.", enum=enums.HubStrategy
    )
    hub_always_push: bool = fixed(False, "Upload even while the previous upload is not finished.")
    hub_revision: str | None = fixed(None, "Branch to upload to (None: the main one).")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class BestModelFields(FieldGroup, group="Best model"):
    load_best_model_at_end: bool = tunable(False, "After training, load the best checkpoint.")
    metric_for_best_model: str | None = tunable(
        None,
        "Metric that decides which is best (None: loss).",
        on_resume="judges from here on; the best so far was found by the old one",
    )
    greater_is_better: bool | None = tunable(
        None,
        "Direction of that metric (None: False if it ends in 'loss').",
        on_resume="judges from here on; the best so far was found the other way round",
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ResumeFields(FieldGroup, group="Saving"):
    ignore_data_skip: bool = tunable(False, "On resume, start the epoch's data again.")
    restore_callback_states_from_checkpoint: bool = tunable(
        False, "On resume, restore the saved state of callbacks, over passed settings."
    )


LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LoggingFields(FieldGroup, group="Logging"):
    logging_strategy: enums.IntervalStrategy | str = tunable(
        "steps", "When to log: no, steps, epoch.", enum=enums.IntervalStrategy, summarized=True
    )
    logging_steps: float = tunable(
        500, "Steps between logs; below 1: share of all steps.", limits=BY_RULES, syntax=("steps",), summarized=True
    )
    logging_first_step: bool = tunable(False, "Log the first step too.")
    log_on_each_node: bool = fixed(True, "One process of each node logs at log_level; False: of one node.")
    logging_nan_inf_filter: bool = tunable(True, "Leave non-finite losses out of the logged mean.")
    include_num_input_tokens_seen: str | bool = tunable(
        "no",
        "Count input tokens: no, all, non_padding (True: all). Costs a little communication.",
        choices=("no", "all", "non_padding"),
        formerly={"include_tokens_per_second": aliases.Switch("all", also=(True, "non_padding"))},
    )
    log_level: str = not_compared(
        "passive", "Level of the main process' messages (passive: leave as it is).", choices=LOG_LEVELS
    )
    log_level_replica: str = not_compared("warning", "The same for the other processes.", choices=LOG_LEVELS)
    disable_tqdm: bool | None = not_compared(None, "No progress bar (None: bar unless only errors are shown).")
    report_to: list[str] | str | None = fixed("none", "Trackers: a name, several, all (installed), or none.")
    run_name: str | None = fixed(None, "Name of the run for the trackers (None: each tracker's own default).")
    project: str = fixed("huggingface", "Project under which trackers file the run.")
    trackio_space_id: str | None = fixed(None, "Trackio: Space that shows the run.")
    trackio_bucket_id: str | None = fixed(None, "Trackio: bucket that stores the run.")
    trackio_static_space_id: Literal[False] | str | None = fixed(
        None, "Trackio: static Space published at the end (False: none)."
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class EvaluationFields(FieldGroup, group="Evaluation"):
    eval_strategy: enums.IntervalStrategy | str = tunable(
        "no",
        "When to evaluate: no, steps, epoch.",
        enum=enums.IntervalStrategy,
        summarized=True,
        formerly={"evaluation_strategy": aliases.Renamed()},
    )
    eval_steps: float | None = tunable(
        None,
        "Steps between evaluations; below 1: share of all steps (None: logging_steps).",
        limits=BY_RULES,
        syntax=("steps",),
        summarized=True,
    )
    eval_delay: float = tunable(
        0,
        "Epochs or steps (as eval_strategy) before the first evaluation.",
        limits=Range(0, optional=True, only_warns=True),
    )
    per_device_eval_batch_size: int = tunable(
        8,
        "Samples per device and forward pass in evaluation.",
        limits=COUNT,
        formerly={"per_gpu_eval_batch_size": aliases.Renamed(reads=int)},
    )
    prediction_loss_only: bool = tunable(False, "Return only the loss from evaluation and prediction.")
    eval_on_start: bool = tunable(False, "Evaluate once before the first step.")
    eval_do_concat_batches: bool = tunable(True, "Join the predictions of all batches; False: lists of batches.")
    eval_use_gather_object: bool = tunable(False, "Gather nested objects, not only tensors, across processes.")
    eval_accumulation_steps: int | None = tunable(
        None,
        "Batches of predictions that stay on the device before they move to the CPU (None: all).",
        limits=MAYBE_COUNT,
    )
    include_for_metrics: list[str] = tunable(
        None,
        "Further inputs of compute_metrics: inputs, loss.",
        factory=list,
        formerly={"include_inputs_for_metrics": aliases.Item("inputs")},
    )
    batch_eval_metrics: bool = tunable(False, "Call compute_metrics after each batch, with compute_result last.")


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SeedFields(FieldGroup, group="Run"):
    full_determinism: bool = tunable(
        False,
        "Deterministic algorithms throughout; slower, for debugging.",
        on_resume="takes effect, but steps before it were not deterministic",
    )
    seed: int = tunable(
        42,
        "Seed of initialisation, dropout and (without data_seed) the order of samples.",
        on_resume="no effect on a resume: random states come from the checkpoint",
        limits=Range(0, 2**32 - 1, whole=True),
    )
    data_seed: int | None = tunable(
        None,
        "Seed of the order of samples (None: seed).",
        on_resume="no effect on a resume: the checkpoint's order of samples is kept",
        limits=Range(0, 2**64 - 1, whole=True, optional=True, only_warns=True),
    )
    use_cpu: bool = fixed(
        False, "Train on the CPU even if there is an accelerator.", formerly={"no_cuda": aliases.Renamed(reads=bool)}
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class AcceleratorFields(FieldGroup, group="Distributed"):
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = tunable(
        None,
        "Settings of accelerate: dict, JSON, or path of a JSON file; see AcceleratorConfig.",
        syntax=("dict", "maybe_path"),
        formerly={
            "dispatch_batches": aliases.DictKey("dispatch_batches", reads=bool),
            "split_batches": aliases.DictKey("split_batches", unset=(None, False), reads=bool),
        },
    )
    parallelism_config: Any = fixed(  # accelerate's ParallelismConfig, which is not imported here
        None, "accelerate's ParallelismConfig: sizes of data, tensor, context and sequence parallelism."
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DataFields(FieldGroup, group="Data"):
    dataloader_drop_last: bool = tunable(False, "Drop the last batch when it is not full.")
    dataloader_num_workers: int = tunable(
        0, "Processes that load data (0: the main one does).", limits=Range(0, whole=True)
    )
    dataloader_pin_memory: bool = tunable(True, "Pin batches in memory for faster copies (off with use_cpu).")
    dataloader_persistent_workers: bool = tunable(False, "Keep the workers alive between epochs.")
    dataloader_prefetch_factor: int | None = tunable(
        None, "Batches that each worker loads ahead (None: 2).", limits=MAYBE_COUNT
    )
    dataloader_multiprocessing_context: str | None = tunable(
        None, "How workers start (None: the system's default).", choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = tunable(True, "Keep the order of batches; False: as workers finish them.")
    remove_unused_columns: bool = tunable(
        True, "Drop dataset columns that forward does not take; your own data_collator gets them by name."
    )
    label_names: list[str] | None = fixed(None, "Inputs that are labels (None: from the model's forward).")
    train_sampling_strategy: str = tunable(
        "random",
        "Order of the training samples.",
        on_resume=ORDER,
        choices=("random", "sequential", "group_by_length", "batch_rebalance"),
        formerly={"group_by_length": aliases.Switch("group_by_length")},
    )
    length_column_name: str = tunable(
        "length", "Column with each sample's length, for grouping by length.", on_resume=ORDER
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DistributedFields(FieldGroup, group="Distributed"):
    ddp_find_unused_parameters: bool | None = tunable(None, "DDP: look for parameters without gradient.")
    ddp_bucket_cap_mb: int | None = tunable(
        None, "DDP: size of a gradient bucket in MB.", limits=Range(0, open_low=True, optional=True)
    )
    ddp_broadcast_buffers: bool | None = tunable(None, "DDP: broadcast buffers before each forward pass.")
    ddp_static_graph: bool | None = tunable(None, "DDP: promise that the graph is the same in every step.")
    ddp_backend: str | None = fixed(
        None,
        "Backend of torch.distributed (None: by device).",
        choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = fixed(
        1800, "Seconds after which a collective operation gives up.", limits=Range(0, open_low=True, only_warns=True)
    )
    fsdp: str | None = fixed(  # True and lists too; argument parsers want one type that text converts to
        None, "Shard the model; True, or words such as 'full_shard auto_wrap offload'.", bare_flag=True
    )
    fsdp_config: dict[str, Any] | str | None = fixed(
        None,
        "Settings of FSDP: dict, JSON, or path of a JSON file.",
        syntax=("dict", "maybe_path"),
        formerly={
            "fsdp_min_num_params": aliases.DictKey("min_num_params", unset=(None, 0), reads=int),
            "fsdp_transformer_layer_cls_to_wrap": aliases.DictKey("transformer_layer_cls_to_wrap"),
        },
    )
    deepspeed: dict[str, Any] | str | None = fixed(
        None, "DeepSpeed's configuration: dict, JSON, or path.", syntax=("dict", "maybe_path")
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ScriptFields(FieldGroup, group="Run"):
    debug: str | list[enums.DebugOption] = tunable(
        "",
        "Words: underflow_overflow (find the first layer with inf or nan), tpu_metrics_debug (no effect).",
        formerly={"tpu_metrics_debug": aliases.Item("tpu_metrics_debug")},
    )
    skip_memory_metrics: bool = fixed(True, "False: add a memory report to the metrics of each stage.")
    do_train: bool = not_compared(False, "For scripts: train. The trainer itself does not read it.", summarized=True)
    do_eval: bool = not_compared(
        False, "For scripts: evaluate. Set by itself when eval_strategy is not 'no'.", summarized=True
    )
    do_predict: bool = not_compared(False, "For scripts: predict on the test set.", summarized=True)
    resume_from_checkpoint: str | None = not_compared(
        None,
        "Checkpoint that train() resumes from, if it is given none; 'auto': the newest whole one, or none.",
        syntax=("maybe_path",),
        summarized=True,
    )
    local_rank: int = not_compared(
        -1, "Set by old launchers and accepted from them; read local_process_index instead.", limits=BY_RULES
    )


@dataclass(init=False, repr=False, eq=False)
class SharedFields(  # dataclasses collect fields from the last base to the first
    ScriptFields,
    DistributedFields,
    DataFields,
    AcceleratorFields,
    SeedFields,
    ResumeFields,
    BestModelFields,
    HubFields,
    SavingFields,
    EvaluationFields,
    LoggingFields,
    PrecisionFields,
    OptimizerFields,
    LengthFields,
    OutputFields,
):
    """The fields that our arguments share with transformers'."""
