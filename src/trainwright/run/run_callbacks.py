"""The callbacks of a trainer and of a run: the user's, and those that the arguments ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import TimeLimits
from trainwright.capability_table import load_service
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.config import resolve
from trainwright.config.coerce import WARM_UP
from trainwright.engine.base import Engine
from trainwright.support.host import in_notebook
from trainwright.support.model_facts import num_bytes
from trainwright.support.replaced import current

if TYPE_CHECKING:
    from trainwright.callbacks.preemption import JITCheckpointCallback

WITH_OPTIMIZER = 3  # times the weights: Adam has two moments
SLOW_DISK = 100e6  # bytes per second assumed for a save until one has been measured


def make_callbacks(
    args: Any, callbacks: Iterable[Any] | None, *, engine: Engine, writer: CheckpointWriter, **context: Any
) -> CallbackHandler:
    """Returns the handler: flow control, trackers, the user's callbacks, callbacks of the arguments, progress bars.

    Saving on request (`enable_jit_checkpoint`) comes before the user's callbacks, as in transformers.
    """
    trackers: list[type[Any]] = []
    find_trackers: Any = current("get_reporting_integration_callbacks", None)
    if find_trackers is None and args.report_to not in ([], None):
        find_trackers = load_service("trackers").get_reporting_integration_callbacks
    if find_trackers is not None:
        trackers += find_trackers(args.report_to)
    from trainwright.callbacks import progress

    default = current("DEFAULT_CALLBACKS", progress.DEFAULT_CALLBACKS)
    make_handler = current("CallbackHandler", CallbackHandler)
    given = list(callbacks or ())
    handler = make_handler([*default, *trackers, *_jit_callbacks(args, given), *given], **context)
    handler.args = args
    if (limits := time_limits(args, context["model"], engine=engine, writer=writer)) is not None:
        handler.add_callback(limits)
    if resolve.checkpoint(args).requeues:
        from trainwright.callbacks.preemption import SlurmRequeue

        handler.add_callback(SlurmRequeue)
    if args.disable_tqdm:
        handler.add_callback(current("PrinterCallback", progress.PrinterCallback))
        return handler
    bar: Any = current("DEFAULT_PROGRESS_CALLBACK", progress.DEFAULT_PROGRESS_CALLBACK)
    if bar is progress.ProgressCallback and in_notebook():
        from trainwright.callbacks.notebook import NotebookProgressCallback

        bar = NotebookProgressCallback
    handler.add_callback(bar)
    return handler


def _jit_callbacks(args: Any, given: list[Any]) -> list[Any]:
    """Returns the callback that saves on request if the arguments ask for it and the user has given none."""
    if not args.enable_jit_checkpoint:
        return []
    from trainwright.callbacks.preemption import JITCheckpointCallback

    kinds = [callback if isinstance(callback, type) else type(callback) for callback in given]
    is_given = any(issubclass(kind, JITCheckpointCallback) for kind in kinds)
    return [] if is_given else [JITCheckpointCallback]


def untied_jit_callbacks(handler: CallbackHandler) -> list[JITCheckpointCallback]:
    """Returns the callbacks that save on request and are not yet tied to a trainer."""
    from trainwright.callbacks.preemption import JITCheckpointCallback

    found = [callback for callback in handler.callbacks if isinstance(callback, JITCheckpointCallback)]
    return [callback for callback in found if callback.trainer is None]


def time_limits(args: Any, model: Any, *, engine: Engine, writer: CheckpointWriter) -> TimeLimits | None:
    """Returns the callback that saves and ends by the clock; None if the arguments do not ask for it."""
    plan = resolve.checkpoint(args)
    if plan.max_train_s is None and plan.save_every_s is None:
        return None
    first_s = num_bytes(model) * WITH_OPTIMIZER / SLOW_DISK
    return TimeLimits(
        plan.max_train_s, plan.save_every_s, save_s=lambda: writer.longest_s, first_save_s=first_s, agree=engine.agree
    )


@contextmanager
def run_callbacks(handler: CallbackHandler, args: Any, folder: str) -> Iterator[None]:
    """Wraps a run: adds the callbacks that its arguments ask for, for this run only."""
    if (traced := resolve.profiled(args)) is None:
        yield
        return
    from trainwright.callbacks.profiling import StepProfiler

    profiler = StepProfiler(folder, traced.first, traced.num, warm_up=WARM_UP)
    handler.add_callback(profiler)
    try:
        yield
    finally:
        handler.remove_callback(profiler)
