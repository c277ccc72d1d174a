"""ForwardStates: random states before the forward passes of the last windows, for the bundle of an incident.

A replay of a bad step needs the states from before its forward passes, but whether a step is bad is only known after
them, on a GPU one step later. Around the first window of a run, the states of all generators are copied and compared:

    nothing changed             no copies: the states after a step are those from before it
    torch's generators changed  they are copied before each window, which takes about 1 us
    python's or numpy's too     all are copied before each window, which takes 50 us; few models use them

For a model that uses further generators only in later steps, `is_exact` is false in bundles, since the second run of
its step reveals the draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

States: TypeAlias = dict[str, Any]  # generator -> its state, each of its own type
OF_HOST = ("python", "numpy")  # generators that few models use, with states that are slow to copy
NUM_WINDOWS = 2  # a guard that does not wait for the device reports a bad step during the next one


class ForwardStates:
    """Copies of the random states, by window.

    Args:
        capture: returns the states of all generators.
        capture_torch: returns the states of torch's generators.
        same: returns whether two captured states yield the same numbers.

    Attributes:
        is_needed: the model may draw random numbers: `begin_step` must be called before each window.
    """

    def __init__(
        self,
        *,
        capture: Callable[[], States],
        capture_torch: Callable[[], States],
        same: Callable[[States, States], bool],
    ) -> None:
        self._capture = self._capture_all = capture
        self._capture_torch = capture_torch
        self._same = same
        self._is_first = True
        self.is_needed = True
        self._newest: States = {}
        # by the id of a window's list; holding the list itself would keep its batches alive
        self._kept: dict[int, States] = {}

    def begin_step(self, batches: Sequence[Any]) -> None:
        """Copies the states before the forward passes of a window with these micro-batches."""
        self._kept.pop(id(batches), None)  # left by a list that is gone
        self._newest = self._capture()
        self._kept[id(batches)] = self._newest
        if len(self._kept) > NUM_WINDOWS:
            del self._kept[next(iter(self._kept))]

    def end_step(self) -> None:
        """Checks, after the first step of a run, which generators it used."""
        if not self._is_first:
            return
        self._is_first = False
        after = self._capture_all()
        if self._same(_select_host(self._newest), _select_host(after)):
            self._capture = self._capture_torch
        if self._same(self._newest, after):
            self.is_needed = False
            self._kept.clear()

    def select_moving(self, batches: Sequence[Any]) -> States | None:
        """Returns the states before the forward passes of a window, for those generators that the model uses.

        `batches` must be the same list object as in the step. None if they were not kept.
        """
        return self._kept.get(id(batches)) if self.is_needed else {}


def _select_host(states: States) -> States:
    return {name: states[name] for name in OF_HOST}
