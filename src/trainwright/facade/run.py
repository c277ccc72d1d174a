"""The hooks of a whole run: its length, its preparation, its epochs, its end."""

from __future__ import annotations

from typing import Any

import torch

from trainwright import assemble, checks
from trainwright._types import has_length
from trainwright.config import resolve, rules
from trainwright.config.plans import StepPlan
from trainwright.evaluation.outputs import TrainOutput
from trainwright.facade.checkup import CheckHooks
from trainwright.journal.data_wait import DataWait
from trainwright.loop.context import LoopContext, RunStart
from trainwright.loop.fit import fit, run_epoch
from trainwright.optim import schedule_resume, schedules, train_eval_mode
from trainwright.state.clock import EVALUATION, LOGGING, SAVING
from trainwright.state.throughput import speed_metrics, step_logs, utilisation


class RunHooks(CheckHooks):
    """Puts a run together from the other parts and takes it from the first step to the last metric."""

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, float, int, int | None, int]:
        """(epochs, optimizer steps per epoch, samples, samples trained, total batch size, batches per epoch, steps)."""
        known = has_length(dataloader)
        lengths = resolve.lengths(
            args,
            num_batches=len(dataloader) if known else None,
            num_examples=self.num_examples(dataloader) if known else None,
            total_batch_size=assemble.samples_per_step(dataloader, args) or self.get_total_train_batch_size(args),
        )
        return lengths.values()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples per optimizer step over all processes that have data of their own."""
        replicas = args.world_size // self.get_tp_size() // self.get_cp_size() // self.get_sp_size()
        return int(self._train_batch_size * resolve.micro_batches(args) * replicas)

    def get_sp_size(self) -> int:
        """Processes that share a sequence (sequence parallelism)."""
        return self._parallel_size("sp_size")

    def get_cp_size(self) -> int:
        """Processes that share a sequence (context parallelism)."""
        return self._parallel_size("cp_size")

    def get_tp_size(self) -> int:
        """Processes that share a layer (tensor parallelism)."""
        size = getattr(self.model, "_tp_size", None)
        return size if size is not None else self._parallel_size("tp_size")

    def _parallel_size(self, name: str) -> int:
        config = getattr(self.accelerator, "parallelism_config", None)
        return 1 if config is None else int(getattr(config, name))

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """A whole run, from the dataloader to the last metric."""
        args = self.args if args is None else args
        self._train_batch_size = batch_size if batch_size is not None else self._train_batch_size
        note = self._plan_run(args, resume_from_checkpoint)
        assert self._plan is not None
        plan = self._plan
        self._session = self._open_session(args, resume_from_checkpoint, trial, ignore_keys_for_eval)
        self._engine.agree(lambda: assemble.check_first_checkpoint(args, self._get_output_dir(trial), self.model))
        start, device = self._session.start, self._engine.device
        caution = None if self._rule is None else assemble.sums_up_means(self.model, args, self._rule)
        num_replicas = self._engine.num_replicas
        assemble.announce(
            plan,
            args,
            self.state,
            device=device,
            start=start,
            num_replicas=num_replicas,
            note=note,
            caution=caution,
            changes=self._changes,
        )
        self._rehearse_evaluation(ignore_keys_for_eval)
        datasets = {"train": self.train_dataset, "eval": self.eval_dataset}
        folder = self._get_output_dir(trial)
        assemble.begin_journal(
            self._journal, args, folder, self._run_id, session=self._session, run=self._run, datasets=datasets
        )
        assemble.take_up_uploads(self._uploader)
        fit(self._session, self._run, self, eval_on_start=args.eval_on_start)
        return self._finalize_training(trial, plan.num_train_samples, self._run.start_time)

    def _plan_run(self, args: Any, checkpoint: str | None) -> str:
        """Data and steps; returns what a resume in other batches changes, in words."""
        checks.check_has_samples(self.train_dataset)
        dataloader = self.get_train_dataloader()
        checks.check_has_batches(dataloader)
        self._plan = plan = StepPlan.from_values(
            self.set_initial_training_values(args, dataloader),
            micro_batches=resolve.micro_batches(args),
            max_grad_norm=args.max_grad_norm,
        )
        rules.check_run(args, assemble.facts(plan, self, self._engine.device))
        self._loader = assemble.make_loader(dataloader, self._engine.device)
        num_replicas = self._engine.num_replicas
        if not resolve.dispatches(args, num_replicas):
            checks.check_ends_together(plan, self._loader.chunk, num_replicas)
        self._plan, note = assemble.plan_of_the_rest(
            plan,
            self._loader,
            checkpoint,
            args,
            chunk=self._train_batch_size * num_replicas,
            dataset=self.train_dataset,
        )
        return note

    def _open_session(
        self, args: Any, checkpoint: str | None, trial: Any, ignore_keys: list[str] | None
    ) -> LoopContext:
        """Model, optimizer, loader and where they stand, all that the loop needs."""
        plan = self._plan
        assert plan is not None
        epoch, batches = self._init_training_state(
            plan.max_steps, plan.steps_per_epoch, plan.num_epochs, checkpoint, trial
        )
        model, loader = self._prepare_for_training(plan.max_steps, self._loader, checkpoint)
        self._rule = self._loss_rule()
        self._run.begin(
            device=self._engine.device,
            skip_non_finite=args.logging_nan_inf_filter,
            collect=self._engine.stacked if self._engine.num_replicas > 1 else None,
        )
        self._data_wait = DataWait(self._run.clock)
        return LoopContext(
            engine=self._engine,
            model=model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            loader=loader,
            plan=plan,
            rule=self._rule,
            events=self.callback_handler,
            start=RunStart(
                epoch=epoch,
                batches=batches,
                checkpoint=checkpoint,
                owes_evaluation=self._owed[0],
                owes_save=self._owed[1],
            ),
            scheduler_follows_metrics=schedules.follows_metrics(self.lr_scheduler),
            saves_on_interrupt=resolve.checkpoint(args).saves_on_interrupt,
            random_states=assemble.random_states(args),
            first_look=self._first_look(trial),
            smaller_batches=assemble.smaller_batches(args, self._engine),
            trial=trial,
            ignore_keys_for_eval=ignore_keys,
        )

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Fills `state`, from the checkpoint if there is one; returns the first epoch and its batches done already."""
        assert self._plan is not None
        self.state = state = assemble.initial_state(resume_from_checkpoint, self._stateful())
        self._before = None
        if resume_from_checkpoint is not None:
            is_own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
            self._before = assemble.before(resume_from_checkpoint, self.args, state, has_own_optimizer=is_own)
        state.train_batch_size = self._train_batch_size
        state.compute_steps(self.args, max_steps)
        state.max_steps, state.num_train_epochs = max_steps, num_train_epochs
        state.is_hyper_param_search = trial is not None
        state.trial_name, state.trial_params = assemble.name_and_params(trial, self._search, hp_name=self.hp_name)
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        manifest = assemble.manifest_of(resume_from_checkpoint)
        assemble.check_same_checkpoint(manifest, resume_from_checkpoint, self._engine)
        folder = self._get_output_dir(trial)
        self._run_id = self._engine.agree(lambda: assemble.run_id_after(resume_from_checkpoint, folder))
        self._owed = assemble.owed(state, manifest)
        if resume_from_checkpoint is None:
            return 0, 0
        self._load_callback_state()
        micro_batches = self._plan.micro_batches
        skips = not self.args.ignore_data_skip
        position = assemble.resume_loader(
            self._loader,
            resume_from_checkpoint,
            manifest,
            rank=self._engine.replica,
            num_processes=self._engine.num_replicas,
            skips=skips,
        )
        if position is None:  # transformers wrote it: all that is known is the step
            epoch, steps = divmod(state.global_step, num_update_steps_per_epoch)
            position = epoch, steps * micro_batches if skips else 0
        return position

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """The model as it is trained and the loader; makes optimizer and schedule, and loads their states."""
        if self._created_lr_scheduler:  # its length belonged to an earlier train()
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._engine.expect(num_steps=max_steps, num_warmup_steps=self.args.get_warmup_steps(max_steps))
        prepared = self._engine.setup(
            self._wrap_model(self.model),
            make_optimizer=lambda model: self._make_optimizer(model, max_steps),
            make_scheduler=lambda optimizer: self.create_scheduler(num_training_steps=max_steps, optimizer=optimizer),
        )
        self.model_wrapped, self.optimizer, self.lr_scheduler = prepared.model, prepared.optimizer, prepared.scheduler
        vars(self).update(self._engine.published_flags())
        asked = schedule_resume.settings_of(self.optimizer, self.lr_scheduler)
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self._load_scaler(resume_from_checkpoint)
        self._carry_on(asked, max_steps)
        self._past = None
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = getattr(train_dataloader, "dataloader", train_dataloader)
        handler.rebuild()
        train_eval_mode.train_mode(self.model_wrapped, self.optimizer)
        return self.model_wrapped, train_dataloader

    def _carry_on(self, asked: schedule_resume.RequestedSettings, max_steps: int) -> None:
        """After a resume: arguments that differ from the checkpoint's take effect."""
        self._changes = []
        if self._before is not None:
            self._changes = assemble.carry_on(
                self.optimizer,
                self.lr_scheduler,
                asked,
                self._before,
                args=self.args,
                num_steps=max_steps,
                is_own=not self._created_lr_scheduler,
            )

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """One pass over the training data."""
        self._past = None
        run_epoch(self._session, self._run, self, epoch)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: float,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        """Does what the flags ask for after a step."""
        control = self._run.control
        if not (control.should_log or control.should_evaluate or control.should_save):
            return
        clock = self._run.clock
        before = clock.mark(LOGGING)
        self.store_flos()
        if control.should_log and self.state.global_step > self._run.step_last_logged:
            num_steps = self.state.global_step - self._run.step_last_logged
            loss, num_non_finite = self._run.drain_loss()
            self._data_wait.tell(num_steps=num_steps, num_workers=self.args.dataloader_num_workers)
            rate = self._get_learning_rate() if learning_rate is None else learning_rate
            self.log(step_logs(loss, grad_norm, rate, num_non_finite), start_time)
        if self.control.should_evaluate:
            clock.mark(EVALUATION)
            metrics = self._evaluate(trial, ignore_keys_for_eval)
            is_best = self._determine_best_metric(metrics=metrics, trial=trial)
            self.control.should_evaluate = False  # also where an override tells no callback of it
            if self.args.save_strategy == "best":
                self.control.should_save = is_best
        if self.control.should_save:
            clock.mark(SAVING)
            if self._pause is not None:
                self._pause.discard_saved_weights()
            self._save_checkpoint(model, trial)
            self.callback_handler.fire("on_save", self._run)
        clock.mark(before)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Metrics, the best model if it was asked for, and the end of the callbacks."""
        assert self._plan is not None
        run, plan = self._run, self._plan
        num_steps = run.state.global_step - run.first_step
        train_loss = run.finish_loss() / max(num_steps, 0.001)
        num_samples = (num_train_samples or plan.num_train_samples) * num_steps / max(run.state.max_steps, 1)
        if plan.has_open_end:
            run.state.max_steps, num_samples = run.state.global_step, num_steps * plan.total_batch_size
        num_samples = self._loader.num_formed or num_samples
        tokens = run.state.num_input_tokens_seen - run.first_tokens
        counts_tokens = self.args.include_num_input_tokens_seen != "no"
        metrics = speed_metrics(
            "train",
            start_time,
            num_samples=num_samples,
            num_steps=num_steps,
            num_tokens=tokens if counts_tokens else None,
        )
        self.store_flos()
        metrics |= {"total_flos": run.state.total_flos, "train_loss": train_loss}
        metrics |= utilisation(run.state.total_flos - run.first_flos, start_time, peak=self._engine.peak_flops())
        self._memory_tracker.stop_and_update_metrics(metrics, stage="train")
        self.log(metrics)
        self._writer.wait()
        self._engine.barrier()  # train() returns on no process before all is on the disk
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.callback_handler.fire("on_train_end", run)
        self._finish_current_push()
        assemble.tell_times(self.args, self._journal)
        return TrainOutput(run.state.global_step, train_loss, metrics)
