"""The fields of TrainingArguments, group by group: name, type, default, help. No behaviour.

One dataclass per group; TrainingArguments is made of all of them. Names and defaults are those of transformers 5.23.
Fields that count steps (`logging_steps`, `eval_steps`, `save_steps`, `warmup_steps`) take whole numbers, or a share of
all steps when below 1. Fields that hold a dict also take it as a JSON string.
"""

# ruff: noqa: RUF009 -- option() makes a dataclass field
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.enums import (
    DebugOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)

PATHS = ("output_dir", "logging_dir")  # fields that are paths
MAYBE_PATHS = ("fsdp_config", "deepspeed", "accelerator_config", "generation_config", "resume_from_checkpoint")
LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
PACKING = ("best_fit",)
SAMPLING = ("random", "sequential", "group_by_length", "batch_rebalance")
START_METHODS = ("fork", "spawn", "forkserver")
DDP_BACKENDS = ("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl")


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    factory: Callable[[], Any] | None = None,
    optional_value: bool = False,
    secret: bool = False,
) -> Any:  # Any, as dataclasses.field() itself is to a type checker
    """A field with its help text. `optional_value`: on the command line, the bare flag means True."""
    metadata: dict[str, Any] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    if optional_value:
        metadata.update(nargs="?", const=True)
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass
class OutputFields:
    group: ClassVar[str] = "Run"

    output_dir: str | None = option(None, "Directory for checkpoints and results (None: trainer_output).")


@dataclass(kw_only=True)
class RunFields:
    group: ClassVar[str] = "Run"

    do_train: bool = option(False, "For scripts: train. The trainer itself does not read it.")
    do_eval: bool = option(False, "For scripts: evaluate. Set by itself when eval_strategy is not 'no'.")
    do_predict: bool = option(False, "For scripts: predict on the test set.")
    resume_from_checkpoint: str | None = option(
        None, "Checkpoint that train() goes on from, if it is given none; 'auto': the newest whole one, or none."
    )
    seed: int = option(42, "Seed of initialisation, dropout and (without data_seed) the order of samples.")
    data_seed: int | None = option(None, "Seed of the order of samples (None: seed).")
    full_determinism: bool = option(False, "Deterministic algorithms throughout; slower, for debugging.")
    use_cpu: bool = option(False, "Train on the CPU even where there is an accelerator.")
    run_name: str | None = option(None, "Name of the run for the trackers (None: each tracker's own default).")
    project: str = option("huggingface", "Project under which trackers file the run.")
    debug: str | list[DebugOption] = option(
        "", "Words: underflow_overflow (find the first layer with inf or nan), tpu_metrics_debug."
    )
    skip_memory_metrics: bool = option(True, "False: add a memory report to the metrics of each stage.")
    local_rank: int = option(-1, "Set by old launchers and accepted from them; read local_process_index instead.")


@dataclass(kw_only=True)
class BatchFields:
    group: ClassVar[str] = "Length and batch"

    num_train_epochs: float = option(3.0, "Passes over the training data; may be a fraction.")
    max_steps: int = option(-1, "Optimizer steps to train, instead of num_train_epochs (-1: by epochs).")
    per_device_train_batch_size: int = option(8, "Samples per device and forward pass in training.")
    per_device_eval_batch_size: int = option(8, "Samples per device and forward pass in evaluation.")
    gradient_accumulation_steps: int = option(1, "Forward passes whose gradients make one optimizer step.")
    average_tokens_across_devices: bool = option(
        True, "Weigh the loss by the tokens of all processes, not of each process alone."
    )
    auto_find_batch_size: bool = option(False, "Out of memory: cut micro-batches, accumulate over the parts.")


