"""Arguments as the library reads them: after construction, of our class or of transformers'.

Our own fields, which arguments of transformers lack, are not here: `fields.value_of(args, name)` reads those. A test
holds this list against the declarations.
"""

from __future__ import annotations

from dataclasses import Field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from trainwright.config.accelerator import AcceleratorConfig


class Arguments(Protocol):
    """The fields that our arguments share with transformers', each of the type that it has after construction.

    Words of an enum are typed as text: enums of transformers compare equal to it as ours do.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    output_dir: str
    per_device_train_batch_size: int
    num_train_epochs: float
    max_steps: int
    learning_rate: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None
    warmup_steps: float
    optim: str
    optim_args: str | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    optim_target_modules: list[str] | str | None
    gradient_accumulation_steps: int
    average_tokens_across_devices: bool
    max_grad_norm: float | None
    label_smoothing_factor: float
    bf16: bool
    fp16: bool
    bf16_full_eval: bool
    fp16_full_eval: bool
    tf32: bool | None
    activation_checkpointing: bool
    activation_checkpointing_kwargs: dict[str, Any] | None
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | None
    torch_compile: bool
    torch_compile_backend: str | None
    torch_compile_mode: str | None
    use_liger_kernel: bool
    liger_kernel_config: dict[str, bool] | None
    use_cache: bool
    neftune_noise_alpha: float | None
    torch_empty_cache_steps: int | None
    auto_find_batch_size: bool
    logging_strategy: str
    logging_steps: float
    logging_first_step: bool
    log_on_each_node: bool
    logging_nan_inf_filter: bool
    include_num_input_tokens_seen: str
    log_level: str
    log_level_replica: str
    disable_tqdm: bool
    report_to: list[str]
    run_name: str | None
    project: str
    trackio_space_id: str | None
    trackio_bucket_id: str | None
    trackio_static_space_id: Literal[False] | str | None
    eval_strategy: str
    eval_steps: float | None
    eval_delay: float | None
    per_device_eval_batch_size: int
    prediction_loss_only: bool
    eval_on_start: bool
    eval_do_concat_batches: bool
    eval_use_gather_object: bool
    eval_accumulation_steps: int | None
    include_for_metrics: list[str]
    batch_eval_metrics: bool
    save_only_model: bool
    save_strategy: str
    save_steps: float
    save_on_each_node: bool
    save_total_limit: int | None
    enable_jit_checkpoint: bool
    push_to_hub: bool
    hub_token: str | None
    hub_private_repo: bool | None
    hub_model_id: str | None
    hub_strategy: str
    hub_always_push: bool
    hub_revision: str | None
    load_best_model_at_end: bool
    metric_for_best_model: str | None
    greater_is_better: bool | None
    ignore_data_skip: bool
    restore_callback_states_from_checkpoint: bool
    full_determinism: bool
    seed: int
    data_seed: int | None
    use_cpu: bool
    accelerator_config: AcceleratorConfig
    parallelism_config: Any
    dataloader_drop_last: bool
    dataloader_num_workers: int
    dataloader_pin_memory: bool
    dataloader_persistent_workers: bool
    dataloader_prefetch_factor: int | None
    dataloader_multiprocessing_context: str | None
    dataloader_in_order: bool
    remove_unused_columns: bool
    label_names: list[str] | None
    train_sampling_strategy: str
    length_column_name: str
    ddp_find_unused_parameters: bool | None
    ddp_bucket_cap_mb: int | None
    ddp_broadcast_buffers: bool | None
    ddp_static_graph: bool | None
    ddp_backend: str | None
    ddp_timeout: int
    fsdp: bool | None
    fsdp_config: dict[str, Any] | None
    deepspeed: dict[str, Any] | str | None
    debug: list[str]
    skip_memory_metrics: bool
    do_train: bool
    do_eval: bool
    do_predict: bool
    resume_from_checkpoint: str | bool | None
    local_rank: int

    # What follows from the fields and from the environment.

    @property
    def device(self) -> torch.device: ...

    @property
    def parallel_mode(self) -> object: ...

    @property
    def n_gpu(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def process_index(self) -> int: ...

    @property
    def local_process_index(self) -> int: ...

    @property
    def train_batch_size(self) -> int: ...

    @property
    def eval_batch_size(self) -> int: ...

    @property
    def should_log(self) -> bool: ...

    @property
    def should_save(self) -> bool: ...

    @property
    def place_model_on_device(self) -> bool | None: ...

    @property
    def mixed_precision(self) -> str: ...

    @property
    def ddp_timeout_delta(self) -> timedelta: ...

    def get_process_log_level(self) -> int: ...

    def get_warmup_steps(self, num_training_steps: int) -> int: ...

    def to_dict(self) -> dict[str, Any]: ...

    def to_json_string(self) -> str: ...

    def to_sanitized_dict(self) -> dict[str, Any]: ...
