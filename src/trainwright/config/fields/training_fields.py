"""Fields of length, batches, optimizer, schedule and precision."""

# ruff: noqa: RUF009 -- setting() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.config.aliases import APEX, Renamed, Switch, ratio_of_steps, share_of_steps
from trainwright.config.enums import OptimizerNames, SchedulerType
from trainwright.config.fields.setting import (
    ANY_NUMBER,
    ANY_WHOLE,
    COUNT,
    LENGTH,
    MAYBE_COUNT,
    NOT_COMPARED,
    NOT_NEGATIVE,
    PER_START,
    RATE,
    SHAPE,
    SHARE,
    SIZE,
    TUNABLE,
    USUALLY_NOT_NEGATIVE,
    FieldGroup,
    Range,
    setting,
)


@dataclass(init=False, repr=False, eq=False)
class OutputFields(FieldGroup, group="Run"):
    output_dir: str | None = setting(
        None,
        "Directory for checkpoints and results (None: trainer_output).",
        **NOT_COMPARED,
        syntax=("path",),
        summarized=True,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LengthFields(FieldGroup, group="Length and batch"):
    per_device_train_batch_size: int = setting(
        8,
        "Samples per device and forward pass in training.",
        on_resume=SIZE,
        searchable=True,
        limits=COUNT,
        summarized=True,
        formerly={"per_gpu_train_batch_size": Renamed(reads=int)},
    )
    num_train_epochs: float = setting(
        3.0,
        "Passes over the training data; may be a fraction.",
        on_resume=LENGTH,
        searchable=True,
        limits=ANY_NUMBER,
        summarized=True,
    )
    max_steps: int = setting(
        -1,
        "Optimizer steps to train, instead of num_train_epochs (-1: by epochs).",
        on_resume=LENGTH,
        searchable=True,
        limits=ANY_WHOLE,
        summarized=True,
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class OptimizerFields(FieldGroup, group="Optimizer and schedule"):
    learning_rate: float = setting(
        5e-05, "Peak learning rate.", on_resume=RATE, searchable=True, limits=NOT_NEGATIVE, summarized=True
    )
    lr_scheduler_type: SchedulerType | str = setting(
        "linear",
        "How the rate moves after warm-up.",
        on_resume=SHAPE,
        searchable=True,
        enum=SchedulerType,
        summarized=True,
    )
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        None, "More parameters of the schedule.", on_resume=SHAPE, searchable=True, syntax=("dict",)
    )
    warmup_steps: float = setting(
        0,
        "Steps in which the rate rises from 0; below 1: share of all steps.",
        on_resume=SHAPE,
        searchable=True,
        limits=Range(0, hint="Below 1 it is a share of all steps."),
        summarized=True,
        formerly={
            "warmup_ratio": Renamed(
                convert=share_of_steps, back=ratio_of_steps, note=" with a share below 1", reads=float, yields=True
            )
        },
    )
    optim: OptimizerNames | str = setting(
        "adamw_torch_fused",
        "Name of the optimizer.",
        **TUNABLE,
        enum=OptimizerNames,
        summarized=True,
        formerly={"adafactor": Switch("adafactor")},
        older_values={"adamw_hf": "adamw_torch"},
        refused_values={"adamw_apex_fused": f"{APEX}, and a fused AdamW. Instead: optim='adamw_torch_fused'."},
    )
    optim_args: str | None = setting(None, "More parameters of the optimizer: 'key=value,key=value'.", **TUNABLE)
    weight_decay: float = setting(
        0.0, "Weight decay; not applied to biases and normalisation layers.", **TUNABLE, limits=USUALLY_NOT_NEGATIVE
    )
    adam_beta1: float = setting(0.9, "Adam: decay of the running mean of gradients.", **TUNABLE, limits=SHARE)
    adam_beta2: float = setting(0.999, "Adam: decay of the running mean of squared gradients.", **TUNABLE, limits=SHARE)
    adam_epsilon: float = setting(1e-08, "Adam: added to the denominator.", **TUNABLE, limits=USUALLY_NOT_NEGATIVE)
    optim_target_modules: list[str] | str | None = setting(
        None, "Modules that GaLore and APOLLO project: names, a regular expression, or 'all-linear'.", **TUNABLE
    )
    gradient_accumulation_steps: int = setting(
        1,
        "Forward passes whose gradients make one optimizer step.",
        on_resume=SIZE,
        searchable=True,
        limits=COUNT,
        summarized=True,
    )
    average_tokens_across_devices: bool = setting(
        True, "Weigh the loss by the tokens of all processes, not of each process alone.", **TUNABLE
    )
    max_grad_norm: float = setting(
        1.0,
        "Clip gradients to this global norm (0: no clipping).",
        **TUNABLE,
        limits=Range(0, optional=True, only_warns=True, hint="Nothing is clipped, as with 0."),
    )
    label_smoothing_factor: float = setting(
        0.0, "Share of the target spread over all labels, 0 to below 1.", **TUNABLE, limits=SHARE
    )


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class PrecisionFields(FieldGroup, group="Precision and memory"):
    bf16: bool = setting(
        False, "Train in mixed precision with bfloat16 (accelerators, and the CPU).", **TUNABLE, summarized=True
    )
    fp16: bool = setting(
        False, "Train in mixed precision with float16 and a gradient scaler.", **TUNABLE, summarized=True
    )
    bf16_full_eval: bool = setting(False, "Evaluate with all weights in bfloat16.", **TUNABLE)
    fp16_full_eval: bool = setting(False, "Evaluate with all weights in float16.", **TUNABLE)
    tf32: bool | None = setting(None, "TF32 matrix products on recent GPUs (None: torch's default).", **TUNABLE)
    activation_checkpointing: bool | None = setting(
        None, "Recompute activations in the backward pass: less memory, more time.", **TUNABLE, bare_flag=True
    )
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None,
        "every_n_layers, offload, and parameters of torch.utils.checkpoint.checkpoint.",
        **TUNABLE,
        syntax=("dict",),
    )
    gradient_checkpointing: bool | None = setting(
        None,
        "Older name of activation_checkpointing.",
        on_resume=PER_START,
        searchable=True,
        bare_flag=True,
        alias_of="activation_checkpointing",
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None,
        "Older name of activation_checkpointing_kwargs.",
        on_resume=PER_START,
        searchable=True,
        syntax=("dict",),
        alias_of="activation_checkpointing_kwargs",
    )
    torch_compile: bool = setting(False, "Compile the model with torch.compile.", **TUNABLE)
    torch_compile_backend: str | None = setting(
        None, "Backend of torch.compile (None: inductor); implies it.", **TUNABLE, formerly={"torchdynamo": Renamed()}
    )
    torch_compile_mode: str | None = setting(
        None, "default, reduce-overhead, max-autotune, ...; implies torch_compile.", **TUNABLE
    )
    use_liger_kernel: bool = setting(
        False, "Replace layers by Liger's fused kernels (package liger-kernel).", **TUNABLE
    )
    liger_kernel_config: dict[str, bool] | str | None = setting(
        None, "Which of Liger's kernels: {'rope': true, ...}.", **TUNABLE, syntax=("dict",)
    )
    use_cache: bool = setting(False, "Let the model keep its key-value cache in training.", **TUNABLE)
    neftune_noise_alpha: float | None = setting(
        None, "Strength of NEFTune's noise on embeddings, e.g. 5.", **TUNABLE, limits=Range(0, optional=True)
    )
    torch_empty_cache_steps: int | None = setting(
        None, "Free the device's cached memory every so many steps.", **TUNABLE, limits=MAYBE_COUNT
    )
    auto_find_batch_size: bool = setting(
        False, "Out of memory: cut micro-batches, accumulate over the parts.", **TUNABLE
    )
