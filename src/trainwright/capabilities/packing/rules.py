"""Rules about `packing`: it needs a length, and no other way to form batches goes with it."""

from __future__ import annotations

from trainwright.capability_table import BATCHING_FIELDS
from trainwright.config.fields import batching_fields, get_value
from trainwright.config.protocol import Arguments
from trainwright.config.rules.stages import Stage, idle_family, rule


@rule(Stage.CONSTRUCTION, *BATCHING_FIELDS)
def one_way_to_form_batches(args: Arguments) -> str | None:
    packing = get_value(args, "packing")
    others = [name for name in batching_fields(args) if name != "packing" and getattr(args, name)]
    if packing and others:
        return (
            f"{others[0]}={getattr(args, others[0])} and packing={packing!r} both form batches by "
            "length. Keep one: packing leaves almost no padding, a budget works with every model."
        )
    return None


@rule(Stage.CONSTRUCTION, "packing", "packing_length")
def packing_needs_a_length(args: Arguments) -> str | None:
    packing = get_value(args, "packing")
    if packing is not None and get_value(args, "packing_length") is None:
        return (
            f"packing={packing!r} fills rows of packing_length tokens, and there is none. Set packing_length, for "
            "example to the longest sample."
        )
    return None


@rule(Stage.ADVICE, "packing_length", "packing_overflow", "packing")
def packing_settings(args: Arguments) -> str | None:
    if get_value(args, "packing"):
        return None
    return idle_family(args, ("packing_length", "packing_overflow"), "without packing")
