"""What a trial of a search leaves and finds: its directory, its name, the states of callbacks, freed memory."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

from trainwright.assemble.watching import show_lines
from trainwright.checkpoint.store import CheckpointStore
from trainwright.engine.base import Engine
from trainwright.errors import CheckpointNotFoundError
from trainwright.search import record
from trainwright.search.attempts import MODEL_FOLDER
from trainwright.search.base import Offer, Plan, Searching
from trainwright.search.record import SearchRecord
from trainwright.search.table import drawn
from trainwright.state.exportable import collect_states


def trial_folder(output_dir: str, offer: Offer, trial: Any, *, hp_name: Callable[[Any], str] | None) -> str:
    """Where a trial writes: `run-<id>` in the output directory, or the name that `hp_name` gives it."""
    return os.path.join(output_dir, f"run-{offer.id}" if hp_name is None else str(hp_name(trial)))


def name_and_params(
    trial: Any, search: Searching | None, *, hp_name: Callable[[Any], str] | None
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


def delete_checkpoints(folder: str, run_id: str) -> None:
    """Deletes what a run saved."""
    store = CheckpointStore(folder)
    for step in store.owned_by(run_id):
        store.remove(step)


def tell_best(args: Any, plan: Plan) -> None:
    """Shows the best trials of a search, as tables."""
    found = SearchRecord.read(args.output_dir)
    for trial in found.best():
        show_lines(args, record.table(trial, plan.directions))


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
