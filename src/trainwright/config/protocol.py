"""Arguments as the library reads them: after construction, of our class or of transformers'.

Our own fields, which arguments of transformers lack, are not here: `fields.get_value(args, name)` reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainwright.config.fields import SharedFields

if TYPE_CHECKING:
    import torch

    from trainwright.config.accelerator import AcceleratorConfig
    from trainwright.config.enums import DebugOption


class Arguments(SharedFields):
    """The fields that our arguments share with transformers', as construction leaves them; never made, only a type.

    Words of an enum are typed as text: enums of transformers compare equal to it as ours do.
    """

    output_dir: str
    lr_scheduler_type: str
    lr_scheduler_kwargs: dict[str, Any] | None
    optim: str
    max_grad_norm: float | None  # type: ignore[assignment]  # transformers' may be None
    activation_checkpointing: bool
    activation_checkpointing_kwargs: dict[str, Any] | None
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | None
    liger_kernel_config: dict[str, bool] | None
    logging_strategy: str
    include_num_input_tokens_seen: str
    disable_tqdm: bool
    report_to: list[str]
    eval_strategy: str
    eval_delay: float | None  # type: ignore[assignment]
    save_strategy: str
    hub_strategy: str
    accelerator_config: AcceleratorConfig
    fsdp: bool | None  # type: ignore[assignment]
    fsdp_config: dict[str, Any] | None
    debug: list[DebugOption]
    resume_from_checkpoint: str | bool | None  # type: ignore[assignment]

    # Derived from the fields and the environment.
    device: torch.device
    parallel_mode: object
    n_gpu: int
    world_size: int
    process_index: int
    local_process_index: int
    train_batch_size: int
    eval_batch_size: int
    should_log: bool
    should_save: bool
    place_model_on_device: bool | None
    mixed_precision: str
    ddp_timeout_delta: timedelta
    get_process_log_level: Callable[[], int]
    get_warmup_steps: Callable[[int], int]
    to_dict: Callable[[], dict[str, Any]]
    to_json_string: Callable[[], str]
    to_sanitized_dict: Callable[[], dict[str, Any]]
