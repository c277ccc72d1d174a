"""Settings that are not wrong but do nothing beside the others. Said once when training starts, never an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], "str | None"]
RULES: list[Rule] = []
PROJECTED = ("galore", "apollo")
TAKES_NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def _without(args: Any, name: str, switch: str) -> str | None:
    if getattr(args, name, None) and not getattr(args, switch, None):
        return f"{name} has no effect without {switch}."
    return None


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
def hub_always_push(args: Any) -> str | None:
    return _without(args, "hub_always_push", "push_to_hub")


@rule
def generation_length(args: Any) -> str | None:
    return _without(args, "generation_max_length", "predict_with_generate")


@rule
def generation_beams(args: Any) -> str | None:
    return _without(args, "generation_num_beams", "predict_with_generate")


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
def limit_without_saves(args: Any) -> str | None:
    if args.save_total_limit is not None and args.save_strategy == "no":
        return f"save_total_limit={args.save_total_limit} has no effect with save_strategy='no'."
    return None
