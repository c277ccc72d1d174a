"""Extension: the one way in which a capability takes part in a run. What a capability does is in its own folder.

An extension overrides the events that it needs: those of a run and its steps (`Extension`), of a save (`SaveEvents`)
and of a log or an evaluation (`ReportEvents`). A table of them is built when a run begins, so an event that no
extension overrides costs nothing in a step. The events of one step, in order:

    mark          before its micro-batches are read
    window        they are read, and none is trained yet
    micro_batch   after each forward pass, before its backward pass
    decide        all gradients are there: is the update made?
    refused       the update was not made (perhaps known only later, on an accelerator)
    after_step    the step is counted
    settle, share, shared, log, evaluated, before_save
                  where a log, an evaluation or a save is due
    committed     the checkpoint is on the disk, perhaps several steps later
    keeps         which older checkpoints must stay
    rewind        in place of all that follows, where the step does not count
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from trainwright._types import Batch, DataLoaderLike, Optimizer, SampleIds, Scheduler, StateDict
from trainwright.config.plans import StepPlan
from trainwright.errors import ExtensionError, TrainwrightError
from trainwright.loop.setup import Setup, Start
from trainwright.state.progress import Progress
from trainwright.support.hooks import TrainHooks

Evaluate: TypeAlias = Callable[[str], dict[str, float]]
Mark = Any  # each extension has its own kind of mark, read only by its `rewind`


class Run(Protocol):
    """The part of a run that the training loop and extensions use."""

    @property
    def setup(self) -> Setup:
        """Fixed objects and settings, available from `Extension.begin` on."""

    @property
    def plan(self) -> StepPlan:
        """Steps and epochs of the run; `recount_steps` replaces it."""

    @property
    def start(self) -> Start:
        """Starting position of the run; `recount_steps` may replace it."""

    @property
    def progress(self) -> Progress:
        """Values that change during the run."""

    @property
    def extensions(self) -> Extensions:
        """Active extensions."""

    def recount_steps(self) -> None:
        """Requests a recount of the remaining steps before the next window: an epoch's samples have changed."""

    def apply_recount(self, epoch: int, batches: int | None) -> None:
        """Replaces the plan after `recount_steps`; `batches` of the epoch are trained, None at its beginning."""

    def check_parameters(self, optimizer: Any) -> None:
        """Logs a warning for parameters that require a gradient only since the optimizer was made."""

    def follow_groups(self, optimizer: Any, scheduler: Any) -> None:
        """Extends the schedule to the parameter groups that the optimizer got since the last step."""

    def restore_random_states(self, hooks: TrainHooks) -> None:
        """Restores the random states of the checkpoint from which the run continues, if there is one."""

    def end_pass(self, epoch: int) -> None:
        """Counts an epoch of unknown or wrong length that turned out to be over after its last step."""


class Decision(Enum):
    """An extension's decision about the update of a step."""

    APPLY = "apply"
    SKIP = "skip"  # weights, optimizer and schedule stay unchanged
    STOP = "stop"  # like SKIP, and the run ends in order after this step


class SavedEntry(Protocol):
    """Entry of an extension in a checkpoint."""

    @property
    def path(self) -> Path | None:
        """File with the entry; None if the checkpoint has none."""

    @property
    def is_own(self) -> bool:
        """True if this process wrote the file; False if it is the first process's, or there is none."""

    def state(self, is_sound: Callable[[StateDict], bool] = ...) -> StateDict:
        """Returns the saved state, empty if there is none; CheckpointError if it is invalid or cannot be read."""


class SavedRun(Protocol):
    """Checkpoint that a run resumes from; it is opened once, and read by name."""

    @property
    def path(self) -> Path:
        """Its directory."""

    def entry(self, name: str, *, rank: int = 0, num_processes: int = 1) -> SavedEntry:
        """Returns the entry of an extension; among several files, that of process `rank` of `num_processes`."""


class Sink(Protocol):
    """Writer of the files of a checkpoint, immediately or in the background."""

    def put(self, values: Any, write: Callable[[Any], None]) -> None:
        """Calls `write` with `values`; if it is called later, their tensors are copied first."""


