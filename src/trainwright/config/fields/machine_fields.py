"""Fields of seeds, data loading and processes, and those that only scripts read."""

# ruff: noqa: RUF009 -- setting() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.aliases import Entry, Item, Renamed, Switch
from trainwright.config.enums import DebugOption
from trainwright.config.fields.setting import (
    BY_RULES,
    FIXED,
    MAYBE_COUNT,
    NOT_COMPARED,
    ORDER,
    TUNABLE,
    FieldGroup,
    Range,
    setting,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class SeedFields(FieldGroup, group="Run"):
    full_determinism: bool = setting(
        False,
        "Deterministic algorithms throughout; slower, for debugging.",
        on_resume="takes effect, but steps before it were not deterministic",
        searchable=True,
    )
    seed: int = setting(
        42,
        "Seed of initialisation, dropout and (without data_seed) the order of samples.",
        on_resume="no effect on a resume: random states come from the checkpoint",
        searchable=True,
        limits=Range(0, 2**32 - 1, whole=True),
    )
    data_seed: int | None = setting(
        None,
        "Seed of the order of samples (None: seed).",
        on_resume="no effect on a resume: the checkpoint's order of samples goes on",
        searchable=True,
        limits=Range(0, 2**64 - 1, whole=True, optional=True, only_warns=True),
    )
    use_cpu: bool = setting(
        False,
        "Train on the CPU even where there is an accelerator.",
        **FIXED,
        formerly={"no_cuda": Renamed(reads=bool)},
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class AcceleratorFields(FieldGroup, group="Distributed"):
    accelerator_config: dict[str, Any] | str | AcceleratorConfig | None = setting(
        None,
        "Settings of accelerate: dict, JSON, or path of a JSON file; see AcceleratorConfig.",
        **TUNABLE,
        syntax=("dict", "maybe_path"),
        formerly={
            "dispatch_batches": Entry("dispatch_batches", reads=bool),
            "split_batches": Entry("split_batches", unset=(None, False), reads=bool),
        },
    )
    parallelism_config: Any = setting(  # accelerate's ParallelismConfig, which is not imported here
        None, "accelerate's ParallelismConfig: sizes of data, tensor, context and sequence parallelism.", **FIXED
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DataFields(FieldGroup, group="Data"):
    dataloader_drop_last: bool = setting(False, "Drop the last batch when it is not full.", **TUNABLE)
    dataloader_num_workers: int = setting(
        0, "Processes that load data (0: the main one does).", **TUNABLE, limits=Range(0, whole=True)
    )
    dataloader_pin_memory: bool = setting(
        True, "Pin batches in memory for faster copies (off with use_cpu).", **TUNABLE
    )
    dataloader_persistent_workers: bool = setting(False, "Keep the workers alive between epochs.", **TUNABLE)
    dataloader_prefetch_factor: int | None = setting(
        None, "Batches that each worker loads ahead (None: 2).", **TUNABLE, limits=MAYBE_COUNT
    )
    dataloader_multiprocessing_context: str | None = setting(
        None, "How workers start (None: the system's default).", **TUNABLE, choices=("fork", "spawn", "forkserver")
    )
    dataloader_in_order: bool = setting(True, "Keep the order of batches; False: as workers finish them.", **TUNABLE)
    remove_unused_columns: bool = setting(
        True, "Drop dataset columns that forward does not take; your own data_collator gets them by name.", **TUNABLE
    )
    label_names: list[str] | None = setting(None, "Inputs that are labels (None: from the model's forward).", **FIXED)
    train_sampling_strategy: str = setting(
        "random",
        "Order of the training samples.",
        on_resume=ORDER,
        searchable=True,
        choices=("random", "sequential", "group_by_length", "batch_rebalance"),
        formerly={"group_by_length": Switch("group_by_length")},
    )
    length_column_name: str = setting(
        "length", "Column with each sample's length, for grouping by length.", on_resume=ORDER, searchable=True
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class DistributedFields(FieldGroup, group="Distributed"):
    ddp_find_unused_parameters: bool | None = setting(None, "DDP: look for parameters without gradient.", **TUNABLE)
    ddp_bucket_cap_mb: int | None = setting(
        None, "DDP: size of a gradient bucket in MB.", **TUNABLE, limits=Range(0, open_low=True, optional=True)
    )
    ddp_broadcast_buffers: bool | None = setting(None, "DDP: broadcast buffers before each forward pass.", **TUNABLE)
    ddp_static_graph: bool | None = setting(None, "DDP: promise that the graph is the same in every step.", **TUNABLE)
    ddp_backend: str | None = setting(
        None,
        "Backend of torch.distributed (None: by device).",
        **FIXED,
        choices=("nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"),
    )
    ddp_timeout: int = setting(
        1800,
        "Seconds after which a collective operation gives up.",
        **FIXED,
        limits=Range(0, open_low=True, only_warns=True),
    )
    fsdp: str | None = setting(  # True and lists too; argument parsers want one type that text converts to
        None, "Shard the model; True, or words such as 'full_shard auto_wrap offload'.", **FIXED, bare_flag=True
    )
    fsdp_config: dict[str, Any] | str | None = setting(
        None,
        "Settings of FSDP: dict, JSON, or path of a JSON file.",
        **FIXED,
        syntax=("dict", "maybe_path"),
        formerly={
            "fsdp_min_num_params": Entry("min_num_params", unset=(None, 0), reads=int),
            "fsdp_transformer_layer_cls_to_wrap": Entry("transformer_layer_cls_to_wrap"),
        },
    )
    deepspeed: dict[str, Any] | str | None = setting(
        None, "DeepSpeed's configuration: dict, JSON, or path.", **FIXED, syntax=("dict", "maybe_path")
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class ScriptFields(FieldGroup, group="Run"):
    debug: str | list[DebugOption] = setting(
        "",
        "Words: underflow_overflow (find the first layer with inf or nan), tpu_metrics_debug (no effect).",
        **TUNABLE,
        formerly={"tpu_metrics_debug": Item("tpu_metrics_debug")},
    )
    skip_memory_metrics: bool = setting(True, "False: add a memory report to the metrics of each stage.", **FIXED)
    do_train: bool = setting(
        False, "For scripts: train. The trainer itself does not read it.", **NOT_COMPARED, summarized=True
    )
    do_eval: bool = setting(
        False, "For scripts: evaluate. Set by itself when eval_strategy is not 'no'.", **NOT_COMPARED, summarized=True
    )
    do_predict: bool = setting(False, "For scripts: predict on the test set.", **NOT_COMPARED, summarized=True)
    resume_from_checkpoint: str | None = setting(
        None,
        "Checkpoint that train() resumes from, if it is given none; 'auto': the newest whole one, or none.",
        **NOT_COMPARED,
        syntax=("maybe_path",),
    )
    local_rank: int = setting(
        -1,
        "Set by old launchers and accepted from them; read local_process_index instead.",
        **NOT_COMPARED,
        limits=BY_RULES,
    )
