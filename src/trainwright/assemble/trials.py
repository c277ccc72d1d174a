"""What a trial of a search leaves and finds: its directory, its name, the states of callbacks, freed memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from trainwright.assemble.watching import show_lines
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.preemption import SlurmRequeue
from trainwright.callbacks.progress import PrinterCallback, ProgressCallback
from trainwright.callbacks.time_limits import TimeLimits
from trainwright.checkpoint.store import CheckpointStore
from trainwright.engine.base import Engine
from trainwright.errors import CheckpointNotFoundError
from trainwright.search import search_record
from trainwright.search.backends import drawn
from trainwright.search.base import BestRun, SearchPlan, SearchState, TrialSpec, values_of
from trainwright.search.search_record import SearchRecord, TrialRecord
from trainwright.search.trial_runner import MODEL_FOLDER
from trainwright.state.exportable_state import collect_states
from trainwright.trackers.base import TrackerCallback
from trainwright.trackers.registry import get_reporting_integration_callbacks

# What a trainer makes of its parts in each process: handles of devices, locks, threads, the model.
OF_A_PROCESS = frozenset(
    """
    _engine accelerator gather_function callback_handler _journal _writer _run _memory_tracker _session _loader
    _data_wait model model_wrapped optimizer lr_scheduler _eval_dataloaders _flos_model _search args _trial
    """.split()  # noqa: SIM905 -- a line for each name would hide the file
)
MADE_ANEW = (DefaultFlowCallback, ProgressCallback, PrinterCallback, TimeLimits, SlurmRequeue)


def trial_folder(output_dir: str, offer: TrialSpec, trial: Any, *, hp_name: Callable[[Any], str] | None) -> str:
    """Where a trial writes: `run-<id>` in the output directory, or the name that `hp_name` gives it."""
    return os.path.join(output_dir, f"run-{offer.id}" if hp_name is None else str(hp_name(trial)))


def name_and_params(
    trial: Any, search: SearchState | None, *, hp_name: Callable[[Any], str] | None
) -> tuple[str | None, dict[str, Any] | None]:
    """What the record of a run says of its trial."""
    if trial is None:
        return None, None
    given = None if search is None else search.offer.name
    return (given if hp_name is None else hp_name(trial)), drawn(trial)


def states_of(callbacks: list[Any]) -> dict[str, Any]:
    """The states of callbacks, as they are now and stay whatever becomes of them."""
    return copy.deepcopy(collect_states(callbacks))


def forget_run(trainer_parts: dict[str, Any], handler: Any, engine: Engine) -> None:
    """Lets go of all that holds a model, an optimizer or batches, and gives their memory back."""
    for name in ("model", "model_wrapped", "optimizer", "lr_scheduler", "_loader", "_plan", "_past", "_flos_model"):
        trainer_parts[name] = None
    trainer_parts["_eval_dataloaders"] = {}
    trainer_parts.pop("_session", None)
    for name in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
        setattr(handler, name, None)
    engine.accelerator.free_memory()
    gc.collect()
    engine.empty_cache()
    _trim()


def _trim() -> None:
    """Gives the system back what the allocator keeps of freed tensors, where it can be asked to (glibc).

    It would keep pieces of every trial's.
    """
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def delete_checkpoints(folder: str, run_id: str) -> None:
    """Deletes what a run saved."""
    store = CheckpointStore(folder)
    for step in store.owned_by(run_id):
        store.remove(step)


def tell_best(args: Any, plan: SearchPlan, best: BestRun | list[BestRun]) -> None:
    """Shows the best trials of a search, as tables."""
    for one in best if isinstance(best, list) else [best]:
        entry = TrialRecord(one.run_id, search_record.FINISHED, one.hyperparameters, values_of(one.objective))
        show_lines(args, search_record.table(entry, plan.directions))


@contextmanager
def also_tracked_by(handler: CallbackHandler, name: str | None) -> Iterator[None]:
    """With one tracker more than the arguments name, if it is not among the callbacks already."""
    kind = None if name is None else get_reporting_integration_callbacks(name)[0]
    if kind is None or any(isinstance(callback, kind) for callback in handler.callbacks):
        yield
        return
    handler.add_callback(kind)
    try:
        yield
    finally:
        handler.pop_callback(kind)


def packed(parts: dict[str, Any], callbacks: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """What of a trainer goes to another process: what the user brought. Paths hold there too."""
    own = {name: value for name, value in parts.items() if name not in OF_A_PROCESS}
    search: SearchState = parts["_search"]
    args = copy.copy(search.args)
    args.output_dir = os.path.abspath(args.output_dir)
    own["args"] = args
    own["_search"] = replace(search, args=args, plan=replace(search.plan, options={}))
    trackers = get_reporting_integration_callbacks(args.report_to)
    users = [one for one in callbacks if not isinstance(one, MADE_ANEW)]
    return own, [type(one) if isinstance(one, TrackerCallback) else one for one in users if type(one) not in trackers]


def best_folder(output_dir: str, trial_id: str) -> str:
    """Where the model of a trial lies.

    Raises:
        CheckpointNotFoundError: it was trained before its model was wanted.
    """
    found = [one.folder for one in SearchRecord.read(output_dir).trials if one.id == trial_id]
    folder = os.path.join(found[0] if found else f"run-{trial_id}", MODEL_FOLDER)
    if not os.path.isdir(folder):
        raise CheckpointNotFoundError(
            f"load_best_trial=True: the model of trial {trial_id} is not in {folder}. An earlier start of this search "
            "trained it without load_best_trial; train it again with its parameters."
        )
    return folder