class MicroBatch:
    """A micro-batch between its forward and its backward pass.

    Attributes:
        run: the run that trains it.
        inputs: the batch as the collator made it.
        loss: as `compute_loss` returned it: a scalar on the device with its graph, or a `LossOutput`.
        num_items: label items of the whole window; None if nothing counts them.
        outputs: output of the model; None unless an extension of the run `needs_outputs`.
        model_inputs: batch that the model got, on the device; likewise.
        first_gradient: gradient with which the backward pass begins, a scalar like the loss; None means 1.
    """

    __slots__ = ("first_gradient", "inputs", "loss", "model_inputs", "num_items", "outputs", "run")

    def __init__(self, run: Run, inputs: Batch, loss: Any, num_items: torch.Tensor | int | None) -> None:
        self.run = run
        self.outputs: Any = None
        self.model_inputs: Batch | None = None
        self.inputs = inputs
        self.loss = loss
        self.num_items = num_items
        self.first_gradient: torch.Tensor | None = None

    @property
    def sample_ids(self) -> SampleIds:
        """Ids of its samples in the order of its rows, as numbered by the training data; empty if unknown."""
        progress = self.run.progress
        ids = progress.window.current.sample_ids
        if not ids:
            return ()
        of_batch: SampleIds = ids[progress.window.part.number]
        return of_batch if progress.window.part.rows is None else of_batch[progress.window.part.rows]


