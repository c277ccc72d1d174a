"""The trials of a search: each one that a backend requests is a `train()` with its own Run."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainwright._types import Trial
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config.coerce import output_path
from trainwright.config.overrides import with_overrides
from trainwright.errors import CheckpointNotFoundError
from trainwright.run import train
from trainwright.run.console import show_lines
from trainwright.run.internals import Internals
from trainwright.run.resume import find_checkpoint, restore_callbacks
from trainwright.run.run import Run
from trainwright.run.services import NoSearch
from trainwright.search import base, search_record
from trainwright.search.base import BestRun, SearchState, TrainerHandle, TrialResult, TrialSpec, select_backend
from trainwright.search.search_record import MODEL_FOLDER, SearchRecord, TrialRecord
from trainwright.state.trainer_state import collect_states
from trainwright.support.replaced import current
from trainwright.trackers.registry import get_reporting_integration_callbacks

# `trainer: Any` throughout: any Trainer, or a subclass of the user's, which trains all trials of its search.


def search(
    trainer: Any,
    *,
    space: Any,
    compute_objective: Any,
    num_trials: int,
    direction: Any,
    backend: Any,
    hp_name: Any,
    options: Mapping[str, Any],
) -> BestRun | list[BestRun]:
    """Runs all trials of a search; see `Trainer.hyperparameter_search`."""
    name, chosen = select_backend(backend)
    base.check_trainer_objects(
        model_init=trainer.model_init, train_dataset=trainer.train_dataset, eval_dataset=trainer.eval_dataset
    )
    if space is None:
        from transformers import trainer_utils  # slow to import

        space = getattr(trainer_utils, f"default_hp_space_{chosen.name}")
    plan = base.make_plan(
        space=space, num_trials=num_trials, direction=direction, compute_objective=compute_objective, options=options
    )
    chosen.check(make_trainer_handle(trainer), plan)
    internals = Internals(trainer)
    running = SearchState(
        backend=chosen,
        plan=plan,
        args=trainer.args,
        callback_states=copy.deepcopy(
            collect_states([one for one in internals.stateful() if one is not trainer.control])
        ),
        name=name,
        space=space,
        hp_name=hp_name,
        compute_objective=compute_objective or current("default_compute_objective", base.default_compute_objective),
    )
    internals.search = running
    handler = trainer.callback_handler
    kinds = [] if chosen.tracker is None else get_reporting_integration_callbacks(chosen.tracker)
    added = [kind for kind in kinds if not any(isinstance(callback, kind) for callback in handler.callbacks)]
    try:
        for kind in added:
            handler.add_callback(kind)
        best = chosen.run(make_trainer_handle(trainer), plan)
        for one in best if isinstance(best, list) else [best]:
            entry = TrialRecord(one.run_id, search_record.FINISHED, one.hyperparameters, base.to_list(one.objective))
            show_lines(trainer.args, search_record.table(entry, plan.directions))
    finally:  # the trainer is as it was made, with a new model
        for kind in added:
            handler.pop_callback(kind)
        restore_callbacks(running.callback_states, handler.callbacks, with_settings=True)
        use_arguments(trainer, running.args)
        train.renew_model(trainer, None)
        internals.search = NoSearch()
    if plan.settings.load_best_trial:
        _load_best_trial(trainer, chosen.frozen, best)
    return best


def make_trainer_handle(trainer: Any) -> TrainerHandle:
    """Facts that the backend may ask for."""
    args = trainer.args
    output_dir = output_path(trainer.args)
    return TrainerHandle(
        args=args,
        is_main=trainer.is_world_process_zero(),
        num_processes=Internals(trainer).engine.num_processes,
        run=partial(run_trial, trainer),
        check=lambda params: with_overrides(Internals(trainer).search.args, params),
        folder_of=lambda offer, trial: trial_folder(output_dir, offer, trial, hp_name=trainer.hp_name),
        find_checkpoint=_newest_in,
        agree=lambda decide: Internals(trainer).engine.agree(decide),
        pack=partial(_packed, trainer),
    )


def _newest_in(folder: str) -> str | None:
    """Returns the path of the newest complete checkpoint of a trial, or None if there is none."""
    found = find_checkpoint("auto", folder)
    return None if found is None else str(found)


# -- a trial ----------------------------------------------------------------------------------------------------------


def run_trial(trainer: Any, offer: TrialSpec, trial: Trial) -> TrialResult:
    """Trains, evaluates if training did not, and frees the resources."""
    search: SearchState = Internals(trainer).search
    search.offer = offer
    search.outcome = TrialResult()
    search.objective = None
    restore_callbacks(search.callback_states, trainer.callback_handler.callbacks, with_settings=True)
    try:
        search.outcome.folder = trainer._get_output_dir(trial)
        trainer.train(resume_from_checkpoint=offer.checkpoint, trial=trial)
        if search.objective is None:
            _hear(trainer, trainer.evaluate())
        _keep(trainer, search)
        return search.outcome
    finally:
        Internals(trainer).services.writer.end_after_failure()
        use_arguments(trainer, search.args)  # the engine of the trial holds its optimizer
        release(trainer)


def make_trial_arguments(search: SearchState) -> Any:
    """Returns the given arguments with the values of the current trial."""
    args = with_overrides(search.args, {**search.offer.params})
    args.resume_from_checkpoint = None  # the script's setting does not apply to trials
    return args


def use_arguments(trainer: Any, args: Any) -> None:
    """Sets the arguments, and an engine to match."""
    trainer.args = trainer.callback_handler.args = args
    trainer._train_batch_size = args.train_batch_size
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.create_accelerator_and_postprocess()


def release(trainer: Any) -> None:
    """Releases everything that holds a model, an optimizer or batches, and frees their memory."""
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    internals = Internals(trainer)
    internals.run = Run.after(internals.run, trainer.args)
    handler = trainer.callback_handler
    handler.model = handler.optimizer = handler.lr_scheduler = handler.train_dataloader = handler.eval_dataloader = None
    internals.services.eval_dataloaders.clear()
    internals.engine.accelerator.free_memory()
    gc.collect()
    internals.engine.empty_cache()


def report(trainer: Any, trial: Trial, metrics: dict[str, float]) -> None:
    """Reports an evaluation to the backend; a pruned trial stops training after this step."""
    _hear(trainer, metrics)
    internals = Internals(trainer)
    search = internals.search
    control = trainer.control
    search.outcome.was_heard = True
    save = trainer._tune_save_checkpoint if control.should_save else None
    if internals.engine.agree(lambda: search.backend.report(trial, search.outcome, save)):
        search.outcome.was_pruned = control.should_training_stop = True
        control.should_save |= search.plan.settings.pruned_checkpoints == "save"


def _hear(trainer: Any, metrics: dict[str, float]) -> None:
    search = Internals(trainer).search
    outcome = search.outcome
    outcome.metrics = dict(metrics)
    search.objective = base.checked_objective(search.compute_objective, dict(metrics), search.plan)
    outcome.objective = search.objective
    outcome.curve.append((trainer.state.global_step, search.objective))


def _keep(trainer: Any, search: SearchState) -> None:
    """Returns the files of a trial on disk besides its checkpoints."""
    settings = search.plan.settings
    outcome = search.outcome
    if settings.load_best_trial and not outcome.was_pruned:
        trainer.save_model(str(Path(outcome.folder) / MODEL_FOLDER), _internal_call=True)
    if settings.pruned_checkpoints == "delete" and outcome.was_pruned and trainer.args.should_save:
        store = CheckpointStore(outcome.folder)
        for step in store.owned_by(Internals(trainer).run.run_id):
            store.remove(step)


def trial_folder(output_dir: str, offer: TrialSpec, trial: Trial, *, hp_name: Callable[[Any], str] | None) -> str:
    """Returns the directory of a trial: `run-<id>` in the output directory, or the name given by `hp_name`."""
    return os.path.join(output_dir, f"run-{offer.id}" if hp_name is None else str(hp_name(trial)))


def name_and_params(trial: Trial, search: Any) -> tuple[str | None, dict[str, Any]]:
    """Returns the name and the parameters of a trial, for the record of the run; `search` may be None."""
    given = search.offer.name if search.is_under_way else None
    return (given if search.hp_name is None else search.hp_name(trial)), base.drawn(trial)


# -- the best trial ---------------------------------------------------------------------------------------------------


def _load_best_trial(trainer: Any, freeze: Callable[[TrialSpec], Any], best: BestRun | list[BestRun]) -> None:
    """Loads the model of the best trial, or of the first of several."""
    first = best[0] if isinstance(best, list) else best
    internals = Internals(trainer)
    folder = internals.engine.agree(lambda: _best_folder(output_path(trainer.args), first.run_id))
    trial = freeze(TrialSpec(id=first.run_id, params=first.hyperparameters))
    internals.adopt_model(trainer.call_model_init(trial))
    trainer._load_from_checkpoint(folder)


def _best_folder(output_dir: str, trial_id: str) -> str:
    """Returns the folder of a trial's model; CheckpointNotFoundError if it was trained without `load_best_trial`."""
    found = [one.folder for one in SearchRecord.read(output_dir).trials if one.id == trial_id]
    folder = os.path.join(found[0] if found else f"run-{trial_id}", MODEL_FOLDER)
    if not os.path.isdir(folder):
        raise CheckpointNotFoundError(
            f"load_best_trial=True: the model of trial {trial_id} is not in {folder}. An earlier run of this search "
            "trained it without load_best_trial; train it again with its parameters."
        )
    return folder


# -- trials in other processes ----------------------------------------------------------------------------------------


def _packed(trainer: Any) -> Callable[[], TrainerHandle]:
    """Returns a function that makes this trainer again in another process, from the user's objects."""
    search = Internals(trainer).search
    args = copy.copy(search.args)
    args.output_dir = output_path(args)  # paths must be valid there too
    search = replace(search, args=args, plan=replace(search.plan, options={}))
    parts = {"args": args, "model": None, "model_wrapped": None, "optimizer": None, "lr_scheduler": None}
    return partial(make_trainer_handle, Internals(trainer).copied_for_trial(search, **parts))