@dataclass(kw_only=True)
class OptimizerFields:
    group: ClassVar[str] = "Optimizer and schedule"

    learning_rate: float = option(5e-5, "Peak learning rate.")
    lr_scheduler_type: SchedulerType | str = option("linear", "How the rate moves after warm-up.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = option(None, "More parameters of the schedule.")
    warmup_steps: float = option(0, "Steps in which the rate rises from 0; below 1: share of all steps.")
    optim: OptimizerNames | str = option("adamw_torch_fused", "Name of the optimizer.")
    optim_args: str | None = option(None, "More parameters of the optimizer: 'key=value,key=value'.")
    optim_target_modules: list[str] | str | None = option(
        None, "Modules that GaLore and APOLLO project: names, a regular expression, or 'all-linear'."
    )
    weight_decay: float = option(0.0, "Weight decay; not applied to biases and normalisation layers.")
    adam_beta1: float = option(0.9, "Adam: decay of the running mean of gradients.")
    adam_beta2: float = option(0.999, "Adam: decay of the running mean of squared gradients.")
    adam_epsilon: float = option(1e-8, "Adam: added to the denominator.")
    max_grad_norm: float = option(1.0, "Clip gradients to this global norm (0: no clipping).")
    label_smoothing_factor: float = option(0.0, "Share of the target spread over all labels, 0 to below 1.")


@dataclass(kw_only=True)
class PrecisionFields:
    group: ClassVar[str] = "Precision and memory"

    bf16: bool = option(False, "Train in mixed precision with bfloat16 (accelerators, and the CPU).")
    fp16: bool = option(False, "Train in mixed precision with float16 and a gradient scaler.")
    bf16_full_eval: bool = option(False, "Evaluate with all weights in bfloat16.")
    fp16_full_eval: bool = option(False, "Evaluate with all weights in float16.")
    tf32: bool | None = option(None, "TF32 matrix products on recent GPUs (None: torch's default).")
    activation_checkpointing: bool | None = option(
        None, "Recompute activations in the backward pass: less memory, more time.", optional_value=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "every_n_layers, offload, and parameters of torch.utils.checkpoint.checkpoint."
    )
    gradient_checkpointing: bool | None = option(None, "Older name of activation_checkpointing.", optional_value=True)
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = option(
        None, "Older name of activation_checkpointing_kwargs."
    )
    torch_compile: bool = option(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = option(None, "Backend of torch.compile (None: inductor); implies it.")
    torch_compile_mode: str | None = option(None, "default, reduce-overhead, max-autotune, ...; implies torch_compile.")
    use_liger_kernel: bool = option(False, "Replace layers by Liger's fused kernels (package liger-kernel).")
    liger_kernel_config: dict[str, bool] | str | None = option(None, "Which of Liger's kernels: {'rope': true, ...}.")
    use_cache: bool = option(False, "Let the model keep its key-value cache in training.")
    neftune_noise_alpha: float | None = option(None, "Strength of NEFTune's noise on embeddings, e.g. 5.")
    torch_empty_cache_steps: int | None = option(None, "Free the device's cached memory every so many steps.")


@dataclass(kw_only=True)
class LoggingFields:
    group: ClassVar[str] = "Logging"

    logging_strategy: IntervalStrategy | str = option("steps", "When to log: no, steps, epoch.")
    logging_steps: float = option(500, "Steps between logs; below 1: share of all steps.")
    logging_first_step: bool = option(False, "Log the first step too.")
    logging_nan_inf_filter: bool = option(True, "Leave non-finite losses out of the logged mean.")
    log_level: str = option(
        "passive", "Level of the main process' messages (passive: leave as it is).", choices=LOG_LEVELS
    )
    log_level_replica: str = option("warning", "The same for the other processes.", choices=LOG_LEVELS)
    log_on_each_node: bool = option(True, "One process of each node logs at log_level; False: of one node.")
    include_num_input_tokens_seen: str | bool = option(
        "no", "Count input tokens: no, all, non_padding (True: all). Costs a little communication."
    )
    disable_tqdm: bool | None = option(None, "No progress bar (None: bar unless only errors are shown).")
    report_to: list[str] | str | None = option("none", "Trackers: a name, several, all (installed), or none.")
    trackio_space_id: str | None = option(None, "Trackio: Space that shows the run.")
    trackio_bucket_id: str | None = option(None, "Trackio: bucket that stores the run.")
    trackio_static_space_id: Literal[False] | str | None = option(
        None, "Trackio: static Space published at the end (False: none)."
    )


@dataclass(kw_only=True)
class EvaluationFields:
    group: ClassVar[str] = "Evaluation"

    eval_strategy: IntervalStrategy | str = option("no", "When to evaluate: no, steps, epoch.")
    eval_steps: float | None = option(
        None, "Steps between evaluations; below 1: share of all steps (None: logging_steps)."
    )
    eval_delay: float = option(0, "Epochs or steps (as eval_strategy) before the first evaluation.")
    eval_on_start: bool = option(False, "Evaluate once before the first step.")
    prediction_loss_only: bool = option(False, "Return only the loss from evaluation and prediction.")
    eval_accumulation_steps: int | None = option(
        None, "Batches whose predictions stay on the device before they move to the CPU (None: all)."
    )
    eval_do_concat_batches: bool = option(True, "Join the predictions of all batches; False: lists of batches.")
    eval_use_gather_object: bool = option(False, "Gather nested objects, not only tensors, across processes.")
    include_for_metrics: list[str] = option(
        None, "What compute_metrics gets besides predictions and labels: inputs, loss.", factory=list
    )
    batch_eval_metrics: bool = option(False, "Call compute_metrics after each batch, with compute_result last.")
    load_best_model_at_end: bool = option(False, "After training, load the best checkpoint.")
    metric_for_best_model: str | None = option(None, "Metric that decides which is best (None: loss).")
    greater_is_better: bool | None = option(None, "Direction of that metric (None: False if it ends in 'loss').")


@dataclass(kw_only=True)
class SavingFields:
    group: ClassVar[str] = "Saving"

    save_strategy: SaveStrategy | str = option("steps", "When to save: no, steps, epoch, best.")
    save_steps: float = option(500, "Steps between checkpoints; below 1: share of all steps.")
    save_total_limit: int | None = option(None, "Checkpoints to keep, the best and the newest always (None: all).")
    save_only_model: bool = option(False, "Save the model alone: smaller, but training cannot resume from it.")
    save_on_each_node: bool = option(False, "Save on each node, for nodes without a shared disk.")
    enable_jit_checkpoint: bool = option(False, "On SIGTERM, save a checkpoint before ending.")
    ignore_data_skip: bool = option(False, "On resume, start the epoch's data again.")
    restore_callback_states_from_checkpoint: bool = option(
        False, "On resume, restore the state that callbacks saved, over what was passed."
    )


@dataclass(kw_only=True)
class HubFields:
    group: ClassVar[str] = "Hub"

    push_to_hub: bool = option(False, "Upload the model to the Hub.")
    hub_model_id: str | None = option(None, "Repository: 'name' or 'owner/name' (None: name of output_dir).")
    hub_strategy: HubStrategy | str = option("every_save", "end, every_save, checkpoint, all_checkpoints.")
    hub_token: str | None = option(None, "Access token (None: that of the login); never written out.", secret=True)
    hub_private_repo: bool | None = option(None, "Make the repository private (None: the owner's default).")
    hub_always_push: bool = option(False, "Upload even while the previous upload is not finished.")
    hub_revision: str | None = option(None, "Branch to upload to (None: the main one).")


@dataclass(kw_only=True)
class DataFields:
    group: ClassVar[str] = "Data"

    dataloader_drop_last: bool = option(False, "Drop the last batch when it is not full.")
    dataloader_num_workers: int = option(0, "Processes that load data (0: the main one does).")
    dataloader_pin_memory: bool = option(True, "Pin batches in memory for faster copies (off with use_cpu).")
    dataloader_persistent_workers: bool = option(False, "Keep the workers alive between epochs.")
    dataloader_prefetch_factor: int | None = option(None, "Batches that each worker loads ahead (None: 2).")
    dataloader_multiprocessing_context: str | None = option(
        None, "How workers start (None: the system's default).", choices=START_METHODS
    )
    dataloader_in_order: bool = option(True, "Keep the order of batches; False: as workers finish them.")
    remove_unused_columns: bool = option(
        True, "Drop dataset columns that forward does not take; your own data_collator gets them by name."
    )
    label_names: list[str] | None = option(None, "Inputs that are labels (None: from the model's forward).")
    train_sampling_strategy: str = option("random", "Order of the training samples.", choices=SAMPLING)
    length_column_name: str = option("length", "Column with each sample's length, for grouping by length.")


@dataclass(kw_only=True)
class DistributedFields:
    group: ClassVar[str] = "Distributed"

    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = option(
        None, "Settings of accelerate: dict, JSON, or path of a JSON file; see AcceleratorConfig."
    )
    parallelism_config: Any = option(  # accelerate's ParallelismConfig, which is not imported here
        None, "accelerate's ParallelismConfig: sizes of data, tensor, context and sequence parallelism."
    )
    ddp_backend: str | None = option(None, "Backend of torch.distributed (None: by device).", choices=DDP_BACKENDS)
    ddp_timeout: int = option(1800, "Seconds after which a collective operation gives up.")
    ddp_find_unused_parameters: bool | None = option(None, "DDP: look for parameters without gradient.")
    ddp_bucket_cap_mb: int | None = option(None, "DDP: size of a gradient bucket in MB.")
    ddp_broadcast_buffers: bool | None = option(None, "DDP: broadcast buffers before each forward pass.")
    ddp_static_graph: bool | None = option(None, "DDP: promise that the graph is the same in every step.")
    fsdp: str | None = option(  # True and lists too; argument parsers want one type that text converts to
        None, "Shard the model; True, or words such as 'full_shard auto_wrap offload'.", optional_value=True
    )
    fsdp_config: dict[str, Any] | str | None = option(None, "Settings of FSDP: dict, JSON, or path of a JSON file.")
    deepspeed: dict[str, Any] | str | None = option(None, "DeepSpeed's configuration: dict, JSON, or path.")


@dataclass(kw_only=True)
class OlderFields:
    """Of v4.34, gone from transformers since, and still with an effect here."""

    group: ClassVar[str] = "Older names, honoured"

    overwrite_output_dir: bool | None = option(
        None,
        "A fresh start in an output_dir with checkpoints: True deletes them, False refuses, None goes on beside them.",
        optional_value=True,
    )
    logging_dir: str | None = option(None, "Directory of TensorBoard's files (None: under output_dir).")
    past_index: int = option(-1, "Index of the past state among the outputs, fed to the next step (-1: none).")
    tpu_num_cores: int | None = option(None, "Number of TPU cores.")
    ray_scope: str = option("last", "Ray: which result of a trial counts: last, avg, all, ...")


@dataclass(kw_only=True)
class OurFields:
    """Not in transformers."""

    group: ClassVar[str] = "Ours"

    layerwise_lr_decay: float | None = option(
        None, "Each layer learns at this share of the rate of the layer above it, above 0 to 1 (None: all alike)."
    )
    lr_groups: dict[str, Any] | str | None = option(
        None, "Rates by parameter: {pattern of names: rate, or a factor such as '0.1x'}; the first that fits decides."
    )
    loss_weighting: str = option(
        "batches",
        "Micro-batches of a step whose loss is a mean: batches (each counts the same), items (by its label items).",
        choices=["batches", "items"],
    )
    max_tokens_per_batch: int | None = option(
        None, "Batches of samples of similar length, up to so many tokens with padding, in place of a batch size."
    )
    packing: str | None = option(
        None, "Packs whole samples into rows of packing_length: best_fit (None: one sample a row).", choices=PACKING
    )
    packing_length: int | None = option(None, "Tokens of a row that packing fills.")
    packing_overflow: str = option(
        "error", "A sample longer than packing_length: error, or split over rows.", choices=["error", "split"]
    )
    hang_timeout: float = option(
        0.0, "Seconds without a finished step after which all processes show their stacks and end (0: never)."
    )
    max_train_time: str | None = option(  # numbers too; argument parsers want one type that text converts to
        None, "Save and stop in time to end within this: '8h', '1h30m', a number of seconds (None: no limit)."
    )
    save_async: bool | None = option(
        None,
        "Write checkpoints behind training's back (None: unless your code looks at their files; True: even then).",
        optional_value=True,
    )
    save_failure: str = option(
        "stop",
        "When a checkpoint cannot be written, as on a full disk: stop training, or continue without it.",
        choices=["stop", "continue"],
    )
    pad_to_multiple_of: int | None = option(
        None,
        "The default collator pads to a multiple of so many tokens, so there are fewer shapes to compile.",
    )
    save_every: str | None = option(
        None, "Save when the last save is this long ago, beside save_strategy: '20min', '1h', a number of seconds."
    )
    save_keep_every: str | None = option(
        None, "With save_total_limit: beyond the limit, keep one checkpoint for each such length of time, as '2h'."
    )
    save_keep_every_steps: int | None = option(
        None, "With save_total_limit: beyond the limit, keep the checkpoints of steps that are multiples of this."
    )
    save_on_exception: bool = option(False, "When training ends with an error, save the last finished step first.")
    slurm_requeue: bool = option(
        False, "When SIGTERM or SIGUSR1 ends a job of Slurm, put it back into the queue once the checkpoint is saved."
    )
    preflight: bool = option(
        True, "Look at the first batches and the first step of a training, and warn of what is probably not meant."
    )
    seed_samples: bool = option(
        False,
        "Random draws in samples and the collator depend on seed, epoch and sample only, not on the number of workers.",
    )
    profile: str | None = option(  # numbers too; argument parsers want one type that text converts to
        None, "Trace steps with torch's profiler into output_dir/profile: '10-15', or so many after the first two."
    )
    shuffle_method: str = option(
        "auto",
        "Shuffling: permutation (an array of indices), feistel (computed, no memory), auto (that above 2^24 rows).",
        choices=["auto", "permutation", "feistel"],
    )


GROUPS: tuple[type, ...] = (
    OutputFields,
    RunFields,
    BatchFields,
    OptimizerFields,
    PrecisionFields,
    LoggingFields,
    EvaluationFields,
    SavingFields,
    HubFields,
    DataFields,
    DistributedFields,
    OlderFields,
    OurFields,
)
