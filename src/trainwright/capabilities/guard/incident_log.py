"""Incidents: counts and reports bad steps, and ends a run that skips too many. It decides about no step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from trainwright._types import JSONObject, Optimizer, counted
from trainwright.errors import BadStepError, NonFiniteError, SpikeError
from trainwright.loop.incident import NON_FINITE, SPIKE, Incident

logger = logging.getLogger(__name__)

SHARE_OF = 100  # window in steps for `max_skipped_share`
MOST_SHOWN = 5  # incidents in one log that are shown individually


# optimizer -> parts (weights, optimizer state, rates) that are not finite, each with a description; empty if all are.
Diagnose: TypeAlias = Callable[[Optimizer], dict[str, str]]
Record: TypeAlias = Callable[[Incident, object], Incident]  # (incident, window) -> incident with further findings


class IncidentLog:
    """Incidents of one run.

    Args:
        report: called with each incident as soon as the host knows of it.
        record: writes the bundle of an incident, while the weights are still as before the step.
        max_skipped: consecutive skipped steps after which a run ends; 0 for no limit.
        max_share: share of skipped steps among the last 100 above which a run ends; 0 for no limit.
        optimizer: optimizer of the run's first step.
        diagnose: checks the weights and an optimizer; None skips this check.

    Attributes:
        optimizer: the current optimizer; a callback may have replaced the earlier one.
        num_skipped: skipped steps of the run, including steps before a resume.
        num_rollbacks: rollbacks to a snapshot, likewise.
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
        """Counts a step with an update."""
        self.in_a_row = 0

    def count_excluded_step(self) -> None:
        """Counts a step that is skipped because of an earlier incident."""
        self.num_skipped += 1

    def add(self, incident: Incident, *, may_end: bool = True) -> None:
        """Counts and reports a bad step.

        Args:
            incident: the bad step and what was done about it.
            may_end: False if the policy is to warn. A backend may have skipped the update by itself, as ZeRO does.

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
        if not may_end:
            return
        if incident.kind == NON_FINITE and incident.action in ("skip", "stop") and is_first:
            self.check_parts(f"Step {incident.step}: {incident.what}")
        if incident.action == "stop":
            raise find_error(incident.kind)(incident.text)
        if 0 < self._max_skipped <= self.in_a_row:
            raise find_error(incident.kind)(
                f"{counted(self.in_a_row, 'step')} in a row {'was' if self.in_a_row == 1 else 'were'} skipped "
                f"(max_skipped_steps={self._max_skipped}). {incident.text}"
            )
        if 0 < self._max_share * SHARE_OF < len(self._recent):
            raise find_error(incident.kind)(
                f"{len(self._recent)} of the last {SHARE_OF} steps were skipped "
                f"(max_skipped_share={self._max_share:g}). {incident.text}"
            )

    def check_parts(self, when: str, *parts: str) -> None:
        """Raises NonFiniteError if weights, optimizer state or rates (or only the given `parts`) are not finite."""
        if self._diagnose is None or self.optimizer is None:
            return
        bad = self._diagnose(self.optimizer)
        if bad and (not parts or bad.keys() & set(parts)):
            said = " and ".join(f"{part} ({names})" for part, names in bad.items())
            raise NonFiniteError(
                f"{when}. Not finite, regardless of the samples: {said}. Skipping steps cannot repair that. Look for a "
                "callback or a schedule that writes such values, and resume from the last checkpoint without them."
            )

    def finish(self, step: int) -> None:
        """Summarizes a run of `step` steps; NonFiniteError if all were skipped and skipped steps are limited."""
        self.show()
        if self.num_skipped == 0:
            return
        said = f"{self.num_skipped} of {counted(step, 'step')} had no update: see the warnings above"
        if step <= self.num_skipped and self._max_skipped > 0:
            raise NonFiniteError(f"{said}. The model was not trained at all; check the data, or lower the rate.")
        logger.warning("%s.", said)

    def mark(self) -> JSONObject:
        """Returns the counts for `rewind`."""
        return {"counts": (self.num_skipped, self.num_rollbacks, self.in_a_row), "recent": self._recent}

    def rewind(self, mark: JSONObject | None) -> None:
        """Restores the counts of a mark: an error ended the run before the step was done. None: all were 0."""
        before = mark or {"counts": (0, 0, 0), "recent": ()}
        self.num_skipped, self.num_rollbacks, self.in_a_row = before["counts"]
        self._recent = before["recent"]

    def state(self) -> JSONObject:
        """Returns the counts of bad steps that are not 0."""
        counts = {
            "skipped_in_a_row": self.in_a_row,
            "skipped_steps": self.num_skipped,
            "rollbacks": self.num_rollbacks,
            "skipped_recently": list(self._recent),
        }
        return {name: count for name, count in counts.items() if count}

    def load(self, state: JSONObject) -> None:
        """Restores the counts; counts missing from an older checkpoint begin at 0."""
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
            logger.warning("More bad steps: %s.", steps)


def find_error(kind: str) -> type[BadStepError]:
    """Returns the error class for a kind of incident."""
    return SpikeError if kind == SPIKE else NonFiniteError
