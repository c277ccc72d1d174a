"""Live control as an extension: commands of `trainwright ctl`, or of a journal, carried out between two steps.

A thread of the main process looks for messages, so no step reads a file. All processes carry a command out after the
same step: they agree about once a second, or after each step where there is one process. With each agreement the main
process announces the step of the next, so no process asks in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainwright._types import JSONObject, printable
from trainwright.callbacks.profiling import StepProfiler
from trainwright.capabilities.control.command import Command, parse_command
from trainwright.capabilities.control.inbox import Inbox
from trainwright.config.enums import word
from trainwright.engine.base import Engine
from trainwright.errors import ArgumentError
from trainwright.journal.record import live_journal, read
from trainwright.loop.extension import Extension, Run
from trainwright.optim.schedules import set_rate
from trainwright.support.door import parse_step

logger = logging.getLogger(__name__)

LOOKS_EVERY_S = 0.5  # for files
AGREES_EVERY_S = 1.0  # with several processes
MOST_STEPS = 10_000  # between two agreements
MOST_ORDERS = 8  # carried out after one step; the others wait
MOST_WAITING = 64  # received and not carried out; further messages stay files
ENDS_WITHIN_S = 10.0
LONGEST_NAME = 120
JOURNAL = "a journal"


class Callbacks(Protocol):
    """The callbacks of a run."""

    def add_callback(self, callback: Any) -> None: ...  # Any: an instance or a class
    def remove_callback(self, callback: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class SentCommand:
    """A command that has arrived, the sender by its own account, and the message to answer."""

    command: Command
    by: str
    number: str = ""  # "": from a journal


class LiveControl(Extension):
    """Carries out commands while a run trains, a few after each step, and writes each into the journal.

    Args:
        folder: output directory of the run.
        engine: of the run.
        args: of the run.
        callbacks: of the run; a profiler is added for `profile`.
        can_evaluate: there is evaluation data.
        repeats: journal of a run whose commands are repeated after the same steps, or None.
        clock: seconds.
    """

    name = "control"
    order = 90  # after extensions that look at the step

    def __init__(
        self,
        folder: str,
        engine: Engine,
        args: Any,  # arguments of transformers too
        *,
        callbacks: Callbacks,
        can_evaluate: bool,
        repeats: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._args = args
        self._callbacks = callbacks
        self._can_evaluate = can_evaluate
        self._repeats = repeats
        self._clock = clock
        self._inbox = Inbox(folder)
        self._arrived: deque[SentCommand] = deque()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._from_journal: Mapping[int, list[SentCommand]] = {}
        self._due: deque[SentCommand] = deque()  # of a journal, whose step is there
        self._next_step = 0  # step of the next agreement
        self._last = 0, 0.0  # step and time of the last one
        self._profiler: StepProfiler | None = None

    def begin(self, run: Run) -> None:
        """Starts looking for messages, in the main process; reads the journal with commands to repeat."""
        self._last = run.progress.state.global_step, self._clock()
        if self._repeats is not None:
            self._from_journal = self._engine.agree(self._read_journal)
        if not run.progress.state.is_world_process_zero:
            return
        try:
            self._inbox.open()
        except OSError as error:
            logger.warning("%s cannot hold messages (%s), so this run takes no commands.", self._inbox.folder, error)
            return
        self._thread = threading.Thread(target=self._look, name="trainwright-control", daemon=True)
        self._thread.start()

    def _read_journal(self) -> dict[int, list[SentCommand]]:
        """Returns the commands in a journal by step; ArgumentError if it cannot be read."""
        assert self._repeats is not None
        orders: dict[int, list[SentCommand]] = {}
        try:
            for entry in read(self._repeats).of("command"):
                if entry.get("refused") is None:
                    words = [entry["name"], *([] if entry["value"] is None else [entry["value"]])]
                    orders.setdefault(parse_step(entry["step"]), []).append(SentCommand(parse_command(words), JOURNAL))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"live_control={self._repeats!r} cannot be read as the journal of a run: {error} Name a run or its "
                "journal.jsonl, or pass True to take commands."
            ) from None
        return orders

    def _look(self) -> None:
        """Takes messages until the run ends; runs in a thread, which no error ends."""
        has_failed = False
        while not self._ends.wait(LOOKS_EVERY_S):
            try:
                self._receive()
            except BaseException as error:
                if not has_failed:
                    logger.warning("Commands to this run may be lost: %s: %s", type(error).__name__, error)
                has_failed = True

    def _receive(self) -> None:
        """Takes messages, as long as few wait to be carried out, and refuses those that are no commands."""
        for number, content in self._inbox.take(MOST_WAITING - len(self._arrived)):
            try:
                self._arrived.append(parse_order(content, number))
            except ArgumentError as error:
                self._inbox.answer(number, {"step": None, "refused": str(error)})

    def after_step(self, run: Run) -> None:
        """Carries out the commands received, if an agreement is due; all processes do so after the same step."""
        step = run.progress.state.global_step
        self._due.extend(self._from_journal.get(step, ()))
        for _ in range(min(len(self._due), MOST_ORDERS)):
            self._carry_out(self._due.popleft(), run)
        if step < self._next_step:
            return
        orders, num_steps = self._engine.agree(lambda: self._decide(step))
        self._next_step = step + num_steps
        for order in orders:
            self._carry_out(order, run)

    def _decide(self, step: int) -> tuple[list[SentCommand], int]:
        """Returns orders that have arrived, and the steps until the next agreement."""
        orders = [self._arrived.popleft() for _ in range(min(len(self._arrived), MOST_ORDERS))]
        if self._engine.num_processes == 1:
            return orders, 1
        before, began = self._last
        now = self._clock()
        self._last = step, now
        seconds_a_step = (now - began) / max(step - before, 1)
        return orders, max(1, min(MOST_STEPS, int(AGREES_EVERY_S / max(seconds_a_step, 1e-6))))

    def _carry_out(self, order: SentCommand, run: Run) -> None:
        step = run.progress.state.global_step
        refused: str | None = None
        try:
            ACTIONS[order.command.name](self, run, order.command.value or 0)
        except ArgumentError as error:
            refused = str(error)
        if not run.progress.state.is_world_process_zero:
            return
        if order.number:
            self._inbox.answer(order.number, {"step": step, "refused": refused})
        if (journal := live_journal(self._folder)) is not None:
            about = {"name": order.command.name, "value": order.command.value, "by": order.by, "refused": refused}
            journal.write("command", step=step, text=f"{order.command} by {order.by}", **about)
        outcome = "carried out" if refused is None else f"refused: {refused}"
        logger.warning("After step %d: %s by %s, %s.", step, order.command, order.by, outcome.rstrip("."))

    # -- the commands --------------------------------------------------------------------------------------------------

    def _save(self, run: Run, value: float) -> None:
        run.progress.control.should_save = True

    def _evaluate(self, run: Run, value: float) -> None:
        if not self._can_evaluate:
            raise ArgumentError("the run has no eval_dataset.")
        run.progress.control.should_evaluate = True

    def _stop(self, run: Run, value: float) -> None:
        """Ends the run in order after this step, with a checkpoint if the run writes any."""
        run.progress.control.should_training_stop = True
        if self._args.save_strategy != "no":
            run.progress.control.should_save = True

    def _change_rate(self, run: Run, value: float) -> None:
        set_rate(run.setup.optimizer, run.setup.scheduler, value)

    def _log_every(self, run: Run, value: float) -> None:
        if self._args.logging_strategy != "steps":
            raise ArgumentError(
                f"the run logs by logging_strategy={word(self._args.logging_strategy)!r}, not by steps."
            )
        run.progress.state.logging_steps = int(value)

    def _profile(self, run: Run, value: float) -> None:
        self._drop_profiler()
        progress = run.progress
        self._profiler = StepProfiler(self._folder, progress.state.global_step + 1, int(value))
        self._profiler.on_train_begin(self._args, progress.state, progress.control)
        self._callbacks.add_callback(self._profiler)

    def _drop_profiler(self) -> None:
        if self._profiler is not None:
            self._callbacks.remove_callback(self._profiler)
            self._profiler = None

    def close(self) -> None:
        """Ends the thread, and refuses commands that were received but not carried out."""
        self._drop_profiler()
        if self._thread is not None:
            self._ends.set()
            self._thread.join(ENDS_WITHIN_S)
            self._thread = None
            self._inbox.close()
            while self._arrived:
                self._inbox.answer(self._arrived.popleft().number, {"step": None, "refused": "the run has ended."})


# Functions of the class, not bound to an object: a table of bound methods in the object would be a cycle, which keeps
# the model until a garbage collection.
ACTIONS: Mapping[str, Callable[[LiveControl, Run, float], None]] = {
    "save": LiveControl._save,
    "evaluate": LiveControl._evaluate,
    "stop": LiveControl._stop,
    "lr": LiveControl._change_rate,
    "log": LiveControl._log_every,
    "profile": LiveControl._profile,
}


def parse_order(content: object, number: str) -> SentCommand:
    """Reads a message; ArgumentError if it is no command."""
    message: JSONObject = content if isinstance(content, dict) else {}
    words = message.get("words")
    by = message.get("by")
    if not isinstance(words, list) or not isinstance(by, str):
        raise ArgumentError("The message cannot be read. Write it with `trainwright ctl RUN COMMAND`.")
    return SentCommand(parse_command(words), printable(by[:LONGEST_NAME]), number)
