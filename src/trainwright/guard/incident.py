"""Incident: the record of one bad step. How it is decided is in `step_guard.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

NON_FINITE, SPIKE = "nonfinite", "spike"

_DONE = {
    "skip": "the update was skipped: weights, optimizer and schedule are as before the step",
    "warn": "the update was made",
    "stop": "training stops before the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One bad step.

    Attributes:
        kind: "nonfinite" or "spike".
        step: number of the optimizer step, from 1.
        action: "skip", "warn" or "stop".
        what: what was bad, in words.
        values: measurements of the step by name, where they were read.
    """

    kind: str
    step: int
    action: str
    what: str
    values: dict[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The incident as a sentence."""
        return f"Step {self.step}: {self.what}; {_DONE[self.action]}."
