"""The table of capabilities: what this package can do in a run beyond training, evaluating, saving and resuming.

Names as strings and nothing imported, so that the arguments, the checks and the trainer can all read the table. A
capability is one folder and one row here; deleting both removes it. `capability.py` shows what a row leads to.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = "trainwright.capabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """A command of a capability.

    Attributes:
        function: module and function; the command has the name of the function.
        after: the command of the program after which it is listed; of several, in alphabetical order.
        takes_settings: further words are settings of a run, such as `--learning_rate 1e-4`.
    """

    function: str
    after: str
    takes_settings: bool = False

    @property
    def name(self) -> str:
        """Name of the command."""
        return self.function.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRow:
    """Where the parts of a capability are; the arguments and the rules may be none.

    Attributes:
        name: name of its extension, which is its entry in checkpoints, log and journal. No extension of a user may
            have it.
        capability: module and object of its `Capability`; none if a user adds the extension, under a name of its own.
        fields: module and class of its arguments.
        rules: module of the rules between its arguments and others.
        file: file of its entry in a checkpoint; most have none of their own, and share one.
        commands: its commands. They are here and not in its `Capability`, since the program imports nothing heavy.
        batcher: module and function that returns the `Batcher` of a plan (`data/batcher.py`), or None for another plan.
        batches_by: the argument that asks for this batcher.
        data_handler: module and object of its `DataHandler` (`data/sources.py`), for training data of its own form.
        former_modules: where its modules were in earlier versions, whose pickles name them: the path in the package,
            and the module of its folder.
    """

    name: str
    capability: str = ""
    fields: str = ""
    rules: str = ""
    file: str = ""
    commands: tuple[CommandEntry, ...] = ()
    batcher: str = ""
    batches_by: str = ""
    data_handler: str = ""
    former_modules: Mapping[str, str] = field(default_factory=dict)

    def load(self) -> Any:  # a Capability, which is defined above the modules that read the table
        """Imports the module of the capability and returns its `Capability`."""
        return load(self.capability)


# Services of a trainer, which are imported when they are asked for.
SERVICES = {
    "trackers": "trainwright.trackers.registry",
    "uploads": "trainwright.hub.uploader",
    "model_card": "trainwright.hub.model_card",
    "search": "trainwright.search.trials",
}


def load_service(name: str) -> Any:  # a module outside of the core
    """Imports and returns the module of a service."""
    return importlib.import_module(SERVICES[name])


def load(place: str) -> Any:
    """Imports and returns what `place` names, as `module:object`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def find_method(name: str) -> Callable[..., Any]:
    """Returns what the method `name` of a trainer calls, which belongs to a capability.

    Raises:
        NotImplementedError: the capability is not there.
    """
    for one in MADE:
        if name in (methods := one.load().methods):
            found: Callable[..., Any] = methods[name]
            return found
    raise NotImplementedError(f"{name}() belongs to a capability that is not in this copy of the package.")


def row(
    name: str,
    *,
    fields: str = "",
    rules: bool = False,
    file: str = "",
    commands: tuple[CommandEntry, ...] = (),
    batches_by: str = "",
    has_extension: bool = True,
    handles_data: bool = False,
    moved: Mapping[str, str] | None = None,
) -> CapabilityRow:
    """Returns the row of a capability, whose files have the usual names.

    Args:
        name: of the capability and of its folder in `capabilities/`.
        fields: name of the class in its `fields.py`.
        rules: it has a `rules.py`.
        file: file of its entry in a checkpoint, if it has one of its own.
        commands: its commands.
        batches_by: the argument that asks for the batches which its `batcher.py` forms; it has no extension then.
        has_extension: it has a `capability.py`.
        handles_data: it has a `data_handler.py`.
        moved: former paths of its modules, and their names in the folder.
    """
    folder = f"{CAPABILITIES}.{name}"
    return CapabilityRow(
        name=name,
        capability="" if batches_by or not has_extension else f"{folder}.capability:CAPABILITY",
        fields=f"{folder}.fields:{fields}" if fields else "",
        rules=f"{folder}.rules" if rules else "",
        file=file,
        commands=commands,
        batcher=f"{folder}.batcher:find_batcher" if batches_by else "",
        batches_by=batches_by,
        data_handler=f"{folder}.data_handler:HANDLER" if handles_data else "",
        former_modules={path: f"{folder}.{module}" for path, module in (moved or {}).items()},
    )


