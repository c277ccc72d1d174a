"""CheckpointWriter: writes checkpoints before a save returns, or on a thread, one at a time; the space they need.

In the background: values that change while training continues are copied (`sink`), and a low-priority thread writes,
flushes and commits, outside the interpreter's lock. Its errors are raised the next time the run asks: at the next save,
or when training ends. If several processes write parts of one checkpoint, each has such a thread; the threads agree
among themselves, and an error in any is raised in all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright._types import is_instance_of
from trainwright.checkpoint.changes import ChangeWatch
from trainwright.checkpoint.deferred_io import IMMEDIATE, DeferredSink, FileSink, HostBuffers
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, CheckpointWriteError, NonFiniteWeightsError
from trainwright.support.tensor_tree import iterate_tensors, local_part, storage_place
from trainwright.support.units import size_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
NICENESS = 5  # priority of the writing thread, if the system supports thread priorities
ALMOST_FULL = 64 << 20  # free bytes below which an error without a number may come from a full disk
STATES_PER_WEIGHT = 2  # for Adam and similar optimizers; only an estimate, used before the first step


class Ranks(Protocol):
    """Collective operations that a save needs."""

    @property
    def num_processes(self) -> int: ...
    def agree(self, decide: Callable[[], str]) -> str: ...
    def gather_objects(self, value: T) -> Sequence[T]: ...
    def gather_objects_in_background(self, value: T) -> Sequence[T]: ...
    def barrier(self) -> None: ...


def _nothing() -> None:
    """Does nothing: the follow-up of a save that has none."""


class CheckpointWriter:
    """Writes the checkpoints of one trainer, one at a time."""

    def __init__(self, *, goes_on: bool = False) -> None:
        self.sink: FileSink = IMMEDIATE  # destination of the hooks' large files
        # step of the newest checkpoint on disk or being written; None before the first
        self.newest: int | None = None
        # Files of the current save with values that were tested as they were written (see `optimizer_check.Tested`).
        self.tested: dict[Path, str | None] = {}
        self.longest_s = 0.0  # longest time from the start of a save until its checkpoint was on disk, in seconds
        # Whether a failed write is only reported. An error while several processes fill a directory together ends the
        # run regardless: the others wait for the failed one.
        self._goes_on = goes_on
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._follow_ups: list[Callable[[bool], None]] | None = None  # for the pending write
        # watches checkpoints that user code may change, in a process that commits; None without such code
        self._watch: ChangeWatch | None = None
        self._committed: Callable[[], None] = _nothing  # called after that code has returned
        self._meet: Callable[[], None] | None = None  # waits until that code has returned in all processes
        self._lock = threading.Lock()

    def save(
        self,
        store: CheckpointStore,
        manifest: Manifest,
        *,
        ranks: Ranks,
        writes: bool,
        in_background: bool,
        check: Callable[[], None],
        write: Callable[[Path], None],
        after: Callable[[], None],
        may_be_changed: bool = False,
        committed: Callable[[], None] = _nothing,
    ) -> None:
        """Writes a checkpoint completely, or discards it. Every process must call it.

        The processes that commit (`writes`) have their own directory, others write into the main process's.
        `in_background` copies now and writes on a thread. `check` raises if there is no room; the main process calls it
        first. `write` writes the files into the given directory, large ones into `sink`; `after` is called when the
        checkpoint is on disk. If user code can see the checkpoint then (`may_be_changed`), the caller calls
        `accept_changes` after that code. `committed` is called once nothing changes the checkpoint any more, in the
        processes that commit. Raises CheckpointWriteError if this or the previous checkpoint cannot be written.
        """
        self.wait()
        begun = time.monotonic()
        before = self.newest
        self.newest = manifest.step
        later = DeferredSink(self._buffers, ranks.gather_objects)
        parted = False
        try:
            with failures_named(store.root):
                folder, own = _staging(store, manifest.step, ranks, check, writes=writes)
            everybodys = ranks.gather_objects((in_background, may_be_changed))
            in_background = all(wanted for wanted, _ in everybodys)
            is_seen = any(is_seen for _, is_seen in everybodys)
            if is_seen:
                self._meet = ranks.barrier
                self._watch = None if own is None else store.watch_for_changes(manifest.run_id)
                self._committed = committed
            self.sink = later if in_background else IMMEDIATE
            with self._collecting(), discard_on_failure(store, own):
                parted = ranks.num_processes > 1
                write(folder)
                ranks.barrier()  # overrides may have written on any process
                parted = False

            def finish() -> None:
                """Writes the copies and commits the directory of this process, if it has one."""
                all_agree = partial(fail_together, ranks) if later.is_shared else nullcontext
                with all_agree(), discard_on_failure(store, own):
                    with all_agree():
                        later.write()
                    if own is not None:
                        store.commit(own, manifest)
                if own is not None:
                    after()
                    if not is_seen:
                        committed()
                self.longest_s = max(self.longest_s, time.monotonic() - begun)

            if own is not None or later.is_shared:
                self._begin(finish) if in_background else finish()
        except BaseException as error:
            if not isinstance(error, NonFiniteWeightsError):  # all processes count that step as handled
                self.newest = before
            if parted:
                raise
            self._raise_or_report(error)

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._buffers.give_back()
            raise
        finally:
            self.sink = IMMEDIATE
            self._buffers.end_snapshot()

    def then(self, work: Callable[[bool], None]) -> None:
        """Calls `work` with the success of the pending write after it; immediately if none is pending.

        It is called before the next save begins, so the checkpoint exists while `work` runs.
        """
        with self._lock:
            if self._follow_ups is not None:
                self._follow_ups.append(work)
                return
        work(self._error is None and self.newest is not None)

    def _begin(self, work: Callable[[], None]) -> None:
        self._follow_ups = []

        def run() -> None:
            try:
                with contextlib.suppress(AttributeError, OSError):  # Linux has thread priorities
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
                work()
            except BaseException as error:
                self._error = error
            finally:
                self._buffers.give_back()
                self._follow_up()

        thread = threading.Thread(target=run, name="checkpoint-writer")  # not a daemon: python waits for its end
        try:
            thread.start()
        except RuntimeError as error:  # no memory for its stack
            logger.warning("Training pauses while a checkpoint is written: %s.", error)
            self._follow_ups = None
            work()
            return
        self._thread = thread

    def _follow_up(self) -> None:
        while True:
            with self._lock:
                if not self._follow_ups:
                    self._follow_ups = None
                    return
                following = self._follow_ups.pop(0)
            try:
                following(self._error is None)
            except Exception:
                logger.exception("A step after saving a checkpoint failed; the checkpoint itself is complete.")

    def accept_changes(self, *, with_others: bool = True) -> None:
        """Updates the manifest for files that user code changed since the last save; does nothing without such code.

        Every process must call it after that code: all wait for each other, unless others may have failed.
        """
        meet = self._meet
        watch = self._watch
        committed = self._committed
        self._committed = _nothing
        self._meet = self._watch = None
        if meet is not None and with_others:
            meet()
        if watch is None:
            return

        def settle(is_written: bool) -> None:
            watch.settle()
            if is_written:
                committed()

        self.then(settle)

    def wait(self) -> None:
        """Waits for the pending write; raises CheckpointWriteError if it failed."""
        self.accept_changes()
        self._join()

    def _join(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            self.newest = self.newest if isinstance(error, NonFiniteWeightsError) else None
            self._raise_or_report(error)

    def end(self) -> None:
        """Waits for the pending write, and frees the memory of the copies."""
        self.accept_changes()
        self._end()

    def _end(self) -> None:
        try:
            self._join()
        finally:
            self._buffers.drop()

    def end_after_failure(self) -> None:
        """Like `end`, while another error is being raised: an error of this writer is only logged."""
        try:
            self.accept_changes(with_others=False)
            self._end()
        except Exception as error:
            logger.error("%s", error)

    def _raise_or_report(self, error: BaseException) -> None:
        if isinstance(error, NonFiniteWeightsError):
            logger.error("%s", error)
            return
        if not (self._goes_on and isinstance(error, CheckpointWriteError)):
            raise error
        logger.error("%s Training continues (save_failure='continue').", error)


def _staging(
    store: CheckpointStore, step: int, ranks: Ranks, check: Callable[[], None], *, writes: bool
) -> tuple[Path, Path | None]:
    """Returns the directory to write into, and the same again if this process commits it."""
    of_main: list[Path] = []

    def begin() -> str:
        check()
        of_main.append(store.stage(step))
        return str(of_main[0])

    folder = Path(ranks.agree(begin))
    if not writes:
        return folder, None
    own = folder if of_main else store.stage(step)  # the first process of another node has its own disk
    return own, own


@contextmanager
def fail_together(ranks: Ranks) -> Iterator[None]:
    """Makes a failed write fail in all processes; processes without an error of their own raise CheckpointWriteError.

    Weights that are not finite are refused in all processes with the same error.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
    told = ranks.gather_objects_in_background(None if failure is None else (type(failure).__name__, str(failure)))
    failed = [(rank, *one) for rank, one in enumerate(told) if one is not None]
    if failed and failure is None:
        rank, kind, text = failed[0]
        if kind == NonFiniteWeightsError.__name__:  # a decision that is the same in all
            failure = NonFiniteWeightsError(text)
        else:
            text = f"A checkpoint could not be written by all processes; process {rank}: {kind}: {text}"
            failure = CheckpointWriteError(text)
    if failure is not None:
        failure.is_everybodys = True  # type: ignore[attr-defined]  # no process failed before the others
        raise failure


