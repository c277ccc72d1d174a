"""Finding and CheckReport: what a check-up says, with evidence and cure. How it was found is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from trainwright._types import JSONObject
from trainwright.preflight.memory.memory_plan import MemoryPlan

NOTE, WARNING, ERROR = "note", "warning", "error"
SEVERITIES = (NOTE, WARNING, ERROR)  # from the mildest


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        check: name of the check.
        severity: "note" (good to know), "warning" (probably not what was meant), "error" (the run cannot work).
        evidence: what was seen, with its numbers.
        cure: what to change; empty for a note that needs nothing.
    """

    check: str
    severity: str
    evidence: str
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.evidence}" + (f" {self.cure}" if self.cure else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """Result of the checks.

    Attributes:
        findings: the worst first.
        passed: checks that looked and found nothing.
        not_done: checks that could not look, and why.
        memory: the memory plan, if it was asked for.
    """

    findings: tuple[Finding, ...] = ()
    passed: tuple[str, ...] = ()
    not_done: tuple[tuple[str, str], ...] = ()
    memory: MemoryPlan | None = None

    @property
    def is_fine(self) -> bool:
        """Whether nothing worse than a note was found."""
        return self.worst in (None, NOTE)

    @property
    def worst(self) -> str | None:
        """Returns the highest severity of the findings; None without findings."""
        return max((one.severity for one in self.findings), key=SEVERITIES.index, default=None)

    def of(self, check: str) -> tuple[Finding, ...]:
        """Returns the findings of one check."""
        return tuple(one for one in self.findings if one.check == check)

    def lines(self) -> Iterator[str]:
        """Yields the lines of the report for the console."""
        for one in self.findings:
            yield f"{one.severity:8}{one.check:18}{one.evidence}"
            if one.cure:
                yield f"{'':26}-> {one.cure}"
        if self.passed:
            yield f"{'fine':8}{', '.join(self.passed)}"
        for name, reason in self.not_done:
            yield f"{'not done':8} {name}: {reason}"
        if self.memory is not None:
            yield ""
            yield from self.memory.lines()

    def to_dict(self) -> JSONObject:
        """Returns plain values, as for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())
