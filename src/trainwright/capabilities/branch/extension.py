"""The ancestry of a run as an extension: an entry in its checkpoints and in its journal. Nothing is done in a step."""

from __future__ import annotations

from typing import Any

from trainwright._types import JSONObject, StateDict
from trainwright.capabilities.branch.origins import parse_origins
from trainwright.loop.extension import Extension


class Ancestry(Extension):
    """The runs that a run comes from.

    Args:
        origin: the checkpoint that the run begins from as a branch; None for a run that continues or is resumed.
    """

    name = "branch"

    def __init__(self, origin: JSONObject | None = None) -> None:
        self._origin = origin
        self._origins = [] if origin is None else [origin]  # an entry for each branching, the oldest first

    def facts(self) -> dict[str, Any]:
        """Returns the origins for the journal."""
        return {"branch": {"begins": self._origin is not None, "origins": self._origins}}

    def state_dict(self) -> StateDict:
        """Returns the origins for a checkpoint."""
        return {"origins": self._origins}

    def load_state_dict(self, state: StateDict) -> None:
        """Takes over the origins of the run that wrote the checkpoint; a new branch adds its own to them."""
        before = parse_origins(state)
        self._origins = [*before, *([] if self._origin is None else [self._origin])]
