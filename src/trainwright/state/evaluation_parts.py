"""The parts of an evaluation during training: it is done when all are, and each is logged and reported once.

Several evaluation sets, and averages of the weights, are evaluated one after the other. If a signal ends the run
in between, its checkpoint says which parts were reported. The resumed run computes all parts again, so that metrics
and random states are those of a run without the signal, and reports only the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainwright._types import JSONObject
from trainwright.state.trainer_state import TrainerControl

FLAGS = ("should_training_stop", "should_save")  # which `on_evaluate` may set for what follows the evaluation


class EvaluationParts:
    """Parts of the evaluation under way, numbered in the order in which they begin: "0", "1".

    A further set that a callback evaluates in `on_evaluate` belongs to that part: "0.0", "0.1".
    """

    def __init__(self) -> None:
        self._is_open = False
        self._outer = ""  # number of the part whose callbacks are being notified, with a dot
        self._num_begun: dict[str, int] = {}  # by the number of the part that they belong to
        self._logged: set[str] = set()
        self._told: set[str] = set()  # parts of which all callbacks have been notified
        self._flags: list[str] = []  # set when the evaluation began

    def load(self, state: Mapping[str, Any], control: TrainerControl) -> None:
        """Takes the parts that an interrupted run has reported from the form of `state`, for the next evaluation.

        The flags that callbacks set in these parts are set again.
        """
        self._logged = _texts(state.get("logged"))
        self._told = _texts(state.get("told"))
        for name in _texts(state.get("flags")) & set(FLAGS):
            setattr(control, name, True)

    def state(self, control: TrainerControl) -> JSONObject | None:
        """Returns what a checkpoint that is written now has to say; None if no evaluation is under way."""
        if not self._is_open:
            return None
        flags = [name for name in FLAGS if getattr(control, name) and name not in self._flags]
        return {"logged": sorted(self._logged), "told": sorted(self._told), "flags": flags}

    def open(self, control: TrainerControl) -> None:
        """Begins an evaluation."""
        self._is_open = True
        self._outer = ""
        self._num_begun = {}
        self._flags = [name for name in FLAGS if getattr(control, name)]

    def close(self) -> None:
        """Ends an evaluation whose parts are all done."""
        self._is_open = False
        self._logged = set()
        self._told = set()

    def begin_part(self) -> str:
        """Returns the number of the part that begins."""
        number = self._num_begun.get(self._outer, 0)
        self._num_begun[self._outer] = number + 1
        return f"{self._outer}{number}"

    @contextmanager
    def logging(self, part: str) -> Iterator[bool]:
        """Context that yields whether a part is to be logged; afterwards it is."""
        yield not self._is_open or part not in self._logged
        if self._is_open:
            self._logged.add(part)

    @contextmanager
    def telling(self, part: str) -> Iterator[bool]:
        """Context that yields whether callbacks are to be notified of a part; afterwards they have been."""
        outer = self._outer
        self._outer = f"{part}."
        try:
            yield not self._is_open or part not in self._told
        finally:
            self._outer = outer
        if self._is_open:
            self._told.add(part)


def _texts(value: object) -> set[str]:
    return {item for item in value if isinstance(item, str)} if isinstance(value, list) else set()
