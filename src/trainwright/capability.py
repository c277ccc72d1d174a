"""Capability: the one way in which something beyond the loop comes into a run. `capability_table.py` lists them all.

A capability has a folder with everything that belongs to it:

    capability.py   its `Capability`: when its extension is made, from what, and whether a run needs it at all
    extension.py    its extension: what it does at which events of a run (`loop/extension.py`)
    fields.py       its arguments, a `FieldGroup`; imported with TrainingArguments, so nothing heavy
    rules.py        contradictions between its arguments and others; imported with TrainingArguments too
    checks.py       what it adds to the check-up (`preflight/check_up.py`): checks, and sections of the report

`run/build.py` makes the extensions of a run in one loop over the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import resolve
from trainwright.data.row_names import NamesOf
from trainwright.engine.base import Engine
from trainwright.loop.extension import Extension

if TYPE_CHECKING:
    from trainwright.support.findings import Check, Section


class Moment(Enum):
    """When the extension of a capability is made."""

    DIRECTORY = "directory"  # before the run reads or writes anything: no checkpoint, model or data yet
    TRAINING = "training"  # model, optimizer, data and plan are there; the states of a checkpoint come next


class Freeze(Protocol):
    """Writes what another process needs to evaluate for a run."""

    def __call__(
        self, path: Path, *, device: str, settings: Mapping[str, Any], asked_by: str, instead: str
    ) -> None:  # Any: values of arguments
        """Writes the parts of the trainer; `run.frozen.freeze` has the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a capability may make its extension from.

    Attributes:
        run: the run; its setup and plan exist at `Moment.TRAINING`.
        hooks: the trainer. An extension that keeps it must release it when the run is over.
        engine: engine of the run.
        folder: output directory of the run.
        load_newest: loads weights, optimizer and schedule of the run's newest checkpoint, and returns its step.
        show: shows a line to the user.
        freeze: writes the parts of the trainer that another process needs to evaluate.
        rotate: deletes checkpoints that the arguments no longer want.
    """

    run: Any  # a run.run.Run, above this module
    hooks: Any  # a Trainer, or a subclass of the user's
    engine: Engine
    folder: str
    load_newest: Callable[[], int]
    show: Callable[[str], None]
    freeze: Freeze
    rotate: Callable[[], None]

    @property
    def args(self) -> Any:  # a TrainingArguments, or transformers'
        """Arguments of the run."""
        return self.hooks.args

    @property
    def writes(self) -> bool:
        """True if this process writes the files of a checkpoint."""
        should_save: bool = self.args.should_save
        return should_save

    @property
    def names(self) -> NamesOf:
        """Names of the samples of the training data."""
        return NamesOf(self.hooks.train_dataset, id_column=resolve.id_column(self.args))


class Origin(Protocol):
    """A checkpoint of another run from which a run begins, until it has one of its own."""

    def check(self) -> None:
        """Raises ArgumentError if a run with these arguments may not begin there."""

    def begin_or_continue(self, own: Checkpoint | None) -> Checkpoint:
        """Returns the checkpoint to begin from, or the run's `own` newest one, if it comes from there."""

    def is_begun_by(self, checkpoint: Checkpoint) -> bool:
        """Returns whether a run that continues a checkpoint begins here, and does not go on with its own."""

    def bring_along(self, checkpoint: Checkpoint, folder: str) -> None:
        """Copies what the other run keeps next to its checkpoint into the directory of the new run."""


class Copies(Protocol):
    """Checkpoints of a run in another place than its directory, which a resume takes into account."""

    @property
    def place(self) -> str:
        """Where they are, as a message names it."""

    def fetch(self, local: CheckpointStore, *, why_not: Callable[[Checkpoint], str | None]) -> Checkpoint | None:
        """Returns the checkpoint to resume from, of the directory or the copies; one of the copies is downloaded.

        All processes call it. `why_not` returns the problem of a checkpoint whose files are as its manifest lists them.

        Raises:
            CheckpointError: there is a checkpoint that was asked for by name, or may be one, and it cannot be read.
        """

    def find_steps_after(self, manifest: Manifest) -> list[int]:
        """Returns the steps of later checkpoints of the run of a manifest; none if the place cannot be read."""


Others = Mapping[str, Extension]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a run needs to know about a capability.

    Attributes:
        make: returns the extension for a run, or None if this run does not need one. It takes the context and the
            extensions that the run has so far, by name: those above it in the table, and the user's.
        moment: when `make` is called.
        needs: names of the capabilities that `make` looks up among the others; each stands above it in the table, and
            may be missing there, since its run does not need it or its folder was deleted.
        origin: returns the checkpoint of another run from which a run with these arguments begins; None: it begins in
            its own directory.
        methods: what methods of the trainer call that belong to it, by their name. Each takes the trainer and its run
            first, and may be called outside of training.
        copies: returns where else checkpoints are for a run with these arguments, and what `resume_from_checkpoint`
            asks for; None: in the directory alone.
        checks: what it adds to the checks before a run; their facts are `CheckFacts` of the check-up.
        sections: make what it adds to the report of a check-up from the same facts; None if there is nothing to show.
    """

    make: Callable[[RunContext, Others], Extension | None]
    moment: Moment = Moment.TRAINING
    needs: tuple[str, ...] = ()
    origin: Callable[[Any], Origin | None] | None = None  # Any: arguments of transformers too
    copies: Callable[[Any, str | bool, Engine], Copies | None] | None = None
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # Any: as the methods have them
    checks: Sequence[Check] = ()
    sections: Sequence[Callable[[Any], Section | None]] = ()  # Any: facts of the check-up, above this module


__all__ = ["Capability", "Copies", "Extension", "Freeze", "Moment", "Origin", "Others", "RunContext"]
