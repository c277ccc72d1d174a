"""The hooks of a hyperparameter search: what a trial is. Which trials there are, a backend in `search/` decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainwright import assemble
from trainwright.checkpoint.async_writer import CheckpointWriter
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config import varied
from trainwright.facade.run import RunHooks
from trainwright.search import validation
from trainwright.search.backends import select_backend
from trainwright.search.base import (
    BestRun,
    SearchState,
    TrainerHandle,
    TrialResult,
    TrialSpec,
    default_compute_objective,
)
from trainwright.search.trial_runner import MODEL_FOLDER
from trainwright.state.control import TrainerControl
from trainwright.state.memory_tracker import TrainerMemoryTracker
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState


class SearchHooks(RunHooks):
    """Trains one trial after the other, each from the arguments as given."""

    def hyperparameter_search(
        self,
        hp_space: Callable[..., Any] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[..., str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Searches for the best arguments; a new model is made for each trial, by `model_init`.

        Args:
            hp_space: from a trial to the arguments it differs in (Optuna), or from None to their domains (Ray, W&B).
            compute_objective: from an evaluation's metrics to the number to optimise, or to a list of several; default
                the loss, or the sum of the metrics where there are some.
            n_trials: how many.
            direction: "minimize" or "maximize"; a list for several objectives.
            backend: "optuna", "ray" or "wandb"; default the first that is installed.
            hp_name: from a trial to its name, which its directory gets too.
            kwargs: `failed_trials`, `pruned_checkpoints`, `load_best_trial`, `resume_search` (see
                `search.base.Settings`); all others go to the backend's library.

        Returns:
            The best trial; with several objectives those that none is better than.

        Raises:
            SearchSpaceError, MissingModelError, DataError: it cannot work as asked; no trial was begun.
            SearchError: no trial came to its end.
        """
        name, chosen = select_backend(backend)
        validation.check_trainer_objects(
            model_init=self.model_init, train_dataset=self.train_dataset, eval_dataset=self.eval_dataset
        )
        space = chosen.default_space if hp_space is None else hp_space
        plan = validation.make_plan(space=space, num_trials=n_trials, direction=direction,
                               compute_objective=compute_objective, options=kwargs)  # fmt: skip
        chosen.check(self._host(), plan)
        self.hp_search_backend, self.hp_space, self.hp_name = name, space, hp_name
        self.compute_objective = default_compute_objective if compute_objective is None else compute_objective
        states = assemble.states_of(self._stateful())
        self._search = SearchState(backend=chosen, plan=plan, args=self.args, callback_states=states)
        with self._searching(), assemble.also_tracked_by(self.callback_handler, chosen.tracker):
            best = chosen.run(self._host(), plan)
            assemble.tell_best(self.args, plan, best)
        if plan.settings.load_best_trial:
            self._load_best_trial(chosen.frozen, best)
        return best

    @contextmanager
    def _searching(self) -> Iterator[None]:
        """Around all trials: afterwards the trainer is as it was made, with a new model."""
        try:
            yield
        finally:
            assert self._search is not None
            assemble.restore_callbacks(
                self._search.callback_states, self.callback_handler.callbacks, with_settings=True
            )
            self._use_arguments(self._search.args)
            self.hp_search_backend = self.hp_name = self._trial = self._search = None
            self._renew_model(None)

    def _host(self) -> TrainerHandle:
        """What the backend may ask."""
        output_dir = self.args.output_dir
        return TrainerHandle(
            args=self.args,
            is_main=self.is_world_process_zero(),
            num_processes=self._engine.num_processes,
            run=self._run_trial,
            check=self._check_trial,
            folder_of=lambda offer, trial: assemble.trial_folder(output_dir, offer, trial, hp_name=self.hp_name),
            find_checkpoint=lambda folder: assemble.find_checkpoint("auto", folder),
            agree=lambda decide: self._engine.agree(decide),
            pack=self._pack,
        )

    def _check_trial(self, params: Mapping[str, Any]) -> None:
        assert self._search is not None
        varied.varied(self._search.args, params)

    def _run_trial(self, offer: TrialSpec, trial: Any) -> TrialResult:
        """Trains, evaluates where training did not, and frees what it took."""
        assert self._search is not None
        search = self._search
        search.offer, search.outcome, self.objective = offer, TrialResult(), None
        assemble.restore_callbacks(search.callback_states, self.callback_handler.callbacks, with_settings=True)
        self._run.forget()
        try:
            search.outcome.folder = self._get_output_dir(trial)
            self.train(resume_from_checkpoint=offer.checkpoint, trial=trial)
            if self.objective is None:
                self._hear(self.evaluate())
            self._keep_trial(search.outcome)
            return search.outcome
        finally:
            self._writer.end_after_failure()
            self._use_arguments(search.args)  # the engine of the trial holds its optimizer
            assemble.forget_run(vars(self), self.callback_handler, self._engine)

    def _keep_trial(self, outcome: TrialResult) -> None:
        """What is left of a trial on the disk, beside its checkpoints."""
        assert self._search is not None
        settings = self._search.plan.settings
        if settings.load_best_trial and not outcome.was_pruned:
            self.save_model(str(Path(outcome.folder) / MODEL_FOLDER), _internal_call=True)
        if settings.pruned_checkpoints == "delete" and outcome.was_pruned and self.args.should_save:
            assemble.delete_checkpoints(outcome.folder, self._run_id)

    def _hear(self, metrics: dict[str, float]) -> None:
        assert self._search is not None
        search, outcome = self._search, self._search.outcome
        outcome.metrics = dict(metrics)
        self.objective = validation.checked_objective(self.compute_objective, dict(metrics), search.plan)
        outcome.objective = self.objective
        outcome.curve.append((self.state.global_step, self.objective))

    def _load_best_trial(self, freeze: Callable[[TrialSpec], Any], best: BestRun | list[BestRun]) -> None:
        """Loads the model of the best trial, the first of several."""
        first = best[0] if isinstance(best, list) else best
        folder = self._engine.agree(lambda: assemble.best_folder(self.args.output_dir, first.run_id))
        self.model = self.model_wrapped = self.call_model_init(
            freeze(TrialSpec(id=first.run_id, params=first.hyperparameters))
        )
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self.args.device)
        self._load_from_checkpoint(folder)

    def _use_arguments(self, args: Any) -> None:
        """From here on these are the arguments, and the engine is one that suits them."""
        self.args = self.callback_handler.args = args
        self._train_batch_size = args.train_batch_size
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.create_accelerator_and_postprocess()

    def _hp_search_setup(self, trial: Any) -> None:
        """Takes a trial's settings over; outside of a search there is nothing to do."""
        self._trial = trial
        if trial is None or self._search is None:
            return
        self._use_arguments(varied.varied(self._search.args, {**self._search.offer.params}))
        self.args.resume_from_checkpoint = None  # that of the script is no trial's

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """Tells a search how a trial does, which may end it early; outside of a search there is nothing to do."""
        if trial is None or self._search is None:
            return
        self._hear(metrics)
        search = self._search
        search.outcome.was_heard = True
        save = self._tune_save_checkpoint if self.control.should_save else None
        if self._engine.agree(lambda: search.backend.report(trial, search.outcome, save)):
            search.outcome.was_pruned = self.control.should_training_stop = True
            self.control.should_save |= search.plan.settings.pruned_checkpoints == "save"

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes a whole checkpoint into a directory of the backend's, which a trial can go on from."""
        self.store_flos()
        self._write_checkpoint(CheckpointStore(checkpoint_dir), in_background=False)

    def _pack(self) -> Callable[[], TrainerHandle]:
        """This trainer for another process: a function that makes it anew there."""
        assert self._search is not None
        parts, callbacks = assemble.packed(vars(self), self.callback_handler.callbacks)
        return partial(_unpacked, type(self), parts, callbacks)

    def _settle_in(self, callbacks: list[Any]) -> None:
        """In another process: makes what belongs to a process, of the parts that came along."""
        self._run = RunState(TrainerState(), TrainerControl())
        self._writer = CheckpointWriter(goes_on=getattr(self.args, "save_failure", "stop") == "continue")
        self._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = self._loader = None
        self._eval_dataloaders, self._flos_model = {}, None
        self.create_accelerator_and_postprocess()
        self.callback_handler = assemble.make_callbacks(
            self.args, callbacks, engine=self._engine, writer=self._writer, model=None,
            processing_class=self.processing_class, optimizer=None, lr_scheduler=None,
        )  # fmt: skip
        self._journal = assemble.make_keeper(self.callback_handler, self._run.clock)


def _unpacked(kind: type[SearchHooks], parts: dict[str, Any], callbacks: list[Any]) -> TrainerHandle:
    trainer = kind.__new__(kind)
    vars(trainer).update(parts)
    trainer._settle_in(callbacks)
    return trainer._host()
