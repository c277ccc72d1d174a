"""Advice: settings that have no effect next to others. Logged once when training starts, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from trainwright.config.accelerator import AcceleratorConfig
from trainwright.config.enums import word
from trainwright.config.fields import RANGES, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, all_set, idle_family, no_effect, rule

PROJECTED = ("galore", "apollo")
TAKES_NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")

UNUSUAL = tuple(name for name, limits in RANGES.items() if limits.only_warns)

# Settings of one thing.
OF_TRACKERS = ("run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
OF_THE_HUB = ("hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision")
OF_SEVERAL_PROCESSES = (
    "ddp_backend",
    "ddp_timeout",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    "eval_use_gather_object",
)


def _without(args: Arguments, name: str, switch: str) -> str | None:
    """A message about a setting that is on while its switch is off."""
    return no_effect([name], f"without {switch}") if get_value(args, name) and not get_value(args, switch) else None


for _called, _setting, _switch in (
    ("checkpointing_settings", "activation_checkpointing_kwargs", "activation_checkpointing"),
    ("timeout_of_workers", "dataloader_timeout", "dataloader_num_workers"),
    ("liger_settings", "liger_kernel_config", "use_liger_kernel"),
    ("generation_length", "generation_max_length", "predict_with_generate"),
    ("generation_beams", "generation_num_beams", "predict_with_generate"),
    ("generation_configuration", "generation_config", "predict_with_generate"),
):
    rule(Stage.ADVICE, _setting, _switch, called=_called)(partial(_without, name=_setting, switch=_switch))


@rule(Stage.ADVICE, "activation_checkpointing_kwargs", "torch_compile")
def kept_compiled_activations(args: Arguments) -> str | None:
    options = get_value(args, "activation_checkpointing_kwargs") or {}
    if "save" not in options or not get_value(args, "torch_compile"):
        return None
    return "save in activation_checkpointing_kwargs has no effect with torch_compile, which hides the layers' outputs."


def _idle(name: str, members: tuple[str, ...], where: str, *switches: str) -> None:
    """Makes the rule `name`: non-default settings have no effect unless one of the switches is on."""

    @rule(Stage.ADVICE, *members, *switches, called=name)
    def check(args: Arguments) -> str | None:
        return None if any(get_value(args, switch) for switch in switches) else idle_family(args, members, where)


_idle("tracker_settings", OF_TRACKERS, "without report_to", "report_to")
_idle("hub_settings", OF_THE_HUB, "without push_to_hub", "push_to_hub")
_idle("tpu_cores", ("tpu_num_cores",), "without a TPU")
_idle("ray_scope", ("ray_scope",), "without a hyperparameter search by Ray")


def _keys(config: object) -> set[str]:
    return {key.removeprefix("fsdp_") for key in config} if isinstance(config, Mapping) else set()


@rule(Stage.ADVICE, "fsdp", "fsdp_config", "use_cpu")
def fsdp_settings(args: Arguments) -> str | None:
    from trainwright.config.fsdp_config import STATE_DICT_TYPE, without_effect

    if not args.fsdp:
        of_a_model_in_parts = args.world_size > 1 and _keys(args.fsdp_config) == {STATE_DICT_TYPE}
        return None if of_a_model_in_parts else _without(args, "fsdp_config", "fsdp")
    idle = without_effect(args.fsdp_config or {}, on_cpu=args.device.type == "cpu")
    return f"Without effect in fsdp_config: {', '.join(idle)}." if idle else None


@rule(Stage.ADVICE, "report_to", "logging_dir")
def tensorboard_folder(args: Arguments) -> str | None:
    if get_value(args, "logging_dir") is None or {"tensorboard", "all"} & set(args.report_to or ()):
        return None
    return "logging_dir has no effect without report_to='tensorboard'."


@rule(Stage.ADVICE, *OF_SEVERAL_PROCESSES)
def multi_process_settings(args: Arguments) -> str | None:
    return None if args.world_size > 1 else idle_family(args, OF_SEVERAL_PROCESSES, "in one process")


@rule(Stage.ADVICE, "accelerator_config")
def accelerator_settings(args: Arguments) -> str | None:
    """Batches are neither split nor dispatched in a single process."""
    config = args.accelerator_config
    if config is None or args.world_size > 1:
        return None
    usual = AcceleratorConfig()
    names = ("split_batches", "dispatch_batches", "even_batches")
    idle = [f"accelerator_config.{name}" for name in names if getattr(config, name) != getattr(usual, name)]
    if (config.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        idle.append("accelerator_config.gradient_accumulation_kwargs['sync_each_batch']")
    return no_effect(idle, "in one process") if idle else None


_said = "predict_with_generate has no effect with prediction_loss_only=True, which keeps no predictions."
all_set(Stage.ADVICE, "generated_predictions_are_kept", _said, "predict_with_generate", "prediction_loss_only")


@rule(Stage.ADVICE, "train_sampling_strategy", "sortish_sampler")
def one_sample_order(args: Arguments) -> str | None:
    if get_value(args, "sortish_sampler") and args.train_sampling_strategy == "sequential":
        return "sortish_sampler has no effect with train_sampling_strategy='sequential', which keeps the data's order."
    return None


@rule(Stage.ADVICE, "debug")
def tpu_metrics(args: Arguments) -> str | None:
    if "tpu_metrics_debug" in args.debug:
        return "debug='tpu_metrics_debug' has no effect: it prints the metrics of a TPU, and TPUs are not supported."
    return None


@rule(Stage.ADVICE, "include_for_metrics")
def known_metric_inputs(args: Arguments) -> str | None:
    unknown = [word for word in args.include_for_metrics or [] if word not in ("inputs", "loss")]
    return f"include_for_metrics: {unknown} has no effect; 'inputs' and 'loss' have." if unknown else None


_said = "tf32=True has no effect with use_cpu=True: it is a mode of GPUs."
all_set(Stage.ADVICE, "tf32_needs_a_gpu", _said, "tf32", "use_cpu")


@rule(Stage.ADVICE, *UNUSUAL)
def unusual_numbers(args: Arguments) -> str | None:
    found = (RANGES[name].caution(name, get_value(args, name)) for name in UNUSUAL)
    return " ".join(message for message in found if message) or None


@rule(Stage.ADVICE, "optim", "optim_target_modules")
def projected_modules(args: Arguments) -> str | None:
    name = word(args.optim)
    if args.optim_target_modules and not name.startswith(PROJECTED):
        return f"optim_target_modules has no effect with optim={name!r}: only GaLore and APOLLO project modules."
    return None


@rule(Stage.ADVICE, "lr_scheduler_type", "warmup_steps")
def constant_rate_warmup(args: Arguments) -> str | None:
    name = word(args.lr_scheduler_type)
    if args.warmup_steps > 0 and name in TAKES_NO_WARMUP:
        cure = " Use lr_scheduler_type='constant_with_warmup'." if name == "constant" else ""
        return f"warmup_steps={args.warmup_steps} has no effect with lr_scheduler_type={name!r}.{cure}"
    return None


@rule(Stage.ADVICE, "save_total_limit", "save_keep_every", "save_keep_every_steps")
def kept_beyond_no_limit(args: Arguments) -> str | None:
    where = "without save_total_limit: all checkpoints are kept"
    members = ("save_keep_every", "save_keep_every_steps")
    return None if (args.save_total_limit or 0) > 0 else idle_family(args, members, where)


@rule(Stage.ADVICE, "save_strategy", "save_total_limit", "max_train_time", "save_every")
def limit_without_saves(args: Arguments) -> str | None:
    by_time = any(get_value(args, name) for name in ("save_every", "max_train_time"))
    if (args.save_total_limit or 0) > 0 and args.save_strategy == "no" and not by_time:
        return f"save_total_limit={args.save_total_limit} has no effect with save_strategy='no'."
    return None


@rule(Stage.ADVICE, "optim", "save_on_exception")
def saving_on_exception(args: Arguments) -> str | None:
    if not get_value(args, "save_on_exception"):
        return None
    name = word(args.optim)
    if args.world_size > 1:
        return "save_on_exception has no effect in several processes: those without the error are within the next step."
    if updates_in_backward(name):
        return f"save_on_exception has no effect with optim={name!r}: it changes weights during the backward pass."
    return None


def updates_in_backward(optim: str) -> bool:
    """Returns whether an optimizer of this name changes weights during the backward pass."""
    return "lomo" in optim or optim.endswith("layerwise")


OF_BACKENDS_DECISIONS = ("optim", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendsDecision:
    """A backend or an optimizer that does not let a guard decide about an update."""

    where: str  # as in a message: "with ..., which ..."
    skips_nonfinite: bool = False  # it skips a step that is not finite, and reports it afterwards


def find_backends_decision(args: Arguments) -> BackendsDecision | None:
    """Returns what decides about updates in the place of a guard; None if the guard does."""
    name = word(args.optim)
    if updates_in_backward(name):
        return BackendsDecision(where=f"with optim={name!r}: it changes weights during the backward pass")
    if not args.deepspeed:
        return None
    from trainwright.config import deepspeed_config

    if deepspeed_config.get(deepspeed_config.read(args.deepspeed), "zero_optimization.stage"):
        where = "with DeepSpeed, which decides by itself before its update: it skips a step that is not finite"
        return BackendsDecision(where=where, skips_nonfinite=True)
    return BackendsDecision(where="with ZeRO stage 0 of DeepSpeed: it does not report the norm of the gradients")
