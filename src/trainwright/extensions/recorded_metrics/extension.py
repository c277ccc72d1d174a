"""Recorded metrics as an extension: numbers of a window that does not count are removed, the others are saved."""

from __future__ import annotations

from pathlib import Path

from trainwright._types import RECORDED_METRICS_NAME, JSONObject
from trainwright.checkpoint.training_state import save_json
from trainwright.loop.extension import Extension, SavedRun, Sink
from trainwright.state.progress import Progress
from trainwright.state.recorded_metrics import REDUCTIONS


class RecordedNumbers(Extension):
    """Numbers of `Trainer.record` in one run; `progress.recorded` collects them.

    Args:
        progress: of the run.
        writes: this process writes the files of a checkpoint.
        is_first: this process has the numbers that a checkpoint kept for all.
    """

    name = "recorded_metrics"
    order = -20  # the guard's values follow in a log
    outlives_run = True

    def __init__(self, progress: Progress, *, writes: bool, is_first: bool) -> None:
        self._progress = progress
        self._writes = writes
        self._is_first = is_first

    def mark(self) -> int:
        """Returns how many numbers were recorded since the last log."""
        return self._progress.recorded.count

    def rewind(self, mark: int) -> None:
        """Removes the numbers that were recorded since a mark."""
        self._progress.recorded.rewind(mark)

    def refused(self, step: int) -> None:
        """Removes the numbers of a step whose update was not made."""
        self._progress.recorded.drop(step)

    def log(self) -> dict[str, float]:
        """Returns what was recorded since the last log, over all processes; the loss was read with it."""
        return self._progress.recorded.take()

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the totals of all processes since the last log."""
        state = self._progress.recorded_state(keeps=self._is_first)
        if self._writes:
            save_json(state, folder / RECORDED_METRICS_NAME)

    def load(self, checkpoint: SavedRun) -> None:
        """Continues from the totals of a checkpoint; CheckpointError for a file that no run writes."""
        state = checkpoint.entry(self.name).state(is_recorded_state)
        if self._is_first:
            self._progress.recorded.load(state)


def is_recorded_state(state: JSONObject) -> bool:
    """Returns whether a run may have written these totals; raises TypeError or ValueError for another shape."""
    return all(
        reduce in REDUCTIONS and isinstance(value, float) and isinstance(weight, float)
        for reduce, value, weight in state.values()
    )
