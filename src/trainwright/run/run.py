"""Run: everything that belongs to one `train()`. It is made when training begins and dropped when it ends.

Before the first `train()` and after the last there is an idle run, with the record and the position of the last run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright._types import Batch, DataLoaderLike, DatasetLike, Model, Trial, counted
from trainwright.callbacks.flow import end_after
from trainwright.checkpoint import rng
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.config import resolve
from trainwright.config.behaviour import get_behaviour
from trainwright.config.plans import StepPlan
from trainwright.data.cursor import Cursor, WindowSize, plan_resume
from trainwright.data.loader import Loader
from trainwright.data.prepared_dataloader import make_prefetcher
from trainwright.data.shards import RankShare
from trainwright.engine.base import Engine
from trainwright.errors import NestedCallError
from trainwright.loop.driven import DrivenSteps
from trainwright.loop.extension import Extensions, MicroBatch, name_extension
from trainwright.loop.retry import SmallerMicroBatches
from trainwright.loop.setup import Setup, Start
from trainwright.optim import schedules
from trainwright.run import input_pipeline, resume
from trainwright.run.console import DataWait
from trainwright.run.resume import CheckpointArguments, PendingActions
from trainwright.run.services import Services
from trainwright.state.progress import Progress
from trainwright.state.throughput import FlopEstimator
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support import model_modes
from trainwright.support.hooks import Events, TrainHooks
from trainwright.support.log_handler import each_warning_once
from trainwright.support.loss_normalization import ITEM_SCALE, LossOutput, LossRule, LossScaling, stands_in
from trainwright.support.replaced import current

if TYPE_CHECKING:
    from trainwright.run.late_parameters import LateParameters

logger = logging.getLogger(__name__)

Forward = Callable[[Any, Batch], Any]


def run_model(model: Model, inputs: Batch) -> Any:
    """Runs the forward pass of a model that keeps no state between batches."""
    return model(**inputs)


def forward_pass(args: Any) -> Forward:
    """Returns the forward pass of a run; with `past_index`, a state is passed from one batch to the next."""
    if getattr(args, "past_index", -1) < 0:
        return run_model
    from trainwright.support.patches import RecurrentForward

    return RecurrentForward(args.past_index)


@dataclass(slots=True)
class Resumed:
    """What a run continues: nothing, if it is a fresh one.

    Attributes:
        checkpoint: opened once; None for a fresh run.
        begins_branch: it is another run's, from which this one branches.
        args: its arguments.
        changes: differences between them and the arguments of this run, as lines.
        note: the effects of resuming with another batch size, in words.
        pending_actions: what the run of the checkpoint was about to do.
        has_random_states: the checkpoint's random states were restored, or there is none.
    """

    checkpoint: Checkpoint | None = None
    begins_branch: bool = False
    args: CheckpointArguments | None = None
    changes: list[str] = field(default_factory=list)
    note: str = ""
    pending_actions: PendingActions = field(default_factory=PendingActions)
    has_random_states: bool = True


class Run:
    """One run: its fixed setup, its plan, its progress, and the extensions that take part.

    Attributes:
        progress: everything that changes from step to step: the record, the flags, the loss, the clock.
        extensions: active extensions; empty before and after a training.
        setup: objects and settings of the loop; unset until `begin`.
        plan: length of the run; unset before `read_from`, replaced by `apply_recount`.
        start: starting position; changed by `recount_steps` in the first epoch.
        forward: runs a batch through the model.
        trial: trial of a search, or None.
        is_dry: the run must leave no trace: no events, no change to the optimizer.
        run_id: run id for new checkpoints; a resume keeps the id of its checkpoint.
        is_training: between the beginning and the end of `train()`.
        has_begun: all checks before its first step are done.
        is_evaluating: inside of an evaluation loop.
        loader: yields its batches, from any position.
        batch_size: samples of a micro-batch, per device.
        losses: how losses are scaled.
        resumed: what it continues.
        eval_mode_guard: the model's modes before an evaluation, until the next step.
        outputs: outputs and inputs of the last forward pass, for extensions that need them.
        noise_handle: handle of the hook that adds noise to the embeddings, or None.
        flops: estimates the operations of a micro-batch.
        driven_steps: the steps of `fit_step`, running or finished.
        counts_may_be_late: the number of label items may arrive during a forward pass of training.
        has_added_groups: the optimizer has parameter groups that it was not made with.
    """

    setup: Setup
    plan: StepPlan

    def __init__(
        self, progress: Progress, forward: Forward = run_model, *, trial: Trial = None, is_dry: bool = False
    ) -> None:
        self.progress = progress
        self.extensions = Extensions()
        self.start = Start()
        self.forward = forward
        self.trial = trial
        self.is_dry = is_dry
        self.run_id = resume.new_run_id()
        # random states that are restored after the evaluation under way; empty outside of evaluations
        self._states_of_training: rng.States = {}
        self.is_training = False
        self.has_begun = False
        self.is_evaluating = False
        self.counts_may_be_late = False
        self.loader: Loader | None = None
        self.batch_size = 0
        self.losses = LossScaling()
        self.resumed = Resumed()
        self.eval_mode_guard: model_modes.EvalModeGuard | None = None
        self.outputs: tuple[Any, Batch] | None = None
        self.noise_handle: Any = None
        self.flops = FlopEstimator()
        self.driven_steps: DrivenSteps[Any] | None = None
        self._data_wait: DataWait | None = None
        self.has_added_groups = False
        self._late_parameters: LateParameters | None = None
        self._fresh_plan: Callable[[], StepPlan] | None = None
        self._has_own_schedule = False
        self._args: Any = None
        self._accumulation = 0  # gradient_accumulation_steps at the start

    @classmethod
    def after(cls, before: Run, args: Any, trial: Trial = None) -> Run:
        """Returns a run that starts from scratch; until it makes its own, it has the record and flags of `before`."""
        return cls(Progress(before.progress.state, before.progress.control), forward_pass(args), trial=trial)

    @classmethod
    def idle(cls, args: Any, state: TrainerState | None = None) -> Run:
        """Returns the run of a trainer that has not trained."""
        control = current("TrainerControl", TrainerControl)()
        return cls(Progress(TrainerState() if state is None else state, control), forward_pass(args))

    def ended(self, before: Run) -> Run:
        """Returns the idle run that follows; after a dry run, this is `before`.

        It keeps the record, the data position, and the extensions needed for saving a checkpoint.
        """
        if self.is_dry:
            return before
        idle = Run(self.progress, self._fresh_forward(), trial=self.trial)
        idle.run_id = self.run_id
        if self.has_plan:
            idle.plan = self.plan
        idle.loader = self.loader
        idle.batch_size = self.batch_size
        idle.extensions = self.extensions
        return idle

    def rehearsal(self, model: Model) -> Run:
        """Returns a dry run for an evaluation; `model` is in evaluation mode until its guard ends."""
        progress = Progress(self.progress.state, self.progress.control)
        dry = Run(progress, self._fresh_forward(), trial=self.trial, is_dry=True)
        dry.is_training = self.is_training
        dry.losses.rule = self.losses.rule
        dry.eval_mode_guard = model_modes.EvalModeGuard(model, None)
        return dry

    @property
    def has_plan(self) -> bool:
        """Returns True once the length of the run is known."""
        return hasattr(self, "plan")

    def events(self, handler: Events) -> Events:
        """Returns the receiver of an evaluation's events: `handler`, or in a dry run, a null object."""
        if not self.is_dry:
            return handler
        from trainwright.run.silent_events import SilentEvents

        return SilentEvents()

    # -- preparing -----------------------------------------------------------------------------------------------------

    def read_from(
        self,
        dataloader: DataLoaderLike,
        plan: StepPlan,
        engine: Engine,
        *,
        batch_size: int,
        fills_windows: bool,
        rewinds: bool,
    ) -> Loader:
        """Sets the data; the plan is that of a fresh run, with full windows only if `fills_windows`.

        On a signal, the loader is rewound (`rewinds`) if the run then saves its last step.
        """
        share = RankShare(batch_size=batch_size, rank=engine.replica, num_processes=engine.num_replicas)
        self.loader = Loader(
            dataloader,
            random_state=rng.capture,
            set_random_state=rng.restore,
            copies=make_prefetcher(dataloader, engine.device, noting=engine.noting_copies),
            window=plan.micro_batches if fills_windows else None,
            rewinds=rewinds,
            dispatched=share if engine.dispatches else None,
        )
        self.batch_size = batch_size
        self.plan = replace(plan, num_left_out=self.loader.position.num_missing)
        return self.loader

    def start_in_its_epoch(self, dataloader: DataLoaderLike) -> None:
        """Starts a dataloader in the epoch of the checkpoint: an iterable of the user's may read from it."""
        cursor = None if self.resumed.checkpoint is None or self.has_begun else self.resumed.checkpoint.cursor
        if cursor is not None and hasattr(dataloader, "set_epoch"):
            dataloader.set_epoch(Cursor.from_dict(cursor).epoch)

    def opened(self, path: str) -> Checkpoint:
        """Returns the checkpoint at a path passed to a published hook: the run's own, or another one."""
        if self.resumed.checkpoint is not None and self.resumed.checkpoint.path == Path(path):
            return self.resumed.checkpoint
        return Checkpoint(path)

    def continue_from(self, checkpoint: Checkpoint | None, args: Any, engine: Engine, dataset: DatasetLike) -> None:
        """Limits the plan to the data that remains after a checkpoint; without one, all of it."""
        assert self.loader is not None
        chunk = self.batch_size * engine.num_replicas
        self.plan, self.resumed.note = resume.remaining_plan(
            self.plan, self.loader, checkpoint, args, chunk=chunk, dataset=dataset
        )

    def load_record(
        self,
        checkpoint: Checkpoint | None,
        args: Any,
        engine: Engine,
        *,
        stateful: list[Any],
        folder: str,
        is_own: bool,
    ) -> TrainerState:
        """Returns the record, new or from a checkpoint; also reads the run's id and pending actions.

        `folder` is the output directory; `is_own`: the optimizer is the user's. Raises CheckpointError if the record
        cannot be read, differs between processes, or contradicts the arguments.
        """
        self.progress.state = state = resume.initial_state(checkpoint, stateful)
        self.resumed.args = None
        if checkpoint is not None:
            self.resumed.args = resume.load_checkpoint_args(checkpoint, args, has_own_optimizer=is_own)
        resume.check_same_checkpoint(checkpoint, engine, on_each_node=args.save_on_each_node)
        copies = resume.find_copies(args, True, engine)
        is_branch = self.resumed.begins_branch
        self.run_id = engine.agree(lambda: resume.run_id_after(checkpoint, folder, copies=copies, is_branch=is_branch))
        self.resumed.pending_actions = resume.pending_actions(checkpoint)
        if args.auto_find_batch_size and checkpoint is not None and checkpoint.cursor is not None:
            self.progress.window.num_parts = checkpoint.cursor.get("num_parts") or 1
        return state

    def find_position(
        self, checkpoint: Checkpoint, args: Any, engine: Engine, *, steps_per_epoch: int
    ) -> tuple[int, int]:
        """Returns the epoch and its number of finished batches, and prepares the loader to continue there."""
        assert self.loader is not None
        skips = not args.ignore_data_skip
        position = None
        if get_behaviour(args).resume_continues_at_data_position:
            position = resume.resume_loader(self.loader, checkpoint, engine, self.plan, skips=skips)
        if position is None:  # written by transformers, or to be resumed as it would: only the step is known
            epoch, steps = divmod(self.progress.state.global_step, steps_per_epoch)
            position = epoch, steps * self.plan.micro_batches if skips else 0
        return position

    def begin(
        self,
        engine: Engine,
        args: Any,
        *,
        rule: LossRule,
        start: tuple[int, int],
        checkpoint: Checkpoint | None,
        fresh_plan: Callable[[], StepPlan],
        is_own: bool = False,
        **parts: Any,
    ) -> None:
        """Starts the clocks and makes the setup of the loop; `parts` are further fields of it.

        `fresh_plan` returns the plan of a fresh run over the current samples. `is_own`: the schedule is the user's, and
        stays unchanged when the steps are recounted.
        """
        self.losses.rule = rule
        stacked = engine.stacked if engine.num_replicas > 1 else None
        self.progress.begin(device=engine.device, skip_non_finite=args.logging_nan_inf_filter, collect=stacked)
        self._data_wait = DataWait(self.progress.clock)
        self._args = args
        self._accumulation = args.gradient_accumulation_steps
        self._fresh_plan = fresh_plan
        self._has_own_schedule = is_own
        self.resumed.checkpoint = checkpoint
        self.resumed.has_random_states = checkpoint is None
        epoch, batches = start
        self.progress.begin_epoch(epoch, batches_done=batches)  # of a save before the first step
        self.start = Start(
            epoch=epoch,
            batches=batches,
            checkpoint=None if checkpoint is None else str(checkpoint),
            owes_evaluation=self.resumed.pending_actions.evaluates,
            owes_save=self.resumed.pending_actions.saves,
            evaluated_parts=self.resumed.pending_actions.parts,
        )
        self.setup = Setup(
            engine=engine,
            rule=rule,
            loader=self.loader,  # type: ignore[arg-type]  # None if only a step is measured
            follows_metrics=schedules.follows_metrics,
            saves_on_interrupt=resolve.checkpoint(args).saves_on_interrupt,
            random_states=input_pipeline.random_states(args),
            behaviour=get_behaviour(args),
            smaller_batches=SmallerMicroBatches(engine, rng) if args.auto_find_batch_size else None,
            **parts,
        )
        from trainwright.run import late_parameters

        self.has_added_groups = checkpoint is not None and late_parameters.has_groups(checkpoint.path)
        self.progress.groups.num = len(getattr(parts["optimizer"], "param_groups", ()))
        if isinstance(parts["model"], nn.Module):
            model = engine.unwrap(parts["model"])
            self._late_parameters = late_parameters.LateParameters(model, reaches_new=engine.averages_new_parameters)
        if self.setup.smaller_batches is not None:
            parts["events"].makes_room = partial(self.setup.smaller_batches.makes_room, self.progress)

    @contextmanager
    def unchanged_random_states(self) -> Iterator[None]:
        """Restores the random states after an evaluation; a checkpoint that is saved meanwhile has them too."""
        before = self._states_of_training
        with rng.unchanged_random_states() as states:
            self._states_of_training = before or states
            try:
                yield
            finally:
                self._states_of_training = before

    def restore_random_states(self, hooks: TrainHooks) -> None:
        """Restores the random states of the checkpoint from which the run continues, if there is one."""
        hooks._load_rng_state(self.start.checkpoint)
        self.resumed.has_random_states = True

    # -- a changed number of steps -------------------------------------------------------------------------------------

    def recount_steps(self) -> None:
        """Requests a recount of the remaining steps before the next window: an epoch's samples have changed."""
        assert self.loader is not None
        self.loader.is_stale = True

    @property
    def is_recount_due(self) -> bool:
        """Returns True if the samples of an epoch have changed since the steps were counted."""
        if self.loader is None or not self.has_plan:
            return False
        return self.loader.is_stale or self.plan.num_left_out != self.loader.position.num_missing

    def apply_recount(self, epoch: int, batches: int | None) -> None:
        """Replaces the plan after `recount_steps`; `batches` of the epoch are trained, None at its beginning."""
        assert self.loader is not None
        assert self._fresh_plan is not None
        before = self.plan
        state = self.progress.state
        step = state.global_step
        if batches is None:
            batches = self.start.batches if epoch == self.start.epoch else 0
        batches = self.loader.refresh(epoch, batches)
        plan = replace(self._fresh_plan(), num_left_out=self.loader.position.num_missing)
        size = WindowSize(chunk=plan.total_batch_size, micro_batches=plan.micro_batches)
        plan, _ = plan_resume(
            plan,
            Cursor(epoch=epoch, samples=0, shift=before.shift, left_out=before.num_left_out),
            step=step,
            batches_left=plan.batches_per_epoch - batches,
            before=size,
            now=size,
            counts_epochs=self._args.max_steps <= 0,
        )
        self.progress.batches_in_epoch = batches
        if epoch == self.start.epoch:
            self.start = replace(self.start, batches=batches)
        self.progress.more_epochs += max(plan.num_epochs - before.num_epochs, 0)
        state.max_steps = plan.max_steps
        state.num_train_epochs = plan.num_epochs
        if not self._has_own_schedule:
            resume.continue_schedule(self.setup.scheduler, self._args, before=before.max_steps, now=plan.max_steps)
        self.plan = plan
        if plan.max_steps <= step:
            end_after(self._args, state, self.progress.control)
        if plan.num_left_out != before.num_left_out:
            logger.warning(
                "In quarantine: %s. Epochs have %s from step %d on, and the run has %s.",
                counted(plan.num_left_out, "sample"),
                counted(plan.num_examples, "sample"),
                step + 1,
                counted(plan.max_steps, "step"),
            )

    # -- a changed model or optimizer ----------------------------------------------------------------------------------

    def check_parameters(self, optimizer: Any, *, finds_new: bool = True) -> None:
        """Logs a warning for parameters that require a gradient only since the optimizer was made.

        Without `finds_new`, the model is only searched if a parameter that it began with was unfrozen. Also for another
        accumulation than that of the start.
        """
        accumulation = self._args.gradient_accumulation_steps
        if accumulation != self._accumulation:
            self._accumulation = accumulation
            logger.warning(
                "gradient_accumulation_steps was set to %s during the run, which keeps %d micro-batches a step. "
                "Set it before train(), or return other micro-batches from prepare_window.",
                accumulation,
                self.plan.micro_batches,
            )
        late = self._late_parameters
        if late is not None and (finds_new or late.is_unfrozen):
            model = self.setup.engine.unwrap(self.setup.model)
            late.check(model, optimizer, self.progress.state.global_step)

    def follow_groups(self, optimizer: Any, scheduler: Any) -> None:
        """Extends the schedule to the parameter groups that the optimizer got since the last step."""
        progress = self.progress
        progress.groups.last = optimizer.param_groups[-1]
        self.has_added_groups |= len(optimizer.param_groups) > progress.groups.num
        progress.groups.num = len(optimizer.param_groups)
        for number in schedules.follow_groups(optimizer, scheduler):
            logger.info(
                "Parameter group %d was added after step %d: its rate is a base rate, to which the first group's "
                "schedule applies.",
                number,
                self.progress.state.global_step,
            )

    def end_pass(self, epoch: int) -> None:
        """Counts an epoch of unknown or wrong length that turned out to be over after its last step."""
        state = self.progress.state
        is_open = self.plan.has_open_end
        is_early = self.setup.loader.has_ended_early and self.setup.behaviour.ended_pass_is_an_epoch
        if (state.epoch or 0) >= epoch + 1 or not (is_open or is_early):
            return
        state.epoch = epoch + 1.0
        if is_open and epoch + 1 == self.plan.num_epochs:
            state.max_steps = state.global_step
            end_after(self._args, state, self.progress.control)

    # -- running -------------------------------------------------------------------------------------------------------

    @contextmanager
    def under_way(self, services: Services) -> Iterator[None]:
        """Wraps a whole training; reports an error in it to the extensions, the writer, uploads and callbacks."""
        self.is_training = True
        try:
            with each_warning_once():
                yield
        except GeneratorExit:  # a loop over `steps()` was left
            services.writer.end_after_failure()
            services.callback_handler.fire("on_train_end", self.progress)
            services.journal.end()
            services.memory_tracker.abandon()
            raise
        except BaseException as error:
            name_extension(error)
            self.extensions.tell_error(error)
            services.writer.end_after_failure()
            services.uploads.abandon_after(error)
            services.callback_handler.fire("on_exception", self.progress, exception=error)
            services.memory_tracker.abandon()
            raise
        finally:
            if self.loader is not None:
                self.loader.close()
            services.callback_handler.makes_room = None
            self.is_training = False
            self.progress.window.current = None
            self.progress.groups.last = None
            self.progress.window.part = None  # it holds the inputs of the last micro-batch

    @contextmanager
    def with_extensions(self) -> Iterator[None]:
        """Wraps a whole training: calls `begin` and `close` of the extensions."""
        try:
            for listen in self.extensions.open:
                listen(self)
            yield
        except BaseException as error:
            name_extension(error)
            self.extensions.end(error)
            raise
        self.extensions.end()

    def tell_micro_batch(self, loss: Any, inputs: Batch, num_items: torch.Tensor | int | None) -> torch.Tensor | None:
        """Reports a forward pass to the extensions; returns the first gradient of its backward pass, None for 1."""
        batch = MicroBatch(self, inputs, loss, num_items)
        if self.outputs is not None:
            batch.outputs, batch.model_inputs = self.outputs
            self.outputs = None
        for listen in self.extensions.micro_batch:
            listen(batch)
        return batch.first_gradient

    def check_not_training(self, called: str = "train") -> None:
        """Raises NestedCallError if a callback, a hook or the body of a loop starts another run of its own trainer."""
        if self.is_training:
            raise NestedCallError(
                f"{called}() was called while this trainer is training (step {self.progress.state.global_step}), for "
                "example from a callback. End the first training with control.should_training_stop = True and call "
                f"{called}() after it has ended, or make another Trainer. If a loop over steps() was left, end it with "
                "close() on its iterator."
            )

    def check_not_evaluating(self) -> None:
        """Raises NestedCallError if compute_metrics or a hook of an evaluation calls `evaluate()`."""
        if self.is_evaluating:
            raise NestedCallError(
                "evaluate() was called while this trainer is evaluating, for example from compute_metrics. Compute the "
                "metrics from the given predictions; evaluate another set in on_evaluate of a callback, "
                "or pass several sets as eval_dataset={'name': dataset}."
            )

    def begin_epoch(self) -> None:
        """Starts a new epoch without a state kept by the model."""
        self.forward = self._fresh_forward()

    def begin_evaluation(self, model: Model, optimizer: Any) -> None:
        """Switches to evaluation mode, without a trace for later training."""
        if self.is_dry:
            model_modes.eval_mode(model, None)
        elif not self.is_training:
            model_modes.eval_mode(model, optimizer)
        elif self.eval_mode_guard is None:
            self.eval_mode_guard = model_modes.EvalModeGuard(model, optimizer)

    def end_evaluation(self, model: Model, optimizer: Any) -> None:
        """Restores the training modes; sets training mode everywhere if other code left evaluation mode on."""
        if self.eval_mode_guard is None:
            model_modes.train_mode(model, optimizer)
            return
        self.eval_mode_guard.end(model, optimizer)
        self.eval_mode_guard = None

    @contextmanager
    def evaluating(self, rule: LossRule, device: torch.device) -> Iterator[None]:
        """Makes losses as in one process; recorded numbers and a kept state of the model are the evaluation's."""
        before = self.losses.rule, self.forward, self.is_evaluating
        self.losses.rule = rule.for_one_process()
        self.forward = self._fresh_forward()
        self.is_evaluating = True
        try:
            with self.progress.recording_apart(device):
                yield
        finally:
            self.losses.rule, self.forward, self.is_evaluating = before

    def _fresh_forward(self) -> Forward:
        fresh: Callable[[], Forward] | None = getattr(self.forward, "fresh", None)
        return self.forward if fresh is None else fresh()

    def scale_loss(
        self, output: LossOutput, rule: LossRule, batch: Batch, num_items: Any, *, engine: Engine, micro_batches: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss to differentiate, and its share of the window, logged until the window's items are known."""
        progress = self.progress
        loss = output.loss
        if not stands_in(batch):
            self.record(output)
        share = progress.window.part_of_micro_batch
        if output.num_items is None:
            weighed = rule.apply(loss, batch, num_items, micro_batches=micro_batches, share=share)
            return weighed, weighed
        if micro_batches == share == engine.num_replicas == 1:
            return loss, loss
        loss, items = output.with_items(batch)
        added = loss.detach() * (share / micro_batches)
        progress.meter.by_items.append((added, loss.detach() * items, items))
        return loss * (items * ITEM_SCALE), added

    def evaluated_loss(self, loss: torch.Tensor | LossOutput) -> torch.Tensor:
        """Returns the loss of an evaluation batch, a scalar without its graph; a `LossOutput` is recorded."""
        if isinstance(loss, LossOutput):
            self.record(loss)
            self.progress.recorded.items = loss.num_items
            loss = loss.loss
        loss = loss.detach() if loss.requires_grad else loss
        return loss if loss.dim() == 0 else loss.mean()

    def record(self, output: LossOutput) -> None:
        """Records the metrics of a loss."""
        if self.is_training or self.is_evaluating:
            for name, given in output.recorded().items():
                self.progress.recorded.add(name, **given, step=self.progress.step_under_way)

    def drain_loss(self, *, num_workers: int) -> tuple[float, int]:
        """Returns the mean loss of a step since the last log and the number of non-finite losses; logs data waits."""
        progress = self.progress
        num_steps = progress.state.global_step - progress.step_last_logged
        reading = progress.drain_loss()
        if self._data_wait is not None:
            self._data_wait.tell(num_steps=num_steps, num_workers=num_workers)
        return reading

    def totals(self, num_train_samples: float) -> tuple[float, int, float]:
        """Returns the mean loss of all steps, their number, and the number of samples trained."""
        progress = self.progress
        plan = self.plan
        num_steps = progress.state.global_step - progress.beginning.step
        progress.total_loss += progress.meter.drain().total
        loss = progress.total_loss / max(num_steps, 0.001)
        num_samples = (num_train_samples or plan.num_train_samples) * num_steps / max(progress.state.max_steps, 1)
        if plan.has_open_end:
            progress.state.max_steps = progress.state.global_step
            num_samples = num_steps * plan.total_batch_size
        return loss, num_steps, (0 if self.loader is None else self.loader.position.num_formed) or num_samples

    # -- for checkpoints -----------------------------------------------------------------------------------------------

    def cursor(self) -> dict[str, Any] | None:
        """The position in the data, in samples; None if there is none."""
        if self.loader is None or not self.has_plan:
            return None
        progress = self.progress
        plan = self.plan
        cursor = self.loader.cursor(progress.epoch, progress.batches_in_epoch, batches_per_epoch=plan.batches_per_epoch)
        size = {"batch_size": self.batch_size, "micro_batches": plan.micro_batches, "chunk": self.loader.position.chunk}
        parts = {} if progress.window.num_parts == 1 else {"num_parts": progress.window.num_parts}
        return {**cursor.to_dict(), **size, **parts, "shift": plan.shift, "left_out": plan.num_left_out}

    def loader_states(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Random states of the loader, stored with the states of the process, and its data position.

        During an evaluation also the states of the process from before it, with which training continues.
        """
        if self.loader is None:
            return {}, None
        state = self.loader.state()
        states = dict(self._states_of_training)
        states |= {name: getattr(state, field) for field, name in rng.LOADER_STATES.items()}
        if state.before_given is None:
            del states[rng.LOADER_STATES["before_given"]]
        return states, state.position
