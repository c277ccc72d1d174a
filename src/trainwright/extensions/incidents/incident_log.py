"""Incidents: records of bad steps, counted and reported; a run that skips too many ends. No step is decided."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainwright._types import JSONObject, Optimizer, counted
from trainwright.errors import BadStepError, NonFiniteError, SpikeError

logger = logging.getLogger(__name__)

NON_FINITE = "nonfinite"
SPIKE = "spike"

_DONE = {
    "skip": "the update was skipped: weights, optimizer and schedule are as before the step",
    "rollback": "the samples since then are left out",
    "warn": "the update was made",
    "stop": "training stops before the update",
}

SHARE_OF = 100  # steps over which `max_skipped_share` is a share
MOST_SHOWN = 5  # incidents of one log that are shown one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One bad step."""

    kind: str  # "nonfinite" or "spike"
    step: int  # number of the optimizer step, from 1
    action: str  # "skip", "rollback", "warn" or "stop"
    what: str  # what was bad, in words
    values: dict[str, float] = field(default_factory=dict)  # measurements of the step by name, where they were read
    threshold: float = 0.0  # of a spike, in robust deviations; 0: there is none
    # of the dataset, those that are bad by themselves, where they were found
    samples: tuple[Any, ...] = ()  # Any: indices, or what else the order of the user's dataset gives
    names: tuple[str, ...] = ()  # names of these samples, such as "reviews.csv:130", which `trainer.quarantine` takes
    path: str = ""  # directory of the bundle; empty: none was written
    note: str = ""  # where the value began, which samples do it, and how to replay it; empty: it was not looked for

    @property
    def text(self) -> str:
        """The incident as a sentence."""
        return f"Step {self.step}: {self.what}; {_DONE[self.action]}.{self.note and f' {self.note}'}"


# An optimizer -> those of weights, optimizer state and rates that are not finite, with what of them; empty: none is.
Diagnose: TypeAlias = Callable[[Optimizer], dict[str, str]]
Record: TypeAlias = Callable[[Incident, object], Incident]  # an incident and its window -> what more is known of it


