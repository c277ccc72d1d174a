"""The table of capabilities: what this package can do in a run beyond training, evaluating, saving and resuming.

Names as strings and nothing imported, so that the arguments, the checks and the trainer can all read the table. A
capability is one folder and one row here; deleting both removes it. `capability.py` shows what a row leads to.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

CAPABILITIES = "trainwright.capabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Where the parts of a capability are; the arguments and the rules may be none.

    Attributes:
        name: name of its extension, which is its entry in checkpoints, log and journal. No extension of a user may
            have it.
        capability: module and object of its `Capability`; none if a user adds the extension, under a name of its own.
        fields: module and class of its arguments.
        rules: module of the rules between its arguments and others.
        file: file of its entry in a checkpoint; most have none of their own, and share one.
    """

    name: str
    capability: str = ""
    fields: str = ""
    rules: str = ""
    file: str = ""

    def load(self) -> Any:  # a Capability, which is defined above the modules that read the table
        """Imports the module of the capability and returns its `Capability`."""
        return load(self.capability)


def load(place: str) -> Any:
    """Imports and returns what `place` names, as `module:object`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def row(name: str, *, fields: str = "", rules: bool = False, file: str = "", folder: str = "") -> Row:
    """Returns the row of a capability, whose files have the usual names.

    Args:
        name: of the capability and of its folder in `capabilities/`.
        fields: name of the class in its `fields.py`.
        rules: it has a `rules.py`.
        file: file of its entry in a checkpoint, if it has one of its own.
        folder: its package, if that is elsewhere.
    """
    folder = folder or f"{CAPABILITIES}.{name}"
    return Row(
        name=name,
        capability=f"{folder}.capability:CAPABILITY",
        fields=f"{folder}.fields:{fields}" if fields else "",
        rules=f"{folder}.rules" if rules else "",
        file=file,
    )


# In the order in which a run makes their extensions: those that another one asks for come before it.
TABLE: tuple[Row, ...] = (
    row("lease", fields="LeaseFields"),
    row("quarantine"),
    row("mirror", folder="trainwright.extensions.mirror"),
    row("async_evaluation", folder="trainwright.extensions.async_evaluation"),
    Row(name="first_look", capability="trainwright.preflight.capabilities:FIRST_LOOK"),
    Row(name="speed", capability="trainwright.preflight.capabilities:SPEED"),
    row("recorded_metrics", file="recorded_metrics.json"),
    row("checkpoint_items", file="checkpoint_items.pt"),
    row("incidents", fields="IncidentFields"),
    row("loss_question"),
    row("guard", fields="GuardFields", rules=True, file="guard_state.json"),
    row("loss_scale"),
    row("slow_ranks"),
    row("averages", fields="AverageFields", rules=True, file="weight_averages.pt"),
    row("recorded_values", fields="RecordedValuesFields", rules=True),
    row("branch", fields="BranchFields", rules=True),
    row("control", fields="ControlFields"),
    row("ledger", fields="LedgerFields", file="ledger.parquet"),
    row("what_is_trained"),
    row("curriculum", file="curriculum.pt"),
    Row(name="experts"),
)
MADE = tuple(one for one in TABLE if one.capability)  # by a run, not by the user
RESERVED_NAMES = frozenset(one.name for one in MADE)
FILES = {one.name: one.file for one in TABLE if one.file}
