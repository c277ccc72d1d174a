"""Advice about the guard: policies and settings that have no effect next to others."""

from __future__ import annotations

from trainwright.config.enums import word
from trainwright.config.fields import value_of
from trainwright.config.protocol import Arguments
from trainwright.config.rules.advice import updates_in_backward
from trainwright.config.rules.stages import Stage, idle_family, no_effect, rule

OF_ROLLBACKS = ("max_rollbacks", "rollback_every", "rollback_skip_samples")
OF_SPIKES = ("spike_threshold", "spike_window", "spike_warmup")


@rule(Stage.ADVICE, "optim", "deepspeed", "on_nonfinite", "on_spike")
def guarded_updates(args: Arguments) -> str | None:
    policies = {name: value_of(args, name) for name in ("on_nonfinite", "on_spike")}
    asked = [f"{name}={value!r}" for name, value in policies.items() if value not in ("ignore", "off")]
    name = word(args.optim)
    if updates_in_backward(name):
        where = f"with optim={name!r}: it changes weights during the backward pass"
    elif not args.deepspeed:
        return None
    else:
        from trainwright.config import deepspeed_config

        where = "with ZeRO stage 0 of DeepSpeed: it does not report the norm of the gradients"
        if deepspeed_config.get(deepspeed_config.read(args.deepspeed), "zero_optimization.stage"):
            decided = {"on_nonfinite": ("rollback",), "on_spike": ("skip", "rollback", "stop")}  # before the update
            asked = [f"{name}={value!r}" for name, value in policies.items() if value in decided[name]]
            where = "with DeepSpeed, which decides by itself before its update: it skips a step that is not finite"
    return no_effect(asked, where, joined_by=" and ") if asked else None


@rule(Stage.ADVICE, "on_nonfinite", "on_spike", *OF_ROLLBACKS)
def rollback_settings(args: Arguments) -> str | None:
    if "rollback" in (value_of(args, "on_nonfinite"), value_of(args, "on_spike")):
        return None
    return idle_family(args, OF_ROLLBACKS, "without on_nonfinite='rollback' or on_spike='rollback'")


@rule(Stage.ADVICE, "on_spike", *OF_SPIKES)
def spike_settings(args: Arguments) -> str | None:
    return idle_family(args, OF_SPIKES, "with on_spike='off'") if value_of(args, "on_spike") == "off" else None