class IncidentLog:
    """Incidents of one run.

    Args:
        report: called with each incident as soon as the host knows of it.
        record: writes the bundle of an incident, while the weights are those of before the step.
        max_skipped: consecutive skipped steps after which a run ends; 0: any number.
        max_share: share of the last 100 steps above which skipped ones end a run; 0: any share.
        optimizer: of the run's first step.
        diagnose: looks at the weights and at an optimizer; None: nobody does.

    Attributes:
        optimizer: makes the current update: a callback may have replaced the one of the steps before.
        num_skipped: skipped steps of the run, those before a resume included.
        num_rollbacks: returns to a snapshot, likewise.
        in_a_row: skipped steps since the last accepted one.
    """

    def __init__(
        self,
        report: Callable[[Incident], None],
        *,
        max_skipped: int,
        record: Record,
        max_share: float = 0.0,
        optimizer: Optimizer | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._report = report
        self.record = record
        self._max_skipped = max_skipped
        self._max_share = max_share
        self._diagnose = diagnose
        self._unshown: list[Incident] = []
        self._recent: tuple[int, ...] = ()  # numbers of the skipped steps among the last ones
        self.num_skipped = self.num_rollbacks = 0
        self.in_a_row = 0

    def accept(self) -> None:
        """Counts a step whose update was made."""
        self.in_a_row = 0

    def count_excluded_step(self) -> None:
        """Counts a step that is left out because of an incident before it."""
        self.num_skipped += 1

    def add(self, incident: Incident) -> None:
        """Counts and reports a bad step.

        Raises NonFiniteError or SpikeError if the policy stops the run, if too many steps were skipped, or if weights,
        optimizer state or rates are not finite, so that no later step can be good.
        """
        self._unshown.append(incident)
        is_first = self.in_a_row == 0
        if incident.action == "skip":
            self.num_skipped += 1
            self.in_a_row += 1
            self._recent = (*(one for one in self._recent if one > incident.step - SHARE_OF), incident.step)
        self.num_rollbacks += incident.action == "rollback"
        self._report(incident)
        if incident.kind == NON_FINITE and incident.action in ("skip", "stop") and is_first:
            self.check_parts(f"Step {incident.step}: {incident.what}")
        if incident.action == "stop":
            raise error_of(incident.kind)(incident.text)
        if 0 < self._max_skipped <= self.in_a_row:
            raise error_of(incident.kind)(
                f"{counted(self.in_a_row, 'step')} in a row {'was' if self.in_a_row == 1 else 'were'} skipped "
                f"(max_skipped_steps={self._max_skipped}). {incident.text}"
            )
        if 0 < self._max_share * SHARE_OF < len(self._recent):
            raise error_of(incident.kind)(
                f"{len(self._recent)} of the last {SHARE_OF} steps were skipped "
                f"(max_skipped_share={self._max_share:g}). {incident.text}"
            )

    def check_parts(self, when: str, *parts: str) -> None:
        """Raises NonFiniteError where weights, optimizer state or rates (or those of the `parts`) are not finite."""
        if self._diagnose is None or self.optimizer is None:
            return
        bad = self._diagnose(self.optimizer)
        if bad and (not parts or bad.keys() & set(parts)):
            said = " and ".join(f"{part} ({names})" for part, names in bad.items())
            raise NonFiniteError(
                f"{when}. Not finite, whatever the samples are: {said}. No skipped step repairs that. Look for a "
                "callback or a schedule that writes such values, and resume from the last checkpoint."
            )

    def finish(self, step: int) -> None:
        """Sums up a run of so many steps; NonFiniteError where all were skipped, and skipped steps are limited."""
        self.show()
        if self.num_skipped == 0:
            return
        said = f"{self.num_skipped} of {counted(step, 'step')} had no update: see the warnings above"
        if step <= self.num_skipped and self._max_skipped > 0:
            raise NonFiniteError(f"{said}. The model was not trained at all; look at the data, or lower the rate.")
        logger.warning("%s.", said)

    def mark(self) -> JSONObject:
        """Returns the counts for `rewind`."""
        return {"counts": (self.num_skipped, self.num_rollbacks, self.in_a_row), "recent": self._recent}

    def rewind(self, mark: JSONObject) -> None:
        """Puts the counts back to those of a mark: an error ended the run before the step was done."""
        self.num_skipped, self.num_rollbacks, self.in_a_row = mark["counts"]
        self._recent = mark["recent"]

    def state(self) -> JSONObject:
        """Returns the counts of bad steps, without those that are 0."""
        counts = {
            "skipped_in_a_row": self.in_a_row,
            "skipped_steps": self.num_skipped,
            "rollbacks": self.num_rollbacks,
            "skipped_recently": list(self._recent),
        }
        return {name: count for name, count in counts.items() if count}

    def load(self, state: JSONObject) -> None:
        """Continues the counts; those that a checkpoint of an older version lacks begin at 0."""
        self.in_a_row = state.get("skipped_in_a_row", 0)
        self.num_skipped = state.get("skipped_steps", 0)
        self.num_rollbacks = state.get("rollbacks", 0)
        self._recent = tuple(state.get("skipped_recently", ()))

    def show(self) -> None:
        """Logs the incidents since the last call, as a warning."""
        incidents = self._unshown
        self._unshown = []
        for incident in incidents[:MOST_SHOWN]:
            logger.warning("%s", incident.text)
        if len(incidents) > MOST_SHOWN:
            steps = ", ".join(str(incident.step) for incident in incidents[MOST_SHOWN:])
            logger.warning("Bad steps too: %s.", steps)


def error_of(kind: str) -> type[BadStepError]:
    """Returns the error with which a kind of incident ends a run."""
    return SpikeError if kind == SPIKE else NonFiniteError
