"""The table of capabilities: what this package can do in a run beyond training, evaluating, saving and resuming.

Names as strings and nothing imported, so that the arguments, the checks and the trainer can all read the table. A
capability is one folder and one row here; deleting both removes it. `capability.py` shows what a row leads to.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Where a capability is.

    Attributes:
        name: name of its extension, which is its entry in checkpoints, log and journal. No extension of a user may
            have it.
        place: module and attribute of its `Capability`.
    """

    name: str
    place: str

    def load(self) -> Any:  # a Capability, which is defined above the modules that read the table
        """Imports the module of the capability and returns its `Capability`."""
        return load(self.place)


def load(place: str) -> Any:
    """Imports what `place` names as `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _at(name: str, folder: str = "trainwright.extensions") -> Row:
    return Row(name=name, place=f"{folder}.{name}.capability:CAPABILITY")


# In the order in which a run makes their extensions: those that another one asks for come before it.
TABLE: tuple[Row, ...] = (
    _at("lease"),
    _at("quarantine"),
    _at("mirror"),
    _at("async_evaluation"),
    Row(name="first_look", place="trainwright.preflight.capabilities:FIRST_LOOK"),
    Row(name="speed", place="trainwright.preflight.capabilities:SPEED"),
    _at("recorded_metrics"),
    _at("checkpoint_items"),
    _at("incidents"),
    _at("loss_question"),
    _at("guard"),
    _at("loss_scale"),
    _at("slow_ranks"),
    _at("averages"),
    _at("recorded_values"),
    _at("branch"),
    _at("control"),
    _at("ledger"),
    _at("curriculum"),
)
RESERVED_NAMES = frozenset(row.name for row in TABLE)
