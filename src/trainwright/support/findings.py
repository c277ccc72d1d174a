"""What a check is, and what it finds: the words that the check-up and the capabilities have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, get_args

Severity: TypeAlias = Literal["note", "warning", "error"]
SEVERITIES = get_args(Severity)  # from the mildest
# When the facts of a check are available: before step 1, at its batches, at its end, only in a check-up, or only when
# the command line reads its files.
Moment: TypeAlias = Literal["start", "batch", "step", "full", "file"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    severity: Severity  # "note" (good to know), "warning" (probably unintended), "error" (the run cannot work)
    evidence: str  # the observation, with its numbers
    cure: str = ""  # the change to make; empty for a note that needs none
    check: str = ""  # name of the check
    rows: tuple[str, ...] = ()  # names of the first rows concerned
    entry: str = ""  # entry of the configuration file concerned, such as "data.columns.label"
    ends_run: bool = False  # the run would certainly end with an error later, so it is raised before the first step

    def __str__(self) -> str:
        return f"{self.check}: {self.evidence}" + (f" {self.cure}" if self.cure else "")


note, warning, error = (partial(Finding, severity) for severity in SEVERITIES)

Look: TypeAlias = Callable[[Any], Iterator[Finding]]  # Any: the facts, `CheckFacts` of the check-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A row of the table of checks."""

    name: str
    when: Moment  # the first moment at which it is cheap; every later moment of a check-up has its facts too
    needs: tuple[str, ...]  # facts without which it cannot run
    about: str  # the subject of the check, in a few words
    look: Look


class Section(Protocol):
    """A part of a check-up's report that shows facts instead of findings; a dataclass of plain values, for JSON."""

    def lines(self) -> Iterator[str]:
        """Yields its lines for the console."""

    def _repr_html_(self) -> str: ...


def some(names: Iterable[str], limit: int = 3) -> str:
    """Joins the first `limit` names, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
