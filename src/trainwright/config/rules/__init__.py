"""Rules between settings: which cannot go together and what to change, and which have no effect.

A rule is a function in construction.py, start.py or advice.py, registered with its stage and its fields
(stages.py). All that is wrong is listed in one error. A rule is an error only where transformers' Trainer raises
too, or where work or correctness would be lost; otherwise it warns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainwright.config.constructor import refuse
from trainwright.config.fields import out_of_range
from trainwright.config.protocol import Arguments
from trainwright.config.rules import advice, construction, start  # noqa: F401 -- they register their rules
from trainwright.config.rules.stages import RunFacts, Stage, of_stage

NOTHING_KNOWN = RunFacts()


def check(args: Arguments) -> None:
    """Raise one ArgumentError that lists all that is wrong with `args`."""
    refuse(violations(args))


def check_run(args: Arguments, facts: RunFacts) -> None:
    """Raise one ArgumentError that lists all that is wrong with `args` for this run."""
    refuse(violations(args, facts))


def violations(args: Arguments, facts: RunFacts = NOTHING_KNOWN) -> list[str]:
    """Messages about single fields and about contradictions, as far as `facts` are known."""
    wrong = list(out_of_range(args))
    return [message for _, message in wrong] + list(_contradictions(args, facts, wrong={name for name, _ in wrong}))


def advise(args: Arguments) -> list[str]:
    """Returns what is set but has no effect beside the other settings."""
    return [message for one in of_stage(Stage.ADVICE) if (message := one.message(args, NOTHING_KNOWN))]


def cautions(args: Arguments, facts: RunFacts) -> list[str]:
    """Returns what is set and does nothing in this run, or not what it seems to ask for."""
    return [message for one in of_stage(Stage.WARNING) if (message := one.message(args, facts))]


def _contradictions(args: Arguments, facts: RunFacts, *, wrong: set[str]) -> Iterator[str]:
    """`wrong`: fields that hold what they must not. A rule may fail over them; they have been named already."""
    facts = _with_length(facts, args)
    for one in [*of_stage(Stage.CONSTRUCTION), *of_stage(Stage.START)]:
        try:
            message = one.message(args, facts)
        except TypeError:
            if one.fields.isdisjoint(wrong):
                raise
        else:
            if message:
                yield message


def _with_length(facts: RunFacts, args: Arguments) -> RunFacts:
    if facts.max_steps is None and isinstance(args.max_steps, int) and args.max_steps > 0:
        return replace(facts, max_steps=args.max_steps)
    return facts
