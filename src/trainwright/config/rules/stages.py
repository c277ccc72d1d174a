"""The registry of rules: when each is checked, which fields it concerns, and what else it may ask about a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from trainwright.config.fields import SETTINGS
from trainwright.config.protocol import Arguments

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
    eval_names: tuple[str, ...] = ()  # of several evaluation sets
    has_compute_metrics: bool | None = None  # False also says that nobody overrides evaluate()
    device_type: str | None = None
    supports_bf16: bool | None = None
    supports_tf32: bool | None = None
    num_processes: int = 1


@dataclass(frozen=True, slots=True)
class Rule:
    """One check. It returns a message that names a cause and a cure, or None."""

    stage: Stage
    fields: frozenset[str]  # all fields that the check reads
    check: Callable[..., str | None]  # takes the arguments; where the run shows something, its facts too

    def message(self, args: Arguments, facts: RunFacts) -> str | None:
        return self.check(args, facts) if self.stage in OF_THE_RUN else self.check(args)


RULES: list[Rule] = []


def rule(stage: Stage, *names: str) -> Callable[[Check], Check]:
    """Registers a function as a rule of a stage about these fields; ValueError where there is no such field."""
    if unknown := set(names) - set(SETTINGS):
        raise ValueError(f"A rule is about {sorted(unknown)}, which are no fields.")

    def register(check: Check) -> Check:
        RULES.append(Rule(stage, frozenset(names), check))
        return check

    return register


def of_stage(stage: Stage) -> list[Rule]:
    """The rules of a stage, in the order in which they were registered."""
    return [one for one in RULES if one.stage is stage]
