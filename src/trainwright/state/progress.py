"""Progress: counts of a run, and the clock of its phases. The objects of a run are in its setup."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from trainwright.state.evaluation_parts import EvaluationParts
from trainwright.state.interrupts import Interrupts
from trainwright.state.meter import LossMeter
from trainwright.state.recorded_metrics import RecordedMetrics
from trainwright.state.trainer_state import TrainerControl, TrainerState

DATA = "data"  # waiting for the loader
WAITING = "waiting"  # for the other processes, which count the labels of the same window
HOST_TO_DEVICE = "host_to_device"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"  # clipping, the step, the schedule
LOGGING = "logging"
EVALUATION = "evaluation"
SAVING = "saving"
INCIDENTS = "incidents"  # writing bundles of bad steps
CALLBACKS = "callbacks"  # `callbacks.<class>`: each class of callbacks by name
OTHER = "other"  # the loop itself, and the time before the first and after the last step


class Clock:
    """Counts the seconds between two marks for the phase that was marked first, so the phases add up to the wall time.

    A mark is one function call and one reading of the time. On an accelerator the host's time is measured: asynchronous
    work counts in the phase in which the loop first reads a number back.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Clears all seconds, for a new run."""
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, up to the last mark
        self.phase = OTHER  # the current one
        self._since = perf_counter()

    def mark(self, phase: str) -> str:
        """Begins a phase; returns the one before, which a nested piece of work marks again at its end."""
        now = perf_counter()
        before = self.phase
        self.seconds[before] += now - self._since
        self.phase = phase
        self._since = now
        return before

    def read(self) -> dict[str, float]:
        """Returns the seconds by phase until now."""
        self.mark(self.phase)
        return dict(self.seconds)


@dataclass(slots=True)
class Beginning:
    """What a run had reached when this `train()` started: nothing, unless it was resumed."""

    step: int = 0
    tokens: int = 0
    flos: float = 0.0
    time: float = field(default_factory=time.time)


@dataclass(slots=True)
class WindowProgress:
    """The window of micro-batches of a step, as the loop keeps it.

    Attributes:
        start: state to repeat the window from; None between windows.
        current: micro-batches of the current step, or the last one.
        is_trained: it is the last step's.
        part: the current micro-batch, or a part of one.
        share: the current micro-batch's share of the samples of its window.
        part_of_micro_batch: below 1 for a part of a micro-batch that was cut because it did not fit.
        num_parts: parts into which every micro-batch is cut since one did not fit.
    """

    start: Any = None
    current: Any = None
    is_trained: bool = False
    part: Any = None
    share: float = 1.0
    part_of_micro_batch: float = 1.0
    num_parts: int = 1


@dataclass(slots=True)
class KnownGroups:
    """The optimizer's groups of parameters that the schedule knows: how many, and the last of them."""

    num: int = 0
    last: dict[str, Any] | None = None


@dataclass(slots=True)
class Warned:
    """What warnings have named: metrics that cannot be written down, entries of batches that may be labels."""

    metrics: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)


