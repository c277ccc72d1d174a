"""The table of capabilities: what this package can do in a run beyond training, evaluating, saving and resuming.

Names as strings and nothing imported, so that the arguments, the checks and the trainer can all read the table. A
capability is one folder and one row here; deleting both removes it. `capability.py` shows what a row leads to.
"""

from __future__ import annotations

import importlib
import sys
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
        reads: the parameters that only read; None: the command writes, so that an agent needs `--allow-writes` for it.
        reads_recipe: it reads the files that the recipe of a run names.
    """

    function: str
    after: str
    takes_settings: bool = False
    reads: tuple[str, ...] | None = None
    reads_recipe: bool = False

    @property
    def name(self) -> str:
        """Name of the command."""
        return self.function.partition(":")[2]


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that a capability keeps in the directory of a run.

    Attributes:
        name: its name.
        is_inherited: a branch of the run gets a copy.
    """

    name: str
    is_inherited: bool = False


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
        run_files: what it keeps in the directory of a run, for a copy of the run too.
        local_files: patterns of what it keeps there for this machine alone; it is not uploaded to the Hub.
        off_in_copies: arguments that have their defaults in a copy of a trainer which is only measured.
        names_rows_by: an argument of its own that may name the column of row names, as `id_column` does.
        commands: its commands. They are here and not in its `Capability`, since the program imports nothing heavy.
        batcher: module and function that returns the `Batcher` of a plan (`data/batcher.py`), or None for another plan.
        batch_plan: module and function that returns how arguments form batches (`Batching`), or None.
        batch_suggestion: module and function that returns a `BatchSuggestion` (`data/batcher.py`) for padded batches,
            or None.
        batches_by: the argument that asks for this batcher.
        data_handler: module and object of its `DataHandler` (`data/sources.py`), for training data of its own form.
        journal: module and object of its `JournalPart` (`journal/forms.py`): its entries, and what a report shows.
        attentions: attention functions of its own that a model's settings may name: for each the module and function
            that makes it known to transformers.
        names: its public names, by the module that has them; `trainwright` has them too.
        builds_on: capabilities whose code it uses. Without one of them, it is not there either.
        former_modules: where its modules were in earlier versions, whose pickles name them: the path in the package,
            and the module of its folder.
    """

    name: str
    capability: str = ""
    fields: str = ""
    rules: str = ""
    file: str = ""
    run_files: tuple[RunFile, ...] = ()
    local_files: tuple[str, ...] = ()
    off_in_copies: tuple[str, ...] = ()
    names_rows_by: str = ""
    commands: tuple[CommandEntry, ...] = ()
    batcher: str = ""
    batch_plan: str = ""
    batch_suggestion: str = ""
    batches_by: str = ""
    data_handler: str = ""
    journal: str = ""
    attentions: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    builds_on: tuple[str, ...] = ()
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
    # Asked many times by each run, and `import_module` takes the lock of the module each time.
    return getattr(sys.modules.get(module) or importlib.import_module(module), name)


def find_row(name: str) -> CapabilityRow:
    """Returns the row of a capability that is there."""
    return next(one for one in TABLE if one.name == name)


def has_capability(name: str) -> bool:
    """Returns whether a capability is in this copy of the package."""
    return any(one.name == name for one in TABLE)


def check_capability(name: str, *, needed_by: str) -> None:
    """Checks that a capability which something needs is in this copy of the package.

    Raises:
        NotImplementedError: it is not.
    """
    if not has_capability(name):
        raise NotImplementedError(
            f"{needed_by} needs the capability {name!r}, which is not in this copy of the package: restore its folder "
            "in capabilities/ and its row in capability_table.py."
        )


def list_attentions() -> list[str]:
    """Returns the names of the capabilities' own attention functions."""
    return [name for one in TABLE for name in one.attentions]


def register_attention(name: object) -> None:
    """Makes an attention function of a capability known to transformers; does nothing for any other name."""
    for one in TABLE:
        if name in one.attentions:
            load(one.attentions[str(name)])()


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
    batches_by: str = "",
    has_extension: bool = True,
    handles_data: bool = False,
    has_journal: bool = False,
    names: Mapping[str, tuple[str, ...]] | None = None,
    moved: Mapping[str, str] | None = None,
    **others: Any,  # attributes of each type
) -> CapabilityRow:
    """Returns the row of a capability, whose files have the usual names.

    Args:
        name: of the capability and of its folder in `capabilities/`.
        fields: name of the class in its `fields.py`.
        rules: it has a `rules.py`.
        batches_by: the argument that asks for the batches which its `batcher.py` forms and its `plan.py`
            plans; it has no extension then.
        has_extension: it has a `capability.py`.
        handles_data: it has a `data_handler.py`.
        has_journal: it has a `journal.py`.
        names: modules in the folder, and the public names of each.
        moved: former paths of its modules, and their names in the folder.
        others: attributes of the row, as they are there.
    """
    folder = f"{CAPABILITIES}.{name}"
    return CapabilityRow(
        name=name,
        capability="" if batches_by or not has_extension else f"{folder}.capability:CAPABILITY",
        fields=f"{folder}.fields:{fields}" if fields else "",
        rules=f"{folder}.rules" if rules else "",
        batcher=f"{folder}.batcher:find_batcher" if batches_by else "",
        batch_plan=f"{folder}.plan:plan_batches" if batches_by else "",
        batch_suggestion=f"{folder}.batcher:suggest_batches" if batches_by else "",
        batches_by=batches_by,
        data_handler=f"{folder}.data_handler:HANDLER" if handles_data else "",
        journal=f"{folder}.journal:JOURNAL" if has_journal else "",
        names={f"{folder}.{module}": public for module, public in (names or {}).items()},
        former_modules={path: f"{folder}.{module}" for path, module in (moved or {}).items()},
        **others,
    )


