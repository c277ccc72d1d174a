"""Flyte: saves checkpoints as those of the task, and the log as a deck. Works inside a Flyte task."""

from __future__ import annotations

from pathlib import Path

from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.trackers.base import Client, TrackerCallback, logger, needs


class FlyteCallback(TrackerCallback):
    """Passes each checkpoint to the task, so that a retried task can resume.

    Args:
        save_log_history: show the log as a deck; needs flytekitplugins-deck-standard and pandas.
        sync_checkpoints: pass checkpoints to the task.
    """

    name = "flyte"

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        super().__init__()
        with needs("flyte", "flytekit"):
            import flytekit
        self._flytekit: Client = flytekit
        self.cp: Client = flytekit.current_context().checkpoint
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    def on_log(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Does nothing: `close` shows the whole log."""

    def on_predict(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Does nothing."""

    def saved(self, folder: Path, args: Arguments, state: TrainerState) -> None:
        if self.sync_checkpoints:
            self.cp.save(str(folder))

    def close(self, args: Arguments, state: TrainerState, **kwargs: object) -> None:
        if not self.save_log_history:
            return
        try:
            import pandas as pd
            from flytekitplugins.deck.renderer import TableRenderer
        except ImportError:
            logger.warning("Flyte shows no log: pip install flytekitplugins-deck-standard pandas.")
            return
        self._flytekit.Deck("Log History", TableRenderer().to_html(pd.DataFrame(state.log_history)))