class Progress:
    """State, flags, loss and clock of a run."""

    def __init__(self, state: TrainerState, control: TrainerControl) -> None:
        self.state = state  # the record that checkpoints store
        self.control = control  # the flags; replaced when a callback returns another object
        self.meter = LossMeter("cpu")  # the running loss since the last log
        self.recorded = RecordedMetrics()  # numbers of `Trainer.record` since the last log; an evaluation has its own
        self.is_apart = False  # what is computed now does not count as training: an evaluation, or a trial of the loss
        self._collect: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.evaluation = EvaluationParts()  # of the evaluation under way
        self.interrupts = Interrupts()
        self.clock = Clock()  # seconds by phase
        self.total_loss = 0.0  # sum of the losses already read back in this `train()`
        self.step_last_logged = 0  # optimizer step of the last log
        self.beginning = Beginning()
        self.window = WindowProgress()
        self.groups = KnownGroups()
        self.warned = Warned()
        self.flos: float = 0  # floating-point operations not yet stored in `state`
        self.tokens: torch.Tensor | int = 0  # input tokens not yet stored in `state`, a device scalar once counted
        self.is_updating = False  # the weights are neither the last step's nor the next one's
        self.saved_step: int | None = None  # optimizer step of the last checkpoint
        self.epoch = 0  # the epoch that is being trained, from 0
        self.more_epochs = 0  # in addition to the plan, since epochs are shorter than it says
        self.batches_in_epoch = 0  # its trained micro-batches; a resume counts the skipped ones

    def begin(
        self,
        *,
        device: torch.device,
        skip_non_finite: bool,
        collect: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Begins a run with an empty meter, at the step of `state`, which a resume may have set.

        Losses are on `device`; NaN and infinite losses are not in the logged mean with `skip_non_finite`. `collect`
        stacks a tensor of each process; None for a single process.
        """
        self.meter = LossMeter(device, skip_non_finite=skip_non_finite, collect=collect)
        self.recorded = RecordedMetrics(device)
        self._collect = collect
        self.total_loss = 0.0
        self.saved_step = self.state.global_step or None  # a resume starts from a checkpoint, a fresh run from none
        self.is_updating = False
        self.window.start = None
        self.window.current = None
        self.step_last_logged = self.beginning.step = self.state.global_step
        self.beginning.tokens = self.state.num_input_tokens_seen
        self.beginning.flos = self.state.total_flos
        self.clock.restart()
        self.beginning.time = time.time()

    def begin_epoch(self, epoch: int, *, batches_done: int) -> None:
        """Begins an epoch, counted from 0, of which a resume skips some micro-batches."""
        self.epoch = epoch
        self.batches_in_epoch = batches_done

    def advance(self, epoch: float, *, num_batches: int) -> None:
        """Counts an optimizer step; `epoch` is the epochs done, with the share of the current one."""
        self.batches_in_epoch += num_batches
        self.state.global_step += 1
        self.is_updating = False
        self.window.start = None
        self.window.is_trained = True
        self.state.epoch = epoch
        self.meter.end_step()

    def settle(self, shared: Sequence[float] = ()) -> list[list[float]]:
        """Adds the counted operations and tokens of all processes to the record. All processes call it together.

        Returns the numbers `shared`, as many in each process, of all of them by rank; none for a single process.
        """
        counted = [float(self.flos), float(self.tokens)]
        of_all: list[list[float]] = []
        if self._collect is not None:
            rows = self._collect(torch.tensor([*counted, self.recorded.num_bytes(), *shared], dtype=torch.float64))
            *counted, num_bytes = torch.cat([rows[:, :2].sum(dim=0), rows[:, 2:3].amax(dim=0)]).tolist()
            self.recorded.agreed_bytes = int(num_bytes)
            of_all = rows[:, 3:].tolist() if shared else []
        flos, tokens = counted
        self.state.total_flos += flos
        self.state.num_input_tokens_seen += int(tokens)
        self.flos = self.tokens = 0
        return of_all

    @property
    def has_others(self) -> bool:
        """Returns True if other processes train other samples."""
        return self._collect is not None

    def settle_tokens(self) -> None:
        """Adds the counted tokens to the record, if this is the only process; several use `settle`."""
        if self._collect is None:
            self.state.num_input_tokens_seen += int(self.tokens)
            self.tokens = 0

    @property
    def step_under_way(self) -> int:
        """Optimizer step under way, from 1; 0 between two steps."""
        return 0 if self.window.current is None or self.window.is_trained else self.state.global_step + 1

    def drain_loss(self) -> tuple[float, int]:
        """Returns the mean loss per step since the last log, and how many losses were not finite.

        Recorded numbers are read with it. All processes call it together.
        """
        reading = self.meter.drain(self.recorded)
        num_steps = self.state.global_step - self.step_last_logged
        self.total_loss += reading.total
        self.step_last_logged = self.state.global_step
        return reading.total / max(num_steps, 1), reading.num_non_finite

    @contextmanager
    def recording_apart(self, device: torch.device) -> Iterator[None]:
        """Within the context, numbers are recorded apart from training, and forward passes do not count as its own."""
        before = self.recorded, self.is_apart
        self.recorded = RecordedMetrics(device)
        self.is_apart = True
        try:
            yield
        finally:
            self.recorded, self.is_apart = before

    @contextmanager
    def evaluating_all_parts(self) -> Iterator[None]:
        """Context of an evaluation with all its parts: it stays due until the context ends without an error."""
        self.evaluation.open(self.control)
        try:
            yield
        except BaseException:
            self.control.should_evaluate = True  # `on_evaluate` of the first part has cleared it
            raise
        self.evaluation.close()

    def recorded_state(self, *, keeps: bool) -> dict[str, Any]:
        """Returns the numbers recorded since the last log, for a checkpoint; all processes call it, after `settle`.

        From then on the process with `keeps` has the totals of all.
        """
        recorded = self.recorded
        recorded.read_with(torch.zeros(()))
        if self._collect is not None and recorded.agreed_bytes:
            messages = self._collect(recorded.message())
            if keeps:
                recorded.receive(messages)
        return recorded.state()

    def listening(self, *, grace_s: float) -> AbstractContextManager[None]:
        """Context in which signals end this run in order; others than the first do not end it at once for `grace_s`."""

        def lost() -> str:
            step = self.state.global_step
            saved = self.saved_step or 0
            return f"it is at step {step}, and {f'step {saved} is' if saved else 'none is'} saved"

        return self.interrupts.listening(grace_s=grace_s, lost=lost)

    @property
    def is_interrupted(self) -> bool:
        """Returns True if a signal ends the run."""
        return self.interrupts.received is not None

    @property
    def should_stop(self) -> bool:
        """Returns True if the current epoch ends after this step."""
        return self.control.should_training_stop or self.control.should_epoch_stop
