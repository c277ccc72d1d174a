"""Settings that are not wrong but do nothing beside the others. Said once when training starts, never an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainwright.config.owned import owned

Rule = Callable[[Any], "str | None"]
RULES: list[Rule] = []
PROJECTED = ("galore", "apollo")
TAKES_NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")

# Settings of one thing, with the values that ask for nothing.
OF_TRACKERS = {
    "run_name": None, "project": "huggingface",
    "trackio_space_id": None, "trackio_bucket_id": None, "trackio_static_space_id": None,
}  # fmt: skip
OF_THE_HUB = {
    "hub_model_id": None, "hub_strategy": "every_save", "hub_token": None, "hub_private_repo": None,
    "hub_always_push": False, "hub_revision": None,
}  # fmt: skip
OF_SEVERAL_PROCESSES = {
    "ddp_backend": None, "ddp_timeout": 1800, "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None,
    "ddp_broadcast_buffers": None, "ddp_static_graph": None, "eval_use_gather_object": False,
}  # fmt: skip


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def _without(args: Any, name: str, switch: str) -> str | None:
    if getattr(args, name, None) and not getattr(args, switch, None):
        return f"{name} has no effect without {switch}."
    return None


def _family(args: Any, defaults: Mapping[str, Any], where: str) -> str | None:
    """One message about all members of a family that were set."""
    names = [name for name, default in defaults.items() if getattr(args, name, default) != default]
    if not names:
        return None
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {where}."


@rule
def checkpointing_settings(args: Any) -> str | None:
    return _without(args, "activation_checkpointing_kwargs", "activation_checkpointing")


@rule
def liger_settings(args: Any) -> str | None:
    return _without(args, "liger_kernel_config", "use_liger_kernel")


@rule
def fsdp_settings(args: Any) -> str | None:
    return _without(args, "fsdp_config", "fsdp")


@rule
def tracker_settings(args: Any) -> str | None:
    return None if args.report_to else _family(args, OF_TRACKERS, "without report_to")


@rule
def tensorboard_folder(args: Any) -> str | None:
    if getattr(args, "logging_dir", None) is None or {"tensorboard", "all"} & set(args.report_to or ()):
        return None
    return "logging_dir has no effect without report_to='tensorboard'."


@rule
def hub_settings(args: Any) -> str | None:
    return None if args.push_to_hub else _family(args, OF_THE_HUB, "without push_to_hub")


@rule
def settings_of_several_processes(args: Any) -> str | None:
    return None if args.world_size > 1 else _family(args, OF_SEVERAL_PROCESSES, "in one process")


@rule
def accelerator_settings(args: Any) -> str | None:
    """Batches are neither split nor dispatched where one process has them all."""
    config = getattr(args, "accelerator_config", None)
    if config is None or args.world_size > 1:
        return None
    several = {"split_batches": False, "dispatch_batches": None, "even_batches": True}
    idle = [f"accelerator_config.{name}" for name, default in several.items() if getattr(config, name) != default]
    if (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        idle.append("accelerator_config.gradient_accumulation_kwargs['sync_each_batch']")
    verb = "has" if len(idle) == 1 else "have"
    return f"{', '.join(idle)} {verb} no effect in one process." if idle else None


@rule
def generation_length(args: Any) -> str | None:
    return _without(args, "generation_max_length", "predict_with_generate")


@rule
def generation_beams(args: Any) -> str | None:
    return _without(args, "generation_num_beams", "predict_with_generate")


@rule
def generation_configuration(args: Any) -> str | None:
    return _without(args, "generation_config", "predict_with_generate")


@rule
def tpu_cores(args: Any) -> str | None:
    return _family(args, {"tpu_num_cores": None}, "without a TPU")


@rule
def ray_scope(args: Any) -> str | None:
    return _family(args, {"ray_scope": "last"}, "without a hyperparameter search by Ray")


@rule
def projected_modules(args: Any) -> str | None:
    name = str(getattr(args.optim, "value", args.optim))
    if args.optim_target_modules and not name.startswith(PROJECTED):
        return f"optim_target_modules has no effect with optim={name!r}: only GaLore and APOLLO project modules."
    return None


@rule
def warmup_of_a_constant_rate(args: Any) -> str | None:
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if args.warmup_steps > 0 and name in TAKES_NO_WARMUP:
        cure = " Use lr_scheduler_type='constant_with_warmup'." if name == "constant" else ""
        return f"warmup_steps={args.warmup_steps} has no effect with lr_scheduler_type={name!r}.{cure}"
    return None


@rule
def epochs_beside_steps(args: Any) -> str | None:
    if args.max_steps > 0 and args.num_train_epochs != 3.0:
        return f"num_train_epochs={args.num_train_epochs} has no effect: max_steps={args.max_steps} sets the length."
    return None


@rule
def settings_of_packing(args: Any) -> str | None:
    defaults = {"packing_length": None, "packing_overflow": "error"}
    return None if owned(args, "packing") else _family(args, defaults, "without packing")


@rule
def last_batch_of_a_budget(args: Any) -> str | None:
    if args.dataloader_drop_last and owned(args, "max_tokens_per_batch"):
        return "dataloader_drop_last has no effect with max_tokens_per_batch: every batch is as full as it can be."
    return None


@rule
def kept_beyond_no_limit(args: Any) -> str | None:
    if args.save_total_limit:
        return None
    family = {"save_keep_every": None, "save_keep_every_steps": None}
    return _family(args, family, "without save_total_limit: all checkpoints are kept")


@rule
def limit_without_saves(args: Any) -> str | None:
    by_time = any(getattr(args, name, None) for name in ("save_every", "max_train_time"))
    if args.save_total_limit is not None and args.save_strategy == "no" and not by_time:
        return f"save_total_limit={args.save_total_limit} has no effect with save_strategy='no'."
    return None


@rule
def saving_on_exception(args: Any) -> str | None:
    if not getattr(args, "save_on_exception", False):
        return None
    name = str(getattr(args.optim, "value", args.optim))
    if args.world_size > 1:
        return "save_on_exception has no effect in several processes: those without the error are within the next step."
    if "lomo" in name or name.endswith("layerwise"):
        return f"save_on_exception has no effect with optim={name!r}: it changes weights during the backward pass."
    return None