@contextmanager
def discard_on_failure(store: CheckpointStore, staging: Path | None) -> Iterator[None]:
    """Discards a staged checkpoint if the block fails."""
    try:
        with failures_named(store.root):
            yield
    except BaseException:
        if staging is not None:
            store.discard(staging)
        raise


@contextmanager
def failures_named(root: Path) -> Iterator[None]:
    """Turns a disk error into a CheckpointWriteError with its cause, its effect and advice."""
    try:
        yield
    except Exception as error:
        # from libraries in other languages
        words = ("PytorchStreamWriter", "inline_container", "iostream", "I/O error", "IoError")
        is_named = any(word in f"{type(error).__name__} {error}" for word in words)
        is_of_disk = isinstance(error, (OSError, MemoryError)) or is_named
        if isinstance(error, CheckpointError) or not is_of_disk:
            raise
        free = free_bytes(root)
        left = "" if free is None else f" ({size_text(free)} free there)"
        what = str(error) or type(error).__name__
        raise CheckpointWriteError(
            f"A checkpoint could not be written to {root}: {what}{left}. Earlier checkpoints are untouched. "
            f"{cure_write_error(error, free)}, or choose another output_dir and resume; save_failure='continue' "
            "continues without it."
        ) from error


def cure_write_error(error: Exception, free: int | None) -> str:
    """Returns what to do about an error in a write: make room only if the disk or a quota may be full."""
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "Free memory on this machine, save less (save_only_model=True)"
    is_said = any(text in str(error) for text in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)))
    may_be_full = number is None and (free is None or free < ALMOST_FULL)
    if is_said or may_be_full or number in (errno.ENOSPC, errno.EDQUOT):
        return "Make room, keep fewer (save_total_limit), save less (save_only_model=True)"
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "Find out what removes or replaces that directory while the run writes to it"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Give this process the right to write there"
    return "Find out why the disk refuses it"


