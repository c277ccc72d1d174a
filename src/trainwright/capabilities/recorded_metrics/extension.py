"""Recorded metrics as an extension: drops the numbers of a window that does not count, and saves the others."""

from __future__ import annotations

from pathlib import Path

from trainwright._types import JSONObject
from trainwright.capability_table import FILES
from trainwright.checkpoint.training_state import save_json
from trainwright.loop.extension import Extension, Run, SavedRun, Sink
from trainwright.state.progress import Progress
from trainwright.state.recorded_metrics import REDUCTIONS


class RecordedNumbers(Extension):
    """Numbers recorded with `Trainer.record` in one run; `progress.recorded` collects them.

    Args:
        progress: progress of the run.
        writes: this process writes the files of a checkpoint.
        is_first: this process holds the totals that a checkpoint stores for all processes.
    """

    name = "recorded_metrics"
    order = -20  # the guard's values come after it in a log
    outlives_run = True

    def __init__(self, progress: Progress, *, writes: bool, is_first: bool) -> None:
        self._progress = progress
        self._writes = writes
        self._is_first = is_first
        self._has_numbers = False  # of this run: until then, no window needs a mark

    def listens_to(self) -> set[str]:
        """Excludes the mark of each window until a number is recorded."""
        events = super().listens_to()
        return events if self._has_numbers else events - {"mark"}

    def begin(self, run: Run) -> None:
        """Waits for the first number."""

        def listen() -> None:
            self._has_numbers = True
            run.extensions.listen_anew()

        self._progress.recorded.on_first = listen

    def close(self) -> None:
        """Waits no longer."""
        self._progress.recorded.on_first = None

    def mark(self) -> int:
        """Returns the number of values recorded since the last log."""
        return self._progress.recorded.count

    def rewind(self, mark: int | None) -> None:
        """Removes the values recorded since a mark; all of them, if there was none before the window."""
        self._progress.recorded.rewind(mark or 0)

    def refused(self, step: int) -> None:
        """Removes the values of a step that had no update."""
        self._progress.recorded.drop(step)

    def log(self) -> dict[str, float]:
        """Returns the values recorded since the last log, over all processes; they were read with the loss."""
        return self._progress.recorded.take()

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the totals of all processes since the last log."""
        state = self._progress.recorded_state(keeps=self._is_first)
        if self._writes:
            save_json(state, folder / FILES["recorded_metrics"])

    def load(self, checkpoint: SavedRun) -> None:
        """Continues from the totals of a checkpoint; CheckpointError for an invalid file."""
        state = checkpoint.entry(self.name).state(is_recorded_state)
        if self._is_first:
            self._progress.recorded.load(state)


def is_recorded_state(state: JSONObject) -> bool:
    """Returns whether these may be the totals of a run; raises TypeError or ValueError for another structure."""
    return all(
        reduce in REDUCTIONS and isinstance(value, float) and isinstance(weight, float)
        for reduce, value, weight in state.values()
    )
