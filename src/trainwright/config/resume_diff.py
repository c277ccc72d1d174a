"""Differences between the arguments of a checkpoint and of the run that resumes from it, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.config.fields import SETTINGS
from trainwright.config.fields.setting import HERE, PER_START

FUSED = ("_fused", "_torch")  # variants of one optimizer, whose states are the same
FOLLOW_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


@dataclass(frozen=True, slots=True)
class Difference:
    """One argument whose value in the checkpoint is another than now."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.before!r} -> {self.now!r}: {_effect(self.name)}"


def _effect(name: str) -> str | None:
    """Returns the meaning of a change of a field; a field of a subclass takes effect."""
    return SETTINGS[name].on_resume if name in SETTINGS else HERE


def diff_args(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """The arguments that both have, with different values, in the order of the fields."""
    return [
        Difference(name, before[name], value)
        for name, value in now.items()
        if name in before and _effect(name) is not PER_START and not _is_same(before[name], value)
    ]


def impossible_changes(found: list[Difference], *, has_own_optimizer: bool) -> Iterator[str]:
    """Differences that no resume can carry out, in words."""
    for one in found:
        if one.name == "optim" and not has_own_optimizer and _family(one.before) != _family(one.now):
            yield (
                f"optim={one.now!r}, and the checkpoint holds the state of optim={one.before!r}, which means nothing "
                f"to another optimizer. Resume with optim={one.before!r}, or start a new run from the checkpoint's "
                "weights."
            )
        crosses = [value in FOLLOW_EVALUATIONS for value in (one.before, one.now)]
        if one.name == "lr_scheduler_type" and one.before != one.now and any(crosses):
            yield (
                f"lr_scheduler_type={one.now!r}, and the checkpoint was written under {one.before!r}: of these two one "
                f"counts evaluations, or both do in their own way. Resume with lr_scheduler_type={one.before!r}."
            )


def _family(optimizer: Any) -> str:
    name = str(optimizer)
    for suffix in FUSED:
        name = name.removesuffix(suffix)
    return name


def _is_same(before: Any, now: Any) -> bool:
    """Equal as numbers, texts, lists and dicts; JSON knows no tuples and no int beside a float."""
    if isinstance(before, (list, tuple)) and isinstance(now, (list, tuple)):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_is_same(before[key], now[key]) for key in before)
    if isinstance(before, bool) or isinstance(now, bool):
        return before is now
    return bool(before == now)