BRANCH = CommandEntry(
    function="trainwright.cli.table_commands:branch", after="resume", takes_settings=True, reads_recipe=True
)
CTL = CommandEntry(function=f"{CAPABILITIES}.control.commands:ctl", after="push")
LEDGER = CommandEntry(
    function="trainwright.cli.table_commands:ledger",
    after="push",
    reads=("run", "question", "other", "number", "data"),
    reads_recipe=True,
)
REPLAY = CommandEntry(
    function="trainwright.cli.table_commands:replay", after="push", reads=("folder", "precision", "one_by_one")
)
DIFF = CommandEntry(
    function=f"{CAPABILITIES}.recorded_values.commands:diff", after="compare", reads=("run", "other", "tolerance")
)

# Where pickles of earlier versions have them.
MIXTURE_PATHS = {
    "data.mixture": "dataset",
    "data.mixture_batches": "batches",
    "data.mixture_order": "order",
    "data.streaming.mixture_stream": "stream",
}
CURRICULUM_PATHS = {"data.curriculum": "curriculum"}

CURRICULUM_NAMES = {"curriculum": ("Curriculum", "LedgerColumns")}
EXPERTS_NAMES = {"extension": ("ExpertLoad",)}
EXPERTS_PATHS = {"extensions.experts.extension": "extension"}

# In the order in which a run makes their extensions: those that another one asks for come before it.
ROWS: tuple[CapabilityRow, ...] = (
    row("token_budget", fields="TokenBudgetFields", rules=True, batches_by="max_tokens_per_batch"),
    row(
        "packing",
        fields="PackingFields",
        rules=True,
        batches_by="packing",
        handles_data=True,
        attentions={"sdpa_by_document": f"{CAPABILITIES}.packing.document_attention:register"},
    ),
    row("mixture", fields="MixtureFields", rules=True, has_extension=False, handles_data=True, moved=MIXTURE_PATHS),
    row("lease", fields="LeaseFields", local_files=(".lease-*",)),
    row("quarantine", run_files=(RunFile("quarantine.jsonl", is_inherited=True),)),
    row("mirror", fields="MirrorFields", rules=True, builds_on=("lease",)),
    row("async_evaluation", fields="AsyncEvaluationFields", rules=True, off_in_copies=("eval_async",)),
    CapabilityRow(
        name="first_look",
        capability="trainwright.preflight.capabilities:FIRST_LOOK",
        fields="trainwright.preflight.fields:FirstLookFields",
    ),
    CapabilityRow(
        name="speed",
        capability="trainwright.preflight.capabilities:SPEED",
        fields="trainwright.preflight.fields:SpeedFields",
        off_in_copies=("speed",),
        rules="trainwright.preflight.rules",
        journal="trainwright.preflight.journal:JOURNAL",
    ),
    row("recorded_metrics", file="recorded_metrics.json"),
    row("checkpoint_items", file="checkpoint_items.pt"),
    row("incidents", fields="IncidentFields", local_files=("incidents/*",), commands=(REPLAY,)),
    row("loss_question"),
    row("guard", fields="GuardFields", rules=True, file="guard_state.json"),
    row("loss_scale"),
    row("slow_ranks", has_journal=True),
    row("lost_updates"),
    row("averages", fields="AverageFields", rules=True, file="weight_averages.pt", off_in_copies=("average",)),
    row(
        "recorded_values",
        fields="RecordedValuesFields",
        rules=True,
        off_in_copies=("record_values",),
        commands=(DIFF,),
    ),
    row(
        "branch",
        fields="BranchFields",
        rules=True,
        off_in_copies=("branch_from",),
        commands=(BRANCH,),
        has_journal=True,
    ),
    row("control", fields="ControlFields", off_in_copies=("live_control",), commands=(CTL,), has_journal=True),
    row(
        "ledger",
        fields="LedgerFields",
        file="ledger.parquet",
        run_files=(RunFile("ledger.parquet"),),
        off_in_copies=("ledger",),
        names_rows_by="ledger",
        commands=(LEDGER,),
    ),
    row("what_is_trained", has_journal=True),
    row(
        "curriculum",
        file="curriculum.pt",
        handles_data=True,
        names=CURRICULUM_NAMES,
        builds_on=("ledger", "mixture"),
        moved=CURRICULUM_PATHS,
    ),
    row("experts", has_extension=False, names=EXPERTS_NAMES, moved=EXPERTS_PATHS),
)
TABLE = tuple(one for one in ROWS if {*one.builds_on} <= {other.name for other in ROWS})
MADE = tuple(one for one in TABLE if one.capability)  # by a run, not by the user
RESERVED_NAMES = frozenset(one.name for one in MADE)
# Module -> public names that live in it.
PUBLIC_NAMES = {module: names for one in TABLE for module, names in one.names.items()}
FORMER_MODULES = {path: module for one in TABLE for path, module in one.former_modules.items()}
FILES = {one.name: one.file for one in TABLE if one.file}
RUN_FILES = tuple(file for one in TABLE for file in one.run_files)
LOCAL_FILES = tuple(pattern for one in TABLE for pattern in one.local_files)
OFF_IN_COPIES = tuple(name for one in TABLE for name in one.off_in_copies)
# Arguments that name the column of row names, besides `id_column`.
NAME_FIELDS = tuple(one.names_rows_by for one in TABLE if one.names_rows_by)
COMMANDS = tuple(entry for one in TABLE for entry in one.commands)
# Arguments that ask for batches formed by the lengths of samples.
BATCHING_FIELDS = tuple(one.batches_by for one in TABLE if one.batches_by)
