"""Incident: one bad step, as callbacks and the journal hear of it. Who finds and who records it are capabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NON_FINITE = "nonfinite"
SPIKE = "spike"

_DONE = {
    "skip": "the update was skipped: weights, optimizer and schedule are as before the step",
    "rollback": "the samples since then are skipped",
    "warn": "the update was made",
    "stop": "training stops before the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One bad step."""

    kind: str  # "nonfinite" or "spike"
    step: int  # number of the optimizer step, from 1
    action: str  # "skip", "rollback", "warn" or "stop"
    what: str  # description of the bad value
    values: dict[str, float] = field(default_factory=dict)  # measurements of the step by name, if they were read
    threshold: float = 0.0  # for a spike, in robust deviations; 0 if there is none
    # bad samples in the dataset, if they were found
    samples: tuple[Any, ...] = ()  # Any: indices, or other keys of the user's dataset
    names: tuple[str, ...] = ()  # names of these samples, such as "reviews.csv:130", which `trainer.quarantine` takes
    path: str = ""  # directory of the bundle; empty if none was written
    note: str = ""  # origin of the value, samples that cause it, and how to replay it; empty if not investigated

    @property
    def text(self) -> str:
        """The incident as a sentence."""
        return f"Step {self.step}: {self.what}; {_DONE[self.action]}.{self.note and f' {self.note}'}"
