"""Advice about the guard: policies and settings that have no effect next to others."""

from __future__ import annotations

from trainwright.config.fields import get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.advice import OF_BACKENDS_DECISIONS, find_backends_decision
from trainwright.config.rules.stages import Stage, idle_family, no_effect, rule

OF_ROLLBACKS = ("max_rollbacks", "rollback_every", "rollback_skip_samples")
OF_SPIKES = ("spike_threshold", "spike_window", "spike_warmup")


@rule(Stage.ADVICE, *OF_BACKENDS_DECISIONS, "on_nonfinite", "on_spike")
def guarded_updates(args: Arguments) -> str | None:
    policies = {name: get_value(args, name) for name in ("on_nonfinite", "on_spike")}
    found = find_backends_decision(args)
    if found is None:
        return None
    asked = [f"{name}={value!r}" for name, value in policies.items() if value not in ("ignore", "off")]
    if found.skips_nonfinite:
        decided = {"on_nonfinite": ("rollback",), "on_spike": ("skip", "rollback", "stop")}  # before the update
        asked = [f"{name}={value!r}" for name, value in policies.items() if value in decided[name]]
    return no_effect(asked, found.where, joined_by=" and ") if asked else None


@rule(Stage.ADVICE, "on_nonfinite", "on_spike", *OF_ROLLBACKS)
def rollback_settings(args: Arguments) -> str | None:
    if "rollback" in (get_value(args, "on_nonfinite"), get_value(args, "on_spike")):
        return None
    return idle_family(args, OF_ROLLBACKS, "without on_nonfinite='rollback' or on_spike='rollback'")


@rule(Stage.ADVICE, "on_spike", *OF_SPIKES)
def spike_settings(args: Arguments) -> str | None:
    return idle_family(args, OF_SPIKES, "with on_spike='off'") if get_value(args, "on_spike") == "off" else None
