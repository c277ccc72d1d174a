"""The hooks for checkpoints: what is written, in which order, and how it is read back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trainwright import assemble
from trainwright.checkpoint import training_state, weights
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.store import CheckpointStore
from trainwright.facade.hub import HubHooks

logger = logging.getLogger(__name__)

# Methods in which a user's code may look at the files of a save, or count on them when it returns.
_SAVING_HOOKS = (
    "_maybe_log_save_evaluate", "_save_checkpoint", "save_model", "_save", "_save_optimizer_and_scheduler",
    "_save_scaler", "_save_rng_state", "_push_from_checkpoint",
)  # fmt: skip


class CheckpointHooks(HubHooks):
    """Writes and reads checkpoints; the store decides where, the engine how."""

    def _get_output_dir(self, trial: Any) -> str:
        """Where this run writes: a trial of a search has a directory of its own."""
        if trial is None or self._search is None:
            return str(self.args.output_dir)
        return assemble.trial_folder(self.args.output_dir, self._search.offer, trial, hp_name=self.hp_name)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Writes `checkpoint-<step>` as a whole or not at all, then deletes what `save_total_limit` allows."""
        self.store_flos()
        store = CheckpointStore(self._get_output_dir(trial))
        self._write_checkpoint(store, in_background=self._saves_in_background())
        self._run.saved_step = self._writer.newest
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(store.path(self.state.global_step)))

    def _write_checkpoint(self, store: CheckpointStore, *, in_background: bool) -> None:
        step = self.state.global_step
        manifest = Manifest(step=step, run_id=self._run_id, world_size=self.args.world_size, cursor=self._cursor())
        best = self.state.best_global_step
        self._writer.save(
            store,
            manifest,
            company=self._engine,
            writes=self.args.should_save,
            in_background=in_background,
            check=lambda: assemble.check_next_checkpoint(self.args, store.root, self.model, self.optimizer),
            write=lambda staging: self._fill_checkpoint(staging, store),
            after=lambda: assemble.rotate(store, self.args, run_id=manifest.run_id, newest=step, best=best),
        )

    def _fill_checkpoint(self, staging: Path, store: CheckpointStore) -> None:
        folder, step, best = str(staging), self.state.global_step, self.state.best_global_step
        self.save_model(folder, _internal_call=True)
        if self._engine.writes_parts:
            optimizer = None if self.args.save_only_model else self.optimizer
            self._engine.save_parts(staging, optimizer, put=self._writer.sink.put)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
        if best is not None and self._engine.agree(lambda: best == step or best in store.owned_by(self._run_id)):
            self.state.best_model_checkpoint = str(store.path(best))
        if self.args.should_save:
            assemble.write_state(self.state, self._stateful(), staging)

    def _saves_in_background(self) -> bool:
        hooks = any(self._is_overridden(name) for name in _SAVING_HOOKS)
        return self.is_in_train and assemble.saves_in_background(
            self.args,
            self._run,
            is_watched=hooks or self.callback_handler.looks_at_saves(),
        )

    def _is_overridden(self, name: str) -> bool:
        """Whether a published method is another one than the package's."""
        module = getattr(getattr(type(self), name), "__module__", "")
        return name in vars(self) or not module.startswith(f"{__package__}".partition(".")[0] + ".")

    def _cursor(self) -> dict[str, Any] | None:
        if self._loader is None or self._plan is None:
            return None
        run, plan = self._run, self._plan
        cursor = self._loader.cursor(run.epoch, run.batches_in_epoch, batches_per_epoch=plan.batches_per_epoch)
        size = {"batch_size": self._train_batch_size, "micro_batches": plan.micro_batches, "chunk": self._loader.chunk}
        return {**cursor.to_dict(), **size, "shift": plan.shift}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model so that `from_pretrained` loads it, with the processing class and the arguments.

        Every process calls it where several hold parts of the model. With `push_to_hub` what the user saves goes to
        the Hub too.
        """
        folder = self.args.output_dir if output_dir is None else output_dir
        is_checkpoint = _internal_call and output_dir is not None
        weights_of = self._engine.whole_weights if is_checkpoint else self._engine.finished_weights
        whole = {} if is_checkpoint and self._engine.writes_parts else weights_of(self.model)
        self._save(folder) if whole is None else self._save(folder, state_dict=dict(whole))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not self.args.should_save:
            return
        model = self._engine.unwrap(self.model)
        weights.save_weights(model, folder, state_dict=state_dict, sink=self._writer.sink)
        processing_class: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        training_state.save_arguments(self.args, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._engine.writes_parts:
            state = self._engine.optimizer_state(self.optimizer)
            if self.args.should_save:
                training_state.save_optimizer(state, Path(output_dir), sink=self._writer.sink)
        if self.args.should_save:
            training_state.save_scheduler(self.lr_scheduler, Path(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        if self.args.should_save:
            training_state.save_scaler(getattr(self.accelerator, "scaler", None), Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        writes, sink = self.args.should_save, self._writer.sink
        assemble.save_rng(output_dir, self._loader, self._engine, writes=writes, sink=sink)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads the weights of a checkpoint into the model."""
        self._read_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    def _read_weights(self, model: Any, folder: Path) -> None:
        in_parts = self._engine.weights_in_parts(folder)
        result = weights.load_weights(model, folder, found=in_parts, load=self._engine.load_weights)
        self._issue_warnings_after_load(result)

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint."""
        assert self.state.best_model_checkpoint is not None
        self._engine.barrier()  # the process that writes it may still be at it
        folder = Path(self.state.best_model_checkpoint)
        if not folder.is_dir():
            logger.warning("The best model, %s, was deleted meanwhile; the model keeps the last weights.", folder)
            return
        logger.info("Loading the best model, %s (%s).", folder, self.state.best_metric)
        self._read_weights(self.model, folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, engine = Path(checkpoint), self._engine
        if not engine.load_optimizer_in_parts(folder, self.model_wrapped, self.optimizer):
            training_state.load_optimizer(
                self.optimizer, folder, load=engine.load_optimizer_state, holds_parts=engine.holds_parts
            )
        training_state.load_scheduler(self.lr_scheduler, folder)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            training_state.load_scaler(getattr(self.accelerator, "scaler", None), Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            path = self._rng_file(checkpoint)
            assemble.load_rng(
                checkpoint,
                path,
                rank=self._engine.replica,
                num_processes=self._engine.num_replicas,
                step=self.state.global_step,
            )

    def _rng_file(self, checkpoint: str) -> Path | None:
        return assemble.rng_file(checkpoint, rank=self._engine.replica, num_processes=self._engine.num_replicas)

    def _load_callback_state(self) -> None:
        """Gives callbacks the state that the checkpoint has of them."""
        assemble.restore_callbacks(
            self.state.stateful_callbacks,
            self.callback_handler.callbacks,
            with_settings=self.args.restore_callback_states_from_checkpoint,
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Says which weights a checkpoint lacked or had too much."""
        if load_result.missing_keys:
            logger.warning(
                "The checkpoint lacks weights of the model, which keep the values they have: %s.",
                ", ".join(load_result.missing_keys),
            )
        if load_result.unexpected_keys:
            logger.warning(
                "The checkpoint has weights that the model lacks; they are left out: %s.",
                ", ".join(load_result.unexpected_keys),
            )
