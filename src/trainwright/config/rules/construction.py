"""Contradictions that the arguments, also of transformers, show by themselves: each rule returns a message or None."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

from trainwright.capability_table import BATCHING_FIELDS
from trainwright.config.coerce import parse_factor, parse_steps
from trainwright.config.enums import word
from trainwright.config.fields import batching_fields, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, all_set, rule
from trainwright.distributed.world import PARALLEL_SIZES

# -- intervals --------------------------------------------------------------------------------------------------------


def _interval(args: Arguments, what: str) -> str | None:
    """No save is a legal interval of saves; transformers counts with negative ones, so a run warns of them."""
    steps = getattr(args, f"{what}_steps")
    if getattr(args, f"{what}_strategy") != "steps":
        return None
    if not is_number(steps) or (steps == 0 and what != "save"):
        also = " (eval_steps falls back to logging_steps)" if what == "eval" else ""
        return (
            f"{what}_strategy='steps' with {what}_steps={steps!r} never comes due{also}. "
            f"Give a positive {what}_steps, or {what}_strategy='no'."
        )
    if steps > 1 and steps != int(steps):
        return f"{what}_steps={steps!r}: a number of steps must be whole; a share of all steps must be below 1."
    return None


for _what in ("logging", "eval", "save"):
    _names = (f"{_what}_strategy", f"{_what}_steps")
    rule(Stage.CONSTRUCTION, *_names, called=f"{_what}_interval")(partial(_interval, what=_what))


@rule(Stage.CONSTRUCTION, "hub_token")
def token_is_text(args: Arguments) -> str | None:
    token: object = args.hub_token
    if token is None or isinstance(token, str):
        return None
    return f"hub_token is a {type(token).__name__}; it is text, or None for the token of the login."


@rule(Stage.CONSTRUCTION, "profile")
def profiled_steps(args: Arguments) -> str | None:
    try:
        if (steps := get_value(args, "profile")) is not None:
            parse_steps(steps)
    except ValueError as error:
        return f"profile: {error}"
    return None


@rule(Stage.CONSTRUCTION, "cooldown", "lr_scheduler_type")
def cooldown_in_steps(args: Arguments) -> str | None:
    cooldown = get_value(args, "cooldown")
    if cooldown is None or args.lr_scheduler_type not in ("reduce_lr_on_plateau", "greedy"):
        return None
    return (
        f"cooldown={cooldown!r} lets the rate fall step by step, and lr_scheduler_type="
        f"{word(args.lr_scheduler_type)!r} moves it after evaluations. Leave one of them out."
    )


# -- evaluation and the best checkpoint -------------------------------------------------------------------------------


@rule(Stage.CONSTRUCTION, "eval_strategy", "save_strategy", "load_best_model_at_end")
def best_needs_evaluation(args: Arguments) -> str | None:
    if args.load_best_model_at_end and args.eval_strategy == "no" and args.save_strategy in ("steps", "epoch"):
        return (
            f"load_best_model_at_end=True needs evaluations at the saves of save_strategy={word(args.save_strategy)!r}"
            ", and eval_strategy='no' has none. Set eval_strategy='epoch' or 'steps', or load_best_model_at_end=False."
        )
    return None


@rule(Stage.CONSTRUCTION, "eval_strategy", "save_strategy", "load_best_model_at_end")
def best_needs_matching_saves(args: Arguments) -> str | None:
    is_asked = args.load_best_model_at_end and args.eval_strategy != "no"
    if not is_asked or args.save_strategy in ("best", args.eval_strategy):
        return None
    return (
        "load_best_model_at_end=True needs a checkpoint at evaluations, but eval_strategy="
        f"{word(args.eval_strategy)!r} and save_strategy={word(args.save_strategy)!r} differ. Make them equal, or set "
        "save_strategy='best'."
    )


@rule(Stage.CONSTRUCTION, "eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end")
def best_saves_are_multiples(args: Arguments) -> str | None:
    is_asked = args.load_best_model_at_end and args.eval_strategy == "steps" and args.save_strategy == "steps"
    if not is_asked or args.eval_steps is None or _is_multiple(args.save_steps, args.eval_steps):
        return None
    reason = "is a share of all steps and the other a number"
    if (args.save_steps < 1) == (args.eval_steps < 1):
        reason = "is not a multiple of the other"
    return (
        f"load_best_model_at_end=True needs an evaluation at every save, but of save_steps={args.save_steps} and "
        f"eval_steps={args.eval_steps} one {reason}. Make save_steps a multiple of eval_steps, or save_strategy='best'."
    )


@rule(Stage.ADVICE, "eval_strategy", "eval_steps", "save_strategy", "save_steps", "load_best_model_at_end")
def best_between_saves(args: Arguments) -> str | None:
    is_asked = args.load_best_model_at_end and args.eval_strategy == "steps" and args.save_strategy == "steps"
    if not is_asked or args.eval_steps is None or args.save_steps == args.eval_steps:
        return None
    return (
        f"With eval_steps={args.eval_steps} and save_steps={args.save_steps}, the best model of "
        "load_best_model_at_end=True may be at an evaluation without a checkpoint, and is lost then. "
        "save_strategy='best' saves each best one."
    )


def _is_multiple(save: Any, evaluate: Any) -> bool:
    if not is_number(save) or not is_number(evaluate) or min(save, evaluate) <= 0:
        return True  # the rule of intervals speaks about these
    if (save < 1) != (evaluate < 1):
        return bool(save == evaluate)
    return bool(round(save * 1_000_000) % round(evaluate * 1_000_000) == 0)


@rule(Stage.CONSTRUCTION, "save_strategy", "metric_for_best_model")
def saving_the_best_needs_a_metric(args: Arguments) -> str | None:
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        return "save_strategy='best' needs metric_for_best_model, for example 'loss'."
    return None


@rule(Stage.CONSTRUCTION, "lr_scheduler_type", "eval_strategy")
def schedule_needs_evaluation(args: Arguments) -> str | None:
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy") and args.eval_strategy == "no":
        return (
            f"lr_scheduler_type={word(args.lr_scheduler_type)!r} follows the evaluations, and eval_strategy='no' has "
            "none. Set eval_strategy='epoch' or 'steps', or another schedule."
        )
    return None


# -- precision and devices --------------------------------------------------------------------------------------------


_said = "fp16=True and bf16=True exclude each other. Keep one; bf16 needs no loss scaling."
all_set(Stage.CONSTRUCTION, "one_precision", _said, "bf16", "fp16")
_said = "fp16_full_eval=True and bf16_full_eval=True exclude each other. Keep one."
all_set(Stage.CONSTRUCTION, "one_eval_precision", _said, "bf16_full_eval", "fp16_full_eval")


@rule(Stage.CONSTRUCTION, "use_cpu", "ddp_backend")
def nccl_needs_a_gpu(args: Arguments) -> str | None:
    if args.ddp_backend == "nccl" and args.use_cpu:
        return "ddp_backend='nccl' works between GPUs only, and use_cpu=True uses none. Set ddp_backend='gloo'."
    return None


_said = "fsdp and deepspeed both shard the model. Keep only one."
all_set(Stage.CONSTRUCTION, "one_sharding", _said, "fsdp", "deepspeed")
_said = (
    "save_on_each_node=True writes a whole checkpoint on every node, and with fsdp each process has parts of "
    "it. Save to a disk that all nodes share, with save_on_each_node=False."
)
all_set(Stage.CONSTRUCTION, "parts_on_one_disk", _said, "save_on_each_node", "fsdp")


@rule(Stage.CONSTRUCTION, "bf16_full_eval", "fp16_full_eval", "fsdp")
def parts_keep_their_type(args: Arguments) -> str | None:
    names = [name for name in ("fp16_full_eval", "bf16_full_eval") if getattr(args, name)]
    if args.fsdp and names:
        return (
            f"{names[0]}=True changes the type of whole weights for an evaluation, and fsdp keeps them in parts of one "
            f"type. Use {names[0].partition('_')[0]}=True, or leave fsdp out."
        )
    return None


@rule(Stage.CONSTRUCTION, "gradient_accumulation_steps", "accelerator_config")
def one_accumulation(args: Arguments) -> str | None:
    config = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    num_steps = config.get("num_steps", args.gradient_accumulation_steps)
    if args.gradient_accumulation_steps > 1 and num_steps != args.gradient_accumulation_steps:
        return (
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} and accelerator_config's "
            f"gradient_accumulation_kwargs num_steps={num_steps} differ. Keep gradient_accumulation_steps."
        )
    return None


_said = "save_only_model=True omits files that load_best_model_at_end=True loads under deepspeed. Set either to False."
_called = "sharded_best_needs_full_checkpoints"
_needs = ("save_only_model", "load_best_model_at_end", "deepspeed")
all_set(Stage.CONSTRUCTION, _called, _said, *_needs)


# -- learning rates by parameter --------------------------------------------------------------------------------------


@rule(Stage.CONSTRUCTION, "layerwise_lr_decay")
def layer_above_share(args: Arguments) -> str | None:
    decay = get_value(args, "layerwise_lr_decay")
    if decay is None or (is_number(decay) and 0 < decay <= 1):
        return None
    return f"layerwise_lr_decay={decay!r} must be a number above 0 and at most 1, such as 0.9 (None: all layers alike)."


@rule(Stage.CONSTRUCTION, "lr_groups")
def rates_by_pattern(args: Arguments) -> str | None:
    groups = get_value(args, "lr_groups")
    if groups is None:
        return None
    example = "Write {pattern: rate or factor}, for example {'classifier': 1e-3, 'encoder': '0.1x'}."
    if not isinstance(groups, Mapping) or not all(isinstance(pattern, str) for pattern in groups):
        return f"lr_groups={groups!r} is not a dict of patterns. {example}"
    for pattern, value in groups.items():
        try:
            re.compile(pattern)
        except re.error as error:
            return f"lr_groups: {pattern!r} is not a regular expression ({error})."
        is_rate = is_number(value) and not isinstance(value, bool) and value >= 0
        if not is_rate and parse_factor(value) is None:
            return f"lr_groups: {value!r} of {pattern!r} is neither a rate nor a factor. {example}"
    return None


# -- data -------------------------------------------------------------------------------------------------------------


def _needs_workers(args: Arguments, name: str) -> str | None:
    value = getattr(args, name)
    if args.dataloader_num_workers == 0 and value not in (None, False):
        return (
            f"{name}={value!r} is about worker processes, and dataloader_num_workers=0 starts none. "
            f"Raise dataloader_num_workers, or drop {name}."
        )
    return None


for _what, _name in (
    ("prefetch", "dataloader_prefetch_factor"),
    ("persistence", "dataloader_persistent_workers"),
    ("start_method", "dataloader_multiprocessing_context"),
):
    _check = partial(_needs_workers, name=_name)
    rule(Stage.CONSTRUCTION, "dataloader_num_workers", _name, called=f"{_what}_needs_workers")(_check)


@rule(Stage.CONSTRUCTION, "train_sampling_strategy", *BATCHING_FIELDS)
def formed_batches_have_their_order(args: Arguments) -> str | None:
    asked = batching_fields(args)
    if not asked or args.train_sampling_strategy == "random":
        return None
    return (
        f"{asked[0]}={getattr(args, asked[0])!r} decides which samples go together, and "
        f"train_sampling_strategy={args.train_sampling_strategy!r} does too. Leave the latter at 'random'."
    )


@rule(Stage.CONSTRUCTION, "accelerator_config", *BATCHING_FIELDS)
def formed_batches_stay_whole(args: Arguments) -> str | None:
    asked = batching_fields(args)
    config = args.accelerator_config
    taken_apart = [name for name in ("split_batches", "dispatch_batches") if getattr(config, name, None)]
    if not asked or not taken_apart:
        return None
    return (
        f"{asked[0]}={getattr(args, asked[0])!r} forms the batches of each process, and "
        f"accelerator_config.{taken_apart[0]}=True cuts batches apart. Drop either."
    )


@rule(Stage.CONSTRUCTION, "parallelism_config")
def sizes_are_accelerates(args: Arguments) -> str | None:
    config = args.parallelism_config
    sizes = {name: getattr(config, name, None) for name in PARALLEL_SIZES}
    wrong = [name for name, size in sizes.items() if not (type(size) is int and size >= 1)]
    if config is None or not wrong:
        return None
    return (
        f"parallelism_config={config!r} has no whole number from 1 up as {', '.join(wrong)}. Pass accelerate's "
        "ParallelismConfig(tp_size=2), for example."
    )


def is_number(value: object) -> bool:
    """Returns True for a real number, including a bool."""
    return isinstance(value, Real)
