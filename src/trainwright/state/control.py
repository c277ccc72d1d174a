"""TrainerControl: the five flags by which callbacks control the loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainwright.state.exportable_state import ExportableState


@dataclass
class TrainerControl(ExportableState):
    """Flags that a callback sets and the loop obeys.

    Attributes:
        should_training_stop: end training after this step; stays set until the next `train()`.
        should_epoch_stop: end this epoch; cleared when the next one begins.
        should_save, should_evaluate, should_log: do so after this step; cleared when the next step begins.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = False
        self.should_evaluate = False
        self.should_log = False

    def state(self) -> dict[str, Any]:
        """Returns the flags as plain values."""
        return {"args": asdict(self), "attributes": {}}
