"""Registry of rules: when each is checked, the fields that it concerns, the facts of a run that it may ask for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from trainwright.config.fields import SETTINGS, changed_fields, find_invalid_values, get_value, was_asked_for
from trainwright.config.protocol import Arguments
from trainwright.errors import ArgumentError

Check = TypeVar("Check", bound=Callable[..., "str | None"])


class Stage(Enum):
    """Stage at which a rule is checked."""

    CONSTRUCTION = "construction"  # the arguments show it by themselves; an error when they are made
    START = "start"  # the run shows it; an error when it starts
    WARNING = "warning"  # the run shows that a setting is pointless; said once when it starts, and it trains
    ADVICE = "advice"  # a setting has no effect; said once when a run starts, never an error


OF_THE_RUN = (Stage.START, Stage.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that are known when training starts. None: not known, and then no rule speaks about it."""

    max_steps: int | None = None
    num_epochs: float | None = None
    has_open_end: bool | None = None  # the run ends when data of unknown length do
    has_own_schedule: bool = False
    is_stream: bool | None = None  # the training data has no length
    has_eval_dataset: bool | None = None
    eval_names: tuple[str, ...] = ()  # names of the evaluation sets, if there are several
    has_compute_metrics: bool | None = None  # False means that evaluate() is not overridden either
    device_type: str | None = None
    supports_bf16: bool | None = None
    supports_tf32: bool | None = None
    num_processes: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One check. It returns a message that names a cause and a cure, or None."""

    name: str
    stage: Stage
    fields: frozenset[str]  # all fields that the check reads
    check: Callable[..., str | None]  # takes the arguments, and for stages of a run also its facts

    def message(self, args: Arguments, facts: RunFacts) -> str | None:
        return self.check(args, facts) if self.stage in OF_THE_RUN else self.check(args)


RULES: list[Rule] = []
IDLE = re.compile(r"(\w+(?:=\S+)?(?:(?:, | and )\w+(?:=\S+)?)*) ha(?:s|ve) no effect")


def rule(stage: Stage, *names: str, called: str | None = None) -> Callable[[Check], Check]:
    """Registers a function as a rule of a stage about these fields; ValueError if there is no such field.

    A function that several rules call, each with other arguments in a `partial`, is `called` by the name of each rule.
    """
    if unknown := set(names) - set(SETTINGS):
        raise ValueError(f"A rule is about {sorted(unknown)}, which are not fields.")

    def register(check: Check) -> Check:
        RULES.append(Rule(called or check.__name__, stage, frozenset(names), check))
        return check

    return register


FURTHER_EVALUATIONS: list[Callable[[Arguments], str | None]] = []


def evaluates_again(name: Callable[[Arguments], str | None]) -> Callable[[Arguments], str | None]:
    """Registers what evaluates each set once more: a function that returns the prefix of its metrics, or None."""
    FURTHER_EVALUATIONS.append(name)
    return name


def further_evaluations(args: Arguments) -> list[str]:
    """Returns the prefixes of the further evaluations of a run."""
    return [prefix for name in FURTHER_EVALUATIONS if (prefix := name(args)) is not None]


def all_set(stage: Stage, called: str, message: str, *names: str) -> None:
    """Registers the rule `called`, which returns a message where all of these settings are on."""
    rule(stage, *names, called=called)(lambda args: message if all(get_value(args, name) for name in names) else None)


def no_effect(names: Sequence[str], where: str, *, joined_by: str = ", ") -> str:
    """Returns the message about settings without effect."""
    return f"{joined_by.join(names)} {'has' if len(names) == 1 else 'have'} no effect {where}."


def idle_family(args: Arguments, members: tuple[str, ...], where: str) -> str | None:
    """Returns one message about all members of a family of settings that were set."""
    names = [name for name in members if get_value(args, name) != SETTINGS[name].default and was_asked_for(args, name)]
    return no_effect(names, where) if names else None


def idle_in(message: str) -> set[str]:
    """Returns the settings that a message names at its beginning as without effect, in the form of `no_effect`."""
    found = IDLE.match(message)
    return set() if found is None else {part.partition("=")[0] for part in re.split(r", | and ", found[1])}


def select_rules(stage: Stage) -> list[Rule]:
    """The rules of a stage, in the order in which they were registered."""
    return [one for one in RULES if one.stage is stage]


def refuse(problems: Sequence[str], *, kind: type[ArgumentError] = ArgumentError) -> None:
    """Raises one error that lists all problems, if there are any."""
    if problems:
        listed = "\n".join([f"{len(problems)} problems with the arguments:", *(f"- {p}" for p in problems)])
        error = kind(problems[0] if len(problems) == 1 else listed)
        error.problems = tuple(problems)
        raise error


NOTHING_KNOWN = RunFacts()


def check_run(args: Arguments, facts: RunFacts) -> None:
    """Raise one ArgumentError that lists all that is wrong with `args` for this run."""
    refuse(violations(args, facts))


def violations(args: Arguments, facts: RunFacts = NOTHING_KNOWN) -> list[str]:
    """Messages about single fields and about contradictions, as far as `facts` are known."""
    wrong = list(find_invalid_values(args))
    return [message for _, message in wrong] + list(_contradictions(args, facts, wrong={name for name, _ in wrong}))


def advise(args: Arguments) -> list[str]:
    """Returns messages for settings without effect in this combination, only for fields that were set explicitly."""
    changed = {name for name in changed_fields(args) if was_asked_for(args, name)}
    concerned = [one for one in select_rules(Stage.ADVICE) if not one.fields.isdisjoint(changed)]
    return [message for one in concerned if (message := one.message(args, NOTHING_KNOWN))]


def cautions(args: Arguments, facts: RunFacts) -> list[str]:
    """Returns messages for settings without effect in this run, or with another one than they suggest."""
    return [message for one in select_rules(Stage.WARNING) if (message := one.message(args, facts))]


def _contradictions(args: Arguments, facts: RunFacts, *, wrong: set[str]) -> Iterator[str]:
    """`wrong`: fields with invalid values. A rule may fail because of them; they have been reported already."""
    if facts.max_steps is None and isinstance(args.max_steps, int) and args.max_steps > 0:
        facts = replace(facts, max_steps=args.max_steps)
    for one in [*select_rules(Stage.CONSTRUCTION), *select_rules(Stage.START)]:
        try:
            message = one.message(args, facts)
        except TypeError:
            if one.fields.isdisjoint(wrong):
                raise
        else:
            if message:
                yield message
