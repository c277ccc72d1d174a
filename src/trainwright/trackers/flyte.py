"""Flyte: checkpoints into the task's own, and the log as a deck. Works inside of a Flyte task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.trackers.base import TrackerCallback, logger, missing


class FlyteCallback(TrackerCallback):
    """Gives each checkpoint to the task, so that a task that is tried again can resume.

    Args:
        save_log_history: show the log as a deck; needs flytekitplugins-deck-standard and pandas.
        sync_checkpoints: give checkpoints to the task.
    """

    name = "flyte"

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        try:
            import flytekit
        except ImportError as error:
            raise missing("flyte", "flytekit") from error
        self._flytekit: Any = flytekit
        self.cp: Any = flytekit.current_context().checkpoint
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The whole log is shown at the end."""

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes no metrics."""

    def saved(self, folder: Path, args: Any, state: Any) -> None:
        if self.sync_checkpoints:
            self.cp.save(str(folder))

    def close(self, args: Any, state: Any, **kwargs: Any) -> None:
        if not self.save_log_history:
            return
        try:
            import pandas as pd
            from flytekitplugins.deck.renderer import TableRenderer
        except ImportError:
            logger.warning("Flyte shows no log: pip install flytekitplugins-deck-standard pandas.")
            return
        self._flytekit.Deck("Log History", TableRenderer().to_html(pd.DataFrame(state.log_history)))
