"""Which settings cannot go together, and what to change: the checks. The rules themselves are in rules_*.py.

Three kinds: `rules_alone` shows in the arguments and is checked when they are made; `rules_run` needs facts of the run
and is checked when training starts; `rules_idle` is no error, only without effect. All that is wrong is told at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from trainwright.config.construct import refuse
from trainwright.config.ranges import out_of_range
from trainwright.config.rules_alone import RULES
from trainwright.config.rules_idle import RULES as IDLE_RULES
from trainwright.config.rules_run import COMPUTED_BY_EVALUATION, Facts, Wanted, needs_length, resolve_best_metric
from trainwright.config.rules_run import RULES as RUN_RULES

__all__ = [
    "COMPUTED_BY_EVALUATION",
    "IDLE_RULES",
    "RULES",
    "RUN_RULES",
    "Facts",
    "Wanted",
    "check",
    "check_run",
    "idle",
    "needs_length",
    "resolve_best_metric",
    "violations",
]

NOTHING_KNOWN = Facts()


def check(args: Any) -> None:
    """Raise one ArgumentError that lists all that is wrong with `args`."""
    refuse(violations(args))


def check_run(args: Any, facts: Facts) -> None:
    """Raise one ArgumentError that lists all that is wrong with `args` for this run."""
    refuse(violations(args, facts))


def violations(args: Any, facts: Facts = NOTHING_KNOWN) -> list[str]:
    """Messages about single fields and about contradictions, as far as `facts` are known."""
    alone = list(out_of_range(args))
    return alone + list(_contradictions(args, facts, tolerant=bool(alone)))


def idle(args: Any) -> list[str]:
    """What is set but has no effect beside the other settings."""
    return [message for rule in IDLE_RULES if (message := rule(args))]


def _contradictions(args: Any, facts: Facts, *, tolerant: bool) -> Iterator[str]:
    """`tolerant`: a field holds what it must not, so a rule may stumble over it; the field has been named already."""
    questions: list[Callable[[], str | None]] = [partial(rule, args) for rule in RULES]
    questions += [partial(rule, args, _with_length(facts, args)) for rule in RUN_RULES]
    for question in questions:
        try:
            message = question()
        except TypeError:
            if not tolerant:
                raise
        else:
            if message:
                yield message


def _with_length(facts: Facts, args: Any) -> Facts:
    if facts.max_steps is None and isinstance(args.max_steps, int) and args.max_steps > 0:
        return replace(facts, max_steps=args.max_steps)
    return facts