class StepFacts:
    """Facts about a step with complete gradients, before its update.

    Attributes:
        run: the run; `run.progress.state.global_step` is the number of the step before.
        grad_norm: norm of the gradients before clipping; None if not measured.
        optimizer: makes the update.
        scheduler: stepped after the update; None if evaluations drive it.
    """

    __slots__ = ("grad_norm", "optimizer", "run", "scheduler")

    def __init__(
        self, run: Run, grad_norm: torch.Tensor | float | None, optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        self.run = run
        self.grad_norm = grad_norm
        self.optimizer = optimizer
        self.scheduler = scheduler

    @property
    def step(self) -> int:
        """Number of the step, from 1."""
        return self.run.progress.state.global_step + 1

    @property
    def loss(self) -> torch.Tensor:
        """Loss of the step in this process, a scalar on the device: the sum over its micro-batches."""
        return self.run.progress.meter.sum_step()


class SaveEvents:
    """The part of an extension in a checkpoint: what it saves and loads, and what it does with the files."""

    def before_save(self, run: Run) -> None:
        """Called when a checkpoint is about to be written, after `settle`."""

    def check_save(self) -> None:
        """Raises CheckpointWriteError if nothing may be written now; only the process that writes calls it."""

    def committed(self, checkpoint: Path) -> None:
        """Called when a checkpoint is on disk and user code has made its changes to it.

        Only processes that write checkpoints call it, perhaps on the thread that wrote it, before the next save begins.

        Args:
            checkpoint: its directory.
        """

    def keeps(self) -> set[int]:
        """Returns steps of checkpoints that may not be deleted yet, perhaps on the thread that wrote the newest one."""
        return set()

    def state_dict(self) -> StateDict:
        """Returns its state for a checkpoint: plain values, lists, dicts and tensors. Each process saves its own."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Continues from the result of `state_dict`."""

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes its own files into a checkpoint; all processes call it. Most extensions only need `state_dict`."""

    def load(self, checkpoint: SavedRun) -> None:
        """Reads the files of `save`, before `begin`; all processes call it."""


class ReportEvents:
    """The part of an extension in a log and in an evaluation: numbers that it adds."""

    def share(self) -> list[float]:
        """Returns numbers that all processes get to know, as many each time; after `settle`, where several train.

        They travel with the counts that processes exchange for a log or a save, so they cost no message of their own.
        """
        return []

    def shared(self, rows: list[list[float]]) -> None:
        """Takes the values that `share` returned in each process, by rank, itself included."""

    def log(self) -> dict[str, float]:
        """Returns values by name for the current log, after `settle`."""
        return {}

    def evaluated(self, run: Run, evaluate: Evaluate) -> dict[str, float]:
        """Called after an evaluation during training and `settle`; returns metrics of further evaluations.

        Args:
            run: the run.
            evaluate: evaluates all evaluation sets again, with the weights that the model has now, logs the metrics and
                returns them. It takes the prefix of their names, which the metrics of the first evaluation have as
                "eval". All processes call it.
        """
        return {}


class Extension(SaveEvents, ReportEvents):
    """A capability that takes part in a run; override the events that it needs.

    The events of a run and of its steps are here, those of a save in `SaveEvents`, and those of a log or an evaluation
    in `ReportEvents`.

    An extension belongs to one trainer. It may keep the `run` passed to `begin` until `close`, which must release it.
    If several processes train, each has its own extension, and all of them receive the same events.

    Attributes:
        name: its entry in checkpoints and error messages; unique among the extensions of a trainer.
        order: place among the extensions, lower first; `rewind`, `finish`, `on_error` and `close` go
            through them in reverse.
        outlives_run: it still takes part in a checkpoint that is saved after the run.
        needs_outputs: `micro_batch` reads the model's outputs, which are kept for it.
        refuses_late: `refused` may be called after the `after_step` of the same step: in the next `settle`, or in
            `decide` of the next step, before later extensions.
    """

    name: str = ""
    order: int = 0
    outlives_run: bool = False
    needs_outputs: bool = False
    refuses_late: bool = False

    def open(self, run: Run) -> None:
        """Called when the run is about to begin: nothing is read, written or changed yet, and `run.setup` is not set.

        Reset the state of an earlier run here; the state of a checkpoint is loaded afterwards.
        """

    def model_ready(self, run: Run) -> None:
        """Called when the model is on its device with the weights of a checkpoint; before optimizer and data."""

    def before_plan(self, run: Run, dataloader: DataLoaderLike) -> None:
        """Called when the training data is ready, before its epochs are counted. All processes call it."""

    def begin(self, run: Run) -> None:
        """Called before the first step: model, optimizer, data, plan and the states of a checkpoint are ready."""

    def facts(self) -> dict[str, Any]:
        """Returns facts about the run for its journal, by name: plain values, as for JSON."""
        return {}

    def window(self, batches: Sequence[Batch]) -> None:
        """Called when the micro-batches of the next step are read, as the collator made them."""

    def micro_batch(self, batch: MicroBatch) -> None:
        """Called between the forward pass of a micro-batch and its backward pass."""

    def decide(self, facts: StepFacts) -> Decision:
        """Returns whether to make the update. The first extension that does not answer `APPLY` decides."""
        return Decision.APPLY

    def refused(self, step: int) -> None:
        """Called when the update of a step was not made; anything counted for it does not count."""

    def after_step(self, run: Run) -> None:
        """Called after a step is counted, before the callbacks. It may call `run.recount_steps()`."""

    def after_epoch(self, run: Run) -> None:
        """Called when an epoch is over, or the run was ended within it; before the callbacks."""

    def settle(self) -> None:
        """Called before a log or a save: reads back values from the device. All processes call it together."""

    def mark(self) -> Mark:
        """Returns the state with which `rewind` goes back to this moment, the beginning of a window."""

    def rewind(self, mark: Mark) -> None:
        """Returns to a mark: the window is retried in smaller micro-batches, dropped, or interrupted by an error.

        The mark is None if the extension did not listen to `mark` then.
        """

    def on_error(self, error: BaseException) -> None:
        """An error or a signal ends the run."""

    def trained(self, run: Run) -> None:
        """All steps are trained; the last log, and the best model, come next. All processes call it."""

    def finish(self, run: Run) -> None:
        """All steps are trained and the last log is written; callbacks have not heard of it yet."""

    def close(self) -> None:
        """Called when the run is over, for whatever reason: undoes the changes of `open` and `begin`.

        It is called once per run, even if the run was refused before `open` or `begin` of this extension.
        """

    def listens_to(self) -> set[str]:
        """Returns the names of its events; by default, the events that its class overrides.

        An extension that needs an event only in some runs removes it here, so that other runs do not pay for it. It is
        asked when the run begins, and after `run.extensions.listen_anew()`.
        """
        return {event for event in EVENTS if getattr(type(self), event) is not getattr(Extension, event)}


RUN_EVENTS = (
    "open",
    "model_ready",
    "before_plan",
    "begin",
    "facts",
    "window",
    "micro_batch",
    "decide",
    "refused",
    "after_step",
    "after_epoch",
    "settle",
    "mark",
    "trained",
)
REPORT_EVENTS = ("share", "shared", "log", "evaluated")
SAVE_EVENTS = ("before_save", "check_save", "committed", "keeps", "state_dict", "load_state_dict", "save", "load")
REVERSED = ("rewind", "finish", "on_error", "close")
FORWARD = RUN_EVENTS + REPORT_EVENTS + SAVE_EVENTS
EVENTS = FORWARD + REVERSED
# Each extension with the events that it listens to, in their order.
Heard: TypeAlias = Sequence[tuple["Extension", set[str]]]


def find_listeners(heard: Heard, event: str) -> tuple[Callable[..., Any], ...]:
    """Returns the methods that listen to an event, in their order."""
    methods = tuple(getattr(one, event) for one, events in heard if event in events)
    return methods[::-1] if event in REVERSED else methods


class SaveListeners:
    """The extensions that take part in a checkpoint.

    Each attribute named after an event is a tuple of the methods that listen to it, in their order.
    """

    before_save: tuple[Callable[[Run], None], ...]
    check_save: tuple[Callable[[], None], ...]
    committed: tuple[Callable[[Path], None], ...]
    keeps: tuple[Callable[[], set[int]], ...]
    save: tuple[Callable[[Path, Sink], None], ...]
    load: tuple[Callable[[SavedRun], None], ...]

    def __init__(self, heard: Heard) -> None:
        for event in SAVE_EVENTS:
            setattr(self, event, find_listeners(heard, event))
        self._stateful = [one for one, events in heard if "state_dict" in events]

    def kept_steps(self) -> set[int]:
        """Returns the steps of checkpoints that may not be deleted yet."""
        return {step for keeps in self.keeps for step in keeps()}

    def states(self) -> dict[str, StateDict]:
        """Returns the states of the extensions that have some, by name."""
        states = {}
        for one in self._stateful:
            state = one.state_dict()
            if not isinstance(state, dict):
                raise ExtensionError(_wrong_result(one.state_dict, state, "a dict; {} saves nothing"))
            states[one.name] = state
        return states

    def load_states(self, states: dict[str, StateDict]) -> None:
        """Restores the states of the extensions; an extension without a saved state starts afresh."""
        for one in self._stateful:
            if one.name in states:
                one.load_state_dict(states[one.name])


class ReportListeners:
    """The extensions that add numbers to a log or an evaluation.

    Each attribute named after an event is a tuple of the methods that listen to it, in their order.
    """

    share: tuple[Callable[[], list[float]], ...]
    shared: tuple[Callable[[list[list[float]]], None], ...]
    log: tuple[Callable[[], dict[str, float]], ...]
    evaluated: tuple[Callable[[Run, Evaluate], dict[str, float]], ...]

    def __init__(self, heard: Heard) -> None:
        for event in REPORT_EVENTS:
            setattr(self, event, find_listeners(heard, event))
        self._sharing = [one for one, events in heard if "share" in events]

    def shares(self) -> list[list[float]]:
        """Returns the numbers of each extension that shares some."""
        return [share() for share in self.share]

    def tell_shared(self, mine: list[list[float]], rows: list[list[float]]) -> None:
        """Gives each extension its numbers of all processes; `mine` are the numbers that `shares` returned."""
        start = 0
        for one, own in zip(self._sharing, mine, strict=True):
            one.shared([row[start : start + len(own)] for row in rows])
            start += len(own)

    def logged(self) -> dict[str, float]:
        """Returns the values of all extensions for a log."""
        values: dict[str, float] = {}
        for log in self.log:
            found = log()
            if not isinstance(found, dict):
                raise ExtensionError(_wrong_result(log, found, "a dict of names and numbers; {} logs nothing"))
            values |= found
        return values

    def evaluate_further(self, run: Run, evaluate: Evaluate) -> dict[str, float]:
        """Returns the metrics of the further evaluations of all extensions."""
        values: dict[str, float] = {}
        for evaluated in self.evaluated:
            found = evaluated(run, evaluate)
            if not isinstance(found, dict):
                raise ExtensionError(_wrong_result(evaluated, found, "a dict of names and numbers; {} adds nothing"))
            values |= found
        return values


class Extensions:
    """The extensions of one run, with a table of their events.

    Each attribute named after an event of the run or of a step is a tuple of the methods that listen to it, in their
    order.

    Attributes:
        saving: those that take part in a checkpoint.
        reporting: those that add numbers to a log or an evaluation.
    """

    open: tuple[Callable[[Run], None], ...]
    model_ready: tuple[Callable[[Run], None], ...]
    before_plan: tuple[Callable[[Run, DataLoaderLike], None], ...]
    begin: tuple[Callable[[Run], None], ...]
    facts: tuple[Callable[[], dict[str, Any]], ...]
    window: tuple[Callable[[Sequence[Batch]], None], ...]
    micro_batch: tuple[Callable[[MicroBatch], None], ...]
    decide: tuple[Callable[[StepFacts], Decision], ...]
    refused: tuple[Callable[[int], None], ...]
    after_step: tuple[Callable[[Run], None], ...]
    after_epoch: tuple[Callable[[Run], None], ...]
    settle: tuple[Callable[[], None], ...]
    mark: tuple[Callable[[], Mark], ...]
    unmarked: list[tuple[Extension, Mark]]  # extensions that can be rewound, with None
    trained: tuple[Callable[[Run], None], ...]
    finish: tuple[Callable[[Run], None], ...]
    on_error: tuple[Callable[[BaseException], None], ...]
    close: tuple[Callable[[], None], ...]

    def __init__(self, extensions: Iterable[Extension] = ()) -> None:
        self._all: list[Extension] = []
        self._replace(extensions)

    def __iter__(self) -> Iterator[Extension]:
        return iter(tuple(self._all))

    def add(self, *extensions: Extension) -> None:
        """Adds extensions; they receive the events from now on."""
        self._replace([*self._all, *extensions])

    def remove(self, extension: Extension) -> None:
        """Removes and closes an extension: it receives no more events. Ignored if it is not there."""
        if any(one is extension for one in self._all):
            self._replace(one for one in self._all if one is not extension)
            extension.close()

    def listen_anew(self) -> None:
        """Asks all extensions again for their events: one of them needs others from now on."""
        self._replace(self._all)

    def tell_error(self, error: BaseException) -> None:
        """Tells all extensions of the error that ends the run; an error in one becomes a note of it."""
        for on_error in self.on_error:
            try:
                on_error(error)
            except Exception as second:
                _note_second(error, second)

    def end(self, error: BaseException | None = None) -> None:
        """Closes all extensions, even if one fails to close, and releases all that do not outlive a run.

        Args:
            error: ended the run; failures to close become notes of it. None: the first of them is raised.
        """
        first = error
        before = self._all
        try:
            for close in self.close:
                try:
                    close()
                except Exception as second:
                    if first is None:
                        name_extension(second)
                        first = second
                    else:
                        _note_second(first, second)
        finally:
            self._replace(one for one in before if one.outlives_run)
        if first is not None and error is None:
            raise first

    def get(self, name: str) -> Extension | None:
        """Returns the extension of a name; None if there is none."""
        return next((one for one in self._all if one.name == name), None)

    def _replace(self, extensions: Iterable[Extension]) -> None:
        self._all = sorted(extensions, key=lambda one: one.order)
        heard = [(one, one.listens_to()) for one in self._all]
        for event in (*RUN_EVENTS, *REVERSED):
            setattr(self, event, find_listeners(heard, event))
        self.saving = SaveListeners(heard)
        self.reporting = ReportListeners(heard)
        self.needs_outputs = any(one.needs_outputs for one in self._all)
        self._rewindable = [(one, "mark" in events) for one, events in heard if "rewind" in events]
        self.unmarked = [(one, None) for one, _ in self._rewindable]

    def marks(self) -> list[tuple[Extension, Mark]]:
        """Returns a mark of each extension that can be rewound; None for one that has nothing to remember.

        Where `mark` is empty, it is `unmarked`, which no step has to make.
        """
        return [(one, one.mark() if is_marked else None) for one, is_marked in self._rewindable]

    def rewind_to(self, marks: list[tuple[Extension, Mark]]) -> None:
        """Rewinds the extensions to their marks, in reverse order, unless they were added or removed since then."""
        for extension, mark in reversed(marks):
            if any(one is extension for one, _ in self._rewindable):
                extension.rewind(mark)

    def decision(self, facts: StepFacts) -> Decision:
        """Returns the decision of the first extension that does not let the update be made; else `APPLY`."""
        for decide in self.decide:
            found = decide(facts)
            if found is not Decision.APPLY:
                if not isinstance(found, Decision):
                    raise ExtensionError(_wrong_result(decide, found, "a Decision; Decision.APPLY makes the update"))
                return found
        return Decision.APPLY

    def refuse(self, step: int) -> None:
        """Tells all extensions that the update of a step was not made."""
        for refused in self.refused:
            refused(step)

    def settle_all(self) -> None:
        """Makes the extensions read values back from the device."""
        for settle in self.settle:
            settle()


def name_extension(error: BaseException) -> None:
    """Adds a note with the name of the extension that raised an error.

    Errors that Trainwright raises on purpose get none, and neither do signals.
    """
    if not isinstance(error, Exception) or isinstance(error, TrainwrightError):
        return
    innermost: Extension | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_argcount > 0:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])  # `self` of a method
            if isinstance(owner, Extension):
                innermost = owner
    if innermost is not None:
        _add_note(error, f"Raised in the extension {innermost.name!r}.")


def _note_second(error: BaseException, second: Exception) -> None:
    """Adds a note about an error of an extension that came while another error ended the run."""
    name_extension(second)
    notes = " ".join(getattr(second, "__notes__", ()))
    _add_note(error, f"Then: {second!r}. {notes}".rstrip())


def _add_note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _wrong_result(event: Callable[..., object], found: object, wanted: str) -> str:
    """Returns the message for an event of an extension that returned a value of another kind."""
    return f"{event.__qualname__} returned {found!r}. It must return {wanted}."
