"""How a call of an arguments class reaches its fields: by position, by name, by an older name.

The `__init__` of a dataclass is generated, in each subclass anew, after the class body has run. So it is wrapped when
the class makes its first instance (`TrainingArguments.__new__`). An `__init__` that somebody wrote by hand is left
alone; what it passes on to ours is translated there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from trainwright.config.fields import OlderFields, OurFields
from trainwright.config.help import defaults_of
from trainwright.config.legacy import Translation, translate
from trainwright.errors import ArgumentError, UnknownArgumentError

# The order in which transformers 5.23 takes its arguments without names.
POSITIONS = tuple(
    """
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha
    torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step
    log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
    disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config
    parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank
    """.split()  # noqa: SIM905 -- a line for each name would hide the file
)
PENDING = "_translation"  # on an instance under construction only: what its names left to complain about


class FieldSignature:
    """For `__signature__` of a class: the parameters of its `__init__`, which a `__new__` would hide from inspect."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        of_init = inspect.signature(owner.__init__)  # type: ignore[misc]  # of the class itself, not of a subclass
        return of_init.replace(parameters=list(of_init.parameters.values())[1:])


def accept_old_names(kind: type) -> None:
    """Wrap the generated `__init__` of `kind`, once. Does nothing to one written by hand, or inherited."""
    init = vars(kind).get("__init__")
    if init is not None and not hasattr(init, "accepts_old_names") and _is_generated(kind, init):
        kind.__init__ = _accepting(kind, init)  # type: ignore[misc]  # replacing it is the purpose


def refuse(problems: Sequence[str], *, kind: type[ArgumentError] = ArgumentError) -> None:
    """Raise one error that tells all problems; none: do nothing."""
    if problems:
        listed = "\n".join([f"{len(problems)} problems with the arguments:", *(f"- {p}" for p in problems)])
        error = kind(problems[0] if len(problems) == 1 else listed)
        error.problems = tuple(problems)
        raise error


def _is_generated(kind: type, init: Callable[..., None]) -> bool:
    """A dataclass' own `__init__` takes exactly the fields."""
    if "__dataclass_fields__" not in vars(kind):
        return False
    names = set(inspect.signature(init).parameters) - {"self"}
    return names == {field.name for field in fields(kind) if field.init}


def _accepting(kind: type, init: Callable[..., None]) -> Callable[..., None]:
    names = [field.name for field in fields(kind) if field.init]
    by_name_only = {field.name for group in (OlderFields, OurFields) for field in fields(group)}
    positions = [*POSITIONS, *(name for name in names if name not in POSITIONS and name not in by_name_only)]

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(positions):
            raise TypeError(f"{kind.__name__} takes {len(positions)} arguments by position, {len(args)} were given")
        if twice := sorted(set(positions[: len(args)]) & set(kwargs)):
            raise TypeError(f"{kind.__name__} got {', '.join(twice)} by position and by name")
        known = dict.fromkeys(names) | defaults_of(kind)
        translation = translate({**dict(zip(positions, args, strict=False)), **kwargs}, known)
        vars(self)[PENDING] = translation
        try:
            init(self, **translation.given)
            finish(self, [])  # for a subclass whose __post_init__ does not call ours
        finally:
            vars(self).pop(PENDING, None)

    accept.accepts_old_names = True  # type: ignore[attr-defined]
    return accept


def finish(instance: Any, problems: Sequence[str]) -> None:
    """Raise what the names of the call and `problems` amount to."""
    translation = vars(instance).pop(PENDING, None) or Translation({})
    kind = UnknownArgumentError if translation.has_unknown else ArgumentError
    refuse([*translation.problems, *problems], kind=kind)
