"""The position of a dataloader that tells it itself: anything with `state_dict` and `load_state_dict`.

torchdata's StatefulDataLoader is one, its workers' states included. The loader fetches one batch ahead, so what belongs
into a checkpoint is the state from before that fetch.
"""

from __future__ import annotations

import copy
from typing import Any


class StatefulPosition:
    """Follows the state of somebody's dataloader.

    Attributes:
        resumed: a checkpoint's state of it, from which the next iteration begins; used once.
    """

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self.resumed: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None
        self._at_window: dict[str, Any] | None = None

    @property
    def state(self) -> dict[str, Any] | None:
        """The dataloader's state behind the batch given last."""
        return self._state

    def note(self) -> None:
        self._state = copy.deepcopy(self._dataloader.state_dict())  # it may be the very object that changes

    def begin_window(self) -> None:
        self._at_window = self._state

    def rewind(self) -> None:
        self._state = self._at_window

    def restore(self) -> bool:
        """Whether the iteration that follows begins at a checkpoint's state."""
        state, self.resumed = self.resumed, None
        if state is None:
            return False
        self._dataloader.load_state_dict(state)
        return True


def stateful_position(dataloader: Any) -> StatefulPosition | None:
    """None for a dataloader that does not tell where it stands."""
    inside = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's wrappers have the methods in any case
    tells = all(callable(getattr(inside, name, None)) for name in ("state_dict", "load_state_dict"))
    return StatefulPosition(dataloader) if tells else None
