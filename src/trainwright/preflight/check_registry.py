"""Table of checks: name, moment, facts needed, purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainwright.preflight.facts import CheckFacts
from trainwright.preflight.finding import SEVERITIES, CheckReport, Finding

# When the facts of a check are there: before step 1, at its batches, at its end, or only in a check-up.
START, BATCH, STEP, FULL = "start", "batch", "step", "full"

# How a person calls the facts that may be missing.
ABSENT = {
    "batches": "batch to look at",
    "step": "step that could be tried",
    "plan": "training set with a length, nor max_steps",
    "processing_class": "processing_class",
    "rehearse": "eval_dataset",
    "optimizer": "optimizer whose parameters can be compared",
    "columns": "sample with named entries",
    "free_bytes": "way to ask the disk",
}

Look = Callable[[CheckFacts], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row.

    Attributes:
        when: the first moment at which it is cheap; every later moment of a check-up has its facts too.
        needs: facts without which it cannot look.
        about: what it looks at, in a few words.
    """

    name: str
    when: str
    needs: tuple[str, ...]
    about: str
    look: Look


CHECKS: dict[str, Check] = {}


def check(*, when: str, needs: tuple[str, ...] = (), about: str) -> Callable[[Look], Look]:
    """Decorator: registers a function under its name."""

    def enter(look: Look) -> Look:
        name = look.__name__
        CHECKS[name] = Check(name=name, when=when, needs=needs, about=about, look=look)
        return look

    return enter


def look_at(facts: CheckFacts, when: Iterable[str]) -> CheckReport:
    """Runs the checks of these moments. A check that raises is reported as not done."""
    wanted, findings, passed, not_done = set(when), [], [], []
    for one in CHECKS.values():
        if one.when not in wanted:
            continue
        missing = next((name for name in one.needs if getattr(facts, name) is None), None)
        if missing is not None:
            not_done.append((one.name, f"there is no {ABSENT.get(missing, missing)}"))
            continue
        try:
            found = list(one.look(facts))
        except Exception as error:  # a check must never be what ends a run
            not_done.append((one.name, f"{type(error).__name__}: {error}"))
            continue
        findings += found
        passed += [] if found else [one.name]
    findings.sort(key=lambda one: -SEVERITIES.index(one.severity))
    return CheckReport(findings=tuple(findings), passed=tuple(passed), not_done=tuple(not_done))


def some(names: Iterable[str], limit: int = 3) -> str:
    """Joins the first `limit` names, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