BRANCH = CommandEntry(function="trainwright.cli.table_commands:branch", after="resume", takes_settings=True)
CTL = CommandEntry(function=f"{CAPABILITIES}.control.commands:ctl", after="push")
LEDGER = CommandEntry(function="trainwright.cli.table_commands:ledger", after="push")
REPLAY = CommandEntry(function="trainwright.cli.table_commands:replay", after="push")
DIFF = CommandEntry(function=f"{CAPABILITIES}.recorded_values.commands:diff", after="compare")

# Where pickles of earlier versions have them.
MIXTURE_PATHS = {
    "data.mixture": "dataset",
    "data.mixture_batches": "batches",
    "data.mixture_order": "order",
    "data.streaming.mixture_stream": "stream",
}
CURRICULUM_PATHS = {"data.curriculum": "curriculum"}

# In the order in which a run makes their extensions: those that another one asks for come before it.
TABLE: tuple[CapabilityRow, ...] = (
    row("token_budget", fields="TokenBudgetFields", rules=True, batches_by="max_tokens_per_batch"),
    row("packing", fields="PackingFields", rules=True, batches_by="packing"),
    row("mixture", fields="MixtureFields", rules=True, has_extension=False, handles_data=True, moved=MIXTURE_PATHS),
    row("lease", fields="LeaseFields"),
    row("quarantine"),
    row("mirror", fields="MirrorFields", rules=True),
    row("async_evaluation", fields="AsyncEvaluationFields", rules=True),
    CapabilityRow(
        name="first_look",
        capability="trainwright.preflight.capabilities:FIRST_LOOK",
        fields="trainwright.preflight.fields:FirstLookFields",
    ),
    CapabilityRow(
        name="speed",
        capability="trainwright.preflight.capabilities:SPEED",
        fields="trainwright.preflight.fields:SpeedFields",
        rules="trainwright.preflight.rules",
    ),
    row("recorded_metrics", file="recorded_metrics.json"),
    row("checkpoint_items", file="checkpoint_items.pt"),
    row("incidents", fields="IncidentFields", commands=(REPLAY,)),
    row("loss_question"),
    row("guard", fields="GuardFields", rules=True, file="guard_state.json"),
    row("loss_scale"),
    row("slow_ranks"),
    row("lost_updates"),
    row("averages", fields="AverageFields", rules=True, file="weight_averages.pt"),
    row("recorded_values", fields="RecordedValuesFields", rules=True, commands=(DIFF,)),
    row("branch", fields="BranchFields", rules=True, commands=(BRANCH,)),
    row("control", fields="ControlFields", commands=(CTL,)),
    row("ledger", fields="LedgerFields", file="ledger.parquet", commands=(LEDGER,)),
    row("what_is_trained"),
    row("curriculum", file="curriculum.pt", handles_data=True, moved=CURRICULUM_PATHS),
    CapabilityRow(name="experts"),
)
MADE = tuple(one for one in TABLE if one.capability)  # by a run, not by the user
RESERVED_NAMES = frozenset(one.name for one in MADE)
FORMER_MODULES = {path: module for one in TABLE for path, module in one.former_modules.items()}
FILES = {one.name: one.file for one in TABLE if one.file}
# Arguments that ask for batches formed by the lengths of samples.
BATCHING_FIELDS = tuple(one.batches_by for one in TABLE if one.batches_by)