# -- space on the disk -------------------------------------------------------------------------------------------------


def weights_bytes(model: nn.Module) -> int:
    """Returns the minimum size of the weights in bytes; for an adapter, that of its trained weights."""
    if is_instance_of(model, "peft", "PeftModel"):
        return _distinct_bytes([p for p in model.parameters() if p.requires_grad])
    return _distinct_bytes([*model.parameters(), *model.buffers()])


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Returns the current size of an optimizer's states in bytes; small before its first step."""
    return _distinct_bytes(list(iterate_tensors(list(getattr(optimizer, "state", {}).values()))))


def estimated_optimizer_bytes(model: nn.Module) -> int:
    """Estimates the size of an optimizer's states after its first step, in bytes."""
    return STATES_PER_WEIGHT * _distinct_bytes([p for p in model.parameters() if p.requires_grad])


def _distinct_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of tensors in this process, counting shared memory once, and of a DTensor only its part.

    A parameter of a lazy module that has not run yet has no size, and does not count.
    """
    parts = [local_part(tensor) for tensor in tensors if not is_lazy(tensor)]
    return sum({storage_place(part): part.numel() * part.element_size() for part in parts}.values())


def check_free_space(root: Path, needed: int, *, what: str) -> None:
    """Raises CheckpointWriteError if the disk of `root`, which need not exist, has too little free space."""
    free = free_bytes(root)
    if free is not None and free < needed:
        raise CheckpointWriteError(shortage_message(root, needed, free, what=what))


def shortage_message(root: Path, needed: int, free: int, *, what: str) -> str:
    """Returns the message for a full disk, with advice."""
    return (
        f"{what} needs at least {size_text(needed)}, but {size_text(free)} are free at {root}. Make room, choose "
        "another output_dir, save less (save_only_model=True), or keep fewer checkpoints (save_total_limit)."
    )


def free_bytes(root: Path) -> int | None:
    """Returns the free bytes on the disk of a directory, which need not exist; None if unknown."""
    there = next((path for path in (root, *root.absolute().parents) if path.is_dir()), None)
    try:
        return None if there is None else shutil.disk_usage(there).free
    except OSError:
        return None
