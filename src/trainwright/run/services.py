"""Services of a trainer in this process, and what stands in for an uploader and a search that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config.fields import get_value
from trainwright.distributed.device import DeviceMemory
from trainwright.engine.base import Engine
from trainwright.journal.record import JournalListener
from trainwright.run.adoption import Adoption
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.progress import Clock
from trainwright.support.replaced import current


@dataclass(kw_only=True)
class Services:
    """Objects of a trainer in this process besides the user's objects; another process, or a copy, makes its own."""

    writer: CheckpointWriter  # writes checkpoints, one at a time
    memory_tracker: TrainerMemoryTracker
    journal: JournalListener = field(default_factory=lambda: JournalListener(Clock()))
    uploads: Uploads = field(default_factory=lambda: NoUploads())  # an uploader once a repository is open
    eval_dataloaders: dict[str, Any] = field(default_factory=dict)  # by the name of the set, if workers are kept
    # `is_<backend>_enabled` and a backend's own engine, as read from the trainer by other code
    flags: SimpleNamespace = field(default_factory=SimpleNamespace)
    adoption: Adoption = field(default_factory=Adoption)  # the model that the trainer has taken over
    engine: Engine = field(init=False)  # the backend; replaced by `use_engine`
    # gathers a value from all processes; may be replaced
    gather_function: Callable[[Any], Any] = field(init=False)
    callback_handler: CallbackHandler = field(init=False)  # receives the events

    @classmethod
    def for_arguments(cls, args: Any, *, measures_memory: bool = True) -> Services:
        writer = CheckpointWriter(goes_on=get_value(args, "save_failure") == "continue")
        skips = args.skip_memory_metrics or not measures_memory
        tracker = current("TrainerMemoryTracker", TrainerMemoryTracker)
        return cls(writer=writer, memory_tracker=tracker(skips, DeviceMemory()))

    def use_engine(self, engine: Engine) -> None:
        self.engine = engine
        self.gather_function = engine.gather
        self.read_flags()

    def read_flags(self) -> None:
        """Asks the engine which backend it is; it may know more once it is set up."""
        vars(self.flags).update(self.engine.published_flags())

    def use_callbacks(self, handler: CallbackHandler, clock: Clock) -> None:
        """Sends to the journal everything that the callbacks receive."""
        self.callback_handler = handler
        handler.watch(self.journal)
        self.use_clock(clock)

    def use_clock(self, clock: Clock) -> None:
        """Lets the clock of a run time its callbacks and its journal."""
        self.callback_handler.clock = self.journal.clock = clock


class Uploads(Protocol):
    """Uploads to the Hub, as a run and its trainer use them."""

    @property
    def in_progress(self) -> object:
        """Uploads of the last checkpoint; None before the first."""

    def take_up(self) -> None:
        """Sends what earlier trainings in this directory have left."""

    def abandon_after(self, error: BaseException) -> None:
        """Lets the process end without waiting if a signal ended a training."""

    def push_checkpoint(self, checkpoint: Path, *args: Any, **kwargs: Any) -> None:
        """Uploads a checkpoint."""

    def finish(self, *, unless: Callable[[], bool]) -> None:
        """Waits for uploads and makes up for failed ones; at once when `unless` says so."""


class NoUploads:
    """Stands in for the uploader until a repository is opened, and in all processes but the first."""

    def __init__(self) -> None:
        self.in_progress: object = None

    def take_up(self) -> None:
        """Does nothing, like the other methods."""

    def abandon_after(self, error: BaseException) -> None: ...

    def push_checkpoint(self, checkpoint: Path, *args: object, **kwargs: object) -> None: ...

    def finish(self, *, unless: Callable[[], bool]) -> None: ...


class NoSearch:
    """Stands in for `search.base.SearchState` while no hyperparameter search is running."""

    is_under_way = False

    def __init__(self) -> None:
        # Published by the trainer, where other code may delete it.
        self.name: object = None
        self.space: object = None
        self.hp_name: object = None
        self.compute_objective: object = None
        self.objective: object = None
