"""TrainingRun: everything that belongs to one `train()`. It is made when training begins and dropped when it ends.

Before the first `train()` and after the last there is an idle one, with the record and the position of the run before.
Pickles and copies of a trainer are made here too: they keep the record of its run, and get services anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from trainwright._types import (
    Batch,
    DataLoaderLike,
    DatasetLike,
    JSONObject,
    Model,
    Optimizer,
    Trial,
    counted,
    has_length,
    is_count,
    is_instance_of,
)
from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.callbacks.flow import TimeLimits, end_after
from trainwright.checkpoint import rng, training_state
from trainwright.checkpoint.lease import Lease, NullLease, take
from trainwright.config import resolve
from trainwright.config.behaviour import behaviour_of
from trainwright.config.fields import value_of
from trainwright.config.plans import StepPlan
from trainwright.data.cursor import Cursor, WindowSize, plan_resume
from trainwright.data.loader import Loader
from trainwright.data.positions import position_of
from trainwright.data.prepared_dataloader import make_prefetcher
from trainwright.data.quarantine import QUARANTINE_NAME, Sample, add_to_quarantine, read_quarantine
from trainwright.engine.base import Engine
from trainwright.errors import DataError, NestedCallError
from trainwright.extensions.guard.diagnosis import find_bad_parts_anywhere
from trainwright.extensions.guard.incidents import Incident, NullRecorder
from trainwright.extensions.guard.rollback import make_rollback
from trainwright.extensions.guard.step_guard import NULL_GUARD, make_guard
from trainwright.loop.context import LoopContext, RunStart
from trainwright.loop.driven import DrivenSteps
from trainwright.loop.micro_batch_retry import MicroBatchRetry
from trainwright.optim import schedules
from trainwright.run import input_pipeline, resume
from trainwright.run.build import Services, time_limits
from trainwright.run.console import DataWait
from trainwright.run.resume import CheckpointArguments, PendingActions
from trainwright.state.forward_states import ForwardStates
from trainwright.state.run_state import RunState
from trainwright.state.throughput import FlopEstimator
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support import model_modes
from trainwright.support.hooks import Events, FirstStepObserver, Recorder, StepGuard
from trainwright.support.log_handler import each_warning_once
from trainwright.support.loss_normalization import ITEM_SCALE, LossOutput, LossRule, stands_in

if TYPE_CHECKING:
    from trainwright.run.curriculum import CurriculumRun
    from trainwright.run.sample_losses import SampleLosses

logger = logging.getLogger(__name__)

Forward = Callable[[Any, Batch], Any]


def run_model(model: Model, inputs: Batch) -> Any:
    """The forward pass of a model that keeps nothing from one batch to the next."""
    return model(**inputs)


def forward_pass(args: Any) -> Forward:
    """Forward pass of a run: with `past_index` a state goes from one batch to the next."""
    if getattr(args, "past_index", -1) < 0:
        return run_model
    from trainwright.support.patches import RecurrentForward

    return RecurrentForward(args.past_index)


class TrainingRun:
    """State of one `train()`."""

    def __init__(
        self, progress: RunState, forward: Forward = run_model, *, trial: Trial = None, is_dry: bool = False
    ) -> None:
        self.progress = progress  # the record, the flags, the loss and the clock
        self.forward = forward  # runs a batch through the model
        self.trial = trial  # of a search; None outside of one
        self.is_dry = is_dry  # nothing of it may be noticed outside: no events, no trace in the optimizer
        self.run_id = resume.new_run_id()  # whose checkpoints it writes; a resume goes on with the id of its checkpoint
        self.is_training = False  # between the beginning and the end of `train()`
        self.has_begun = False  # all that is checked before its first step is done
        self.is_evaluating = False  # inside of an evaluation loop
        self.plan: StepPlan | None = None  # how far it goes; None while that is not known
        self.loader: Loader | None = None  # its batches, from any position
        self.batch_size = 0  # samples of a micro-batch, per device
        self.loss_rule: LossRule | None = None  # the arithmetic of its loss, settled when it starts; None: each step
        self.context: LoopContext | None = None  # what the loop works with
        self.guard: StepGuard = NULL_GUARD  # decides about its updates
        self.recorder: Recorder = NullRecorder()  # writes bundles of its incidents
        self.pending_actions = PendingActions()  # what its checkpoint's run was about to do
        self.resumed_from: Path | None = None  # the checkpoint that it resumes from
        self.checkpoint_args: CheckpointArguments | None = None  # its arguments
        self.changed_args: list[str] = []  # what differs from them, as lines
        self.lease: Lease | NullLease = NullLease()  # its claim on the directory where it saves
        self.eval_mode_guard: model_modes.EvalModeGuard | None = None  # how training left the model, until a step
        self.samples: SampleLosses | None = None  # losses of single samples; None: nobody asks for them
        self.curriculum: CurriculumRun | None = None  # asks for weights of samples; None: nothing changes their order
        self.quarantined: set[Sample] = set()  # samples that are left out since it began
        self.noise_handle: Any = None  # of the hook that adds noise to the embeddings, while there is one
        self.flops = FlopEstimator()  # estimates the operations of a micro-batch
        self.driven_steps: DrivenSteps[Any] | None = None  # of `fit_step`, under way or at their end
        self._data_wait: DataWait | None = None
        self.levers: JSONObject | None = None  # what `speed` chose, and why
        self.resume_note = ""  # what a resume in batches of another size changes, in words

    @classmethod
    def after(cls, before: TrainingRun, args: Any, trial: Trial = None) -> TrainingRun:
        """A run that starts from nothing; record and flags are those of the one before until it makes its own."""
        return cls(RunState(before.progress.state, before.progress.control), forward_pass(args), trial=trial)

    @classmethod
    def idle(cls, args: Any, state: TrainerState | None = None) -> TrainingRun:
        """The run of a trainer that has not trained."""
        return cls(RunState(TrainerState() if state is None else state, TrainerControl()), forward_pass(args))

    def ended(self, before: TrainingRun) -> TrainingRun:
        """Returns what stays: record and position, to write a checkpoint after all; of a dry run the one `before`."""
        if self.is_dry:
            return before
        idle = TrainingRun(self.progress, self._fresh_forward(), trial=self.trial)
        idle.run_id, idle.plan, idle.loader, idle.batch_size = self.run_id, self.plan, self.loader, self.batch_size
        return idle

    def rehearsal(self, model: Model) -> TrainingRun:
        """A dry run of an evaluation from here; `model` is in evaluation mode until its guard ends."""
        progress = RunState(self.progress.state, self.progress.control)
        dry = TrainingRun(progress, self._fresh_forward(), trial=self.trial, is_dry=True)
        dry.is_training, dry.loss_rule = self.is_training, self.loss_rule
        dry.eval_mode_guard = model_modes.EvalModeGuard(model, None)
        return dry

    def events(self, handler: Events) -> Events:
        """Returns what an evaluation tells of itself: to `handler`, in a dry run to nobody."""
        if not self.is_dry:
            return handler
        from trainwright.run.dry_run import SilentEvents

        return SilentEvents()

    @contextmanager
    def alone_in(self, folder: str, args: Any, engine: Engine) -> Iterator[None]:
        """Around a training: no other run saves into the directory, else an ArgumentError. All processes call it."""
        self.lease = lease = Lease(folder)
        try:
            if resolve.checkpoint(args).may_save:
                take(lease, engine.agree, folder=folder, wait_s=value_of(args, "output_dir_wait_s"))
            yield
        finally:
            self.lease = NullLease()
            lease.release()

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
        """Takes the data in; the plan is that of a fresh run, whose windows are whole if `fills_windows`.

        A signal `rewinds` the loader where its run saves the last step then.
        """
        copies = make_prefetcher(dataloader, engine.device)
        self.loader = Loader(
            dataloader,
            random_state=rng.capture,
            set_random_state=rng.restore,
            copies=copies,
            window=plan.micro_batches if fills_windows else None,
            rewinds=rewinds,
        )
        self.batch_size = batch_size
        self.plan = replace(plan, num_left_out=self.loader.position.num_left_out)
        return self.loader

    def continue_from(self, checkpoint: str | None, args: Any, engine: Engine, dataset: DatasetLike) -> StepPlan:
        """The plan of what is left of a dataset after a checkpoint; of all without one."""
        assert self.plan is not None
        assert self.loader is not None
        chunk = self.batch_size * engine.num_replicas
        self.plan, self.resume_note = resume.remaining_plan(
            self.plan, self.loader, checkpoint, args, chunk=chunk, dataset=dataset
        )
        return self.plan

    def leave_out(self, dataloader: DataLoaderLike, args: Any, engine: Engine, dataset: DatasetLike) -> None:
        """Leaves the samples in quarantine out of a run's epochs, before these are counted. All processes call it."""
        left_out = engine.agree(lambda: read_quarantine(args.output_dir))
        if not left_out:
            return
        position, num_samples = position_of(dataloader), len(dataset) if has_length(dataset) else 0
        position.leave_out(left_out, num_samples)
        what = " Epochs are counted without them." if position.num_left_out else ""
        if not what and not isinstance(dataset, IterableDataset):
            what = " The order is a sampler's or one of batches formed by length: an epoch keeps its number of batches."
        logger.warning(
            "In quarantine: %s (%s in %s)%s.%s", counted(len(left_out), "sample"), QUARANTINE_NAME, args.output_dir,
            f", of {num_samples} in the training data" if num_samples else "", what,
        )  # fmt: skip

    @property
    def is_shortened(self) -> bool:
        """Returns True if samples came into quarantine since the steps were counted."""
        if self.plan is None or self.loader is None:
            return False
        return self.loader.is_stale or self.plan.num_left_out != self.loader.position.num_left_out

    def shorten(
        self, epoch: int, batches: int | None, args: Any, *, count: Callable[[], StepPlan], is_own: bool
    ) -> StepPlan:
        """Leaves samples in quarantine out after some batches of an epoch, and counts the steps of the run anew.

        `batches` is None where the epoch begins. `count` returns the plan of a fresh run. `is_own`: the schedule is the
        user's, and stays as it is.
        """
        assert self.context is not None
        assert self.loader is not None
        before, step = self.context.plan, self.progress.state.global_step
        start = self.context.start
        if batches is None:
            batches = start.batches if epoch == start.epoch else 0
        batches = self.loader.refresh(epoch, batches, window=before.micro_batches)
        plan = replace(count(), num_left_out=self.loader.position.num_left_out)
        size = WindowSize(chunk=plan.total_batch_size, micro_batches=plan.micro_batches)
        here = Cursor(epoch=epoch, samples=0, shift=before.shift, left_out=before.num_left_out)
        plan, _ = plan_resume(
            plan, here, step=step, batches_left=plan.batches_per_epoch - batches, before=size, now=size,
            counts_epochs=args.max_steps <= 0,
        )  # fmt: skip
        self.progress.batches_in_epoch = batches
        if epoch == start.epoch:
            start = replace(start, batches=batches)
        self.progress.more_epochs += max(plan.num_epochs - before.num_epochs, 0)
        self.progress.state.max_steps, self.progress.state.num_train_epochs = plan.max_steps, plan.num_epochs
        if not is_own:
            resume.continue_schedule(self.context.scheduler, args, before=before.max_steps, now=plan.max_steps)
        self.plan, self.context = plan, replace(self.context, plan=plan, start=start)
        if plan.max_steps <= step:
            end_after(args, self.progress.state, self.progress.control)
        if plan.num_left_out != before.num_left_out:
            logger.warning(
                "In quarantine: %s. Epochs are of %s from step %d on, and the run of %s.",
                counted(plan.num_left_out, "sample"), counted(plan.num_examples, "sample"), step + 1,
                counted(plan.max_steps, "step"),
            )  # fmt: skip
        return plan

    def quarantine(self, samples: Iterable[Any], args: Any, dataset: DatasetLike, column: str | None) -> None:
        """Adds samples to the quarantine, of this run too; see `Trainer.quarantine`."""
        num_samples = len(dataset) if has_length(dataset) else 0
        is_endless = num_samples == 0 and isinstance(dataset, IterableDataset)
        found: dict[Sample, None] = {}  # each once, in this order
        for sample in samples:
            if column is not None and type(sample) in (int, str):
                found[column, sample] = None
            elif column is None and is_count(sample) and (is_endless or sample < num_samples):
                found[int(sample)] = None
            else:
                kind = f"a value of the column {column!r}" if column is not None else "the index of a sample"
                has = "" if is_endless or column is not None else f": the training dataset has {num_samples}"
                raise DataError(f"{sample!r} is not {kind}{has}.")
        if self.is_training:
            assert self.loader is not None
            quarantined = read_quarantine(args.output_dir) | self.quarantined | set(found)
            self.loader.leave_out(quarantined, num_samples)
            self.quarantined = quarantined
        if args.should_save:
            add_to_quarantine(args.output_dir, found)

    def load_record(
        self, checkpoint: str | None, args: Any, engine: Engine, *, stateful: list[Any], folder: str, is_own: bool
    ) -> TrainerState:
        """The record, fresh or from a checkpoint; with it the run's id, what is pending, and which arguments differ.

        `folder` is where the run writes; `is_own`: the optimizer is the user's. Raises CheckpointError where it cannot
        be read, is another one for some process, or contradicts the arguments.
        """
        self.progress.state = state = resume.initial_state(checkpoint, stateful)
        self.checkpoint_args = None
        if checkpoint is not None:
            self.checkpoint_args = resume.load_checkpoint_args(checkpoint, args, state, has_own_optimizer=is_own)
        manifest = resume.manifest_of(checkpoint)
        resume.check_same_checkpoint(manifest, checkpoint, engine)
        self.run_id = engine.agree(lambda: resume.run_id_after(checkpoint, folder))
        self.pending_actions = resume.pending_actions(state, manifest)
        if args.auto_find_batch_size and manifest is not None and manifest.cursor is not None:
            self.progress.num_parts = manifest.cursor.get("num_parts") or 1
        return state

    def find_position(self, checkpoint: str, args: Any, engine: Engine, *, steps_per_epoch: int) -> tuple[int, int]:
        """Epoch and batches of it that are done, and the loader prepared to go on from there."""
        assert self.plan is not None
        assert self.loader is not None
        skips, position = not args.ignore_data_skip, None
        if behaviour_of(args).resume_continues_at_data_position:
            position = resume.resume_loader(self.loader, checkpoint, engine, self.plan, skips=skips)
        if position is None:  # transformers wrote it, or would resume it: all that is known is the step
            epoch, steps = divmod(self.progress.state.global_step, steps_per_epoch)
            position = epoch, steps * self.plan.micro_batches if skips else 0
        return position

    def begin(
        self, engine: Engine, args: Any, *, rule: LossRule, start: tuple[int, int], checkpoint: str | None,
        first_look: FirstStepObserver, load_newest: Callable[[], int], count: Callable[[], StepPlan],
        is_own: bool = False, dataset: DatasetLike = None, **parts: Any,
    ) -> LoopContext:  # fmt: skip
        """Starts the clocks; returns what the loop works with, of which `parts` are further fields.

        `load_newest` loads weights, optimizer and schedule of the run's newest checkpoint, and returns its step.
        `count` and `is_own` are those of `shorten`.
        """
        assert self.plan is not None
        self.loss_rule = rule
        stacked = engine.stacked if engine.num_replicas > 1 else None
        self.progress.begin(device=engine.device, skip_non_finite=args.logging_nan_inf_filter, collect=stacked)
        if value_of(args, "incidents"):
            self.progress.forward_states = ForwardStates(
                capture=rng.capture, capture_torch=rng.capture_torch, same=rng.same
            )
        self._data_wait = DataWait(self.progress.clock)
        guards, optimizer = resolve.guard(args), parts["optimizer"]
        scheduler = None if schedules.follows_metrics(parts["scheduler"]) else parts["scheduler"]
        rollback = make_rollback(
            guards, parts["model"], optimizer, scheduler, load_newest=load_newest,
            samples_per_step=self.batch_size * engine.num_replicas * self.plan.micro_batches,
            is_possible=not engine.updates_in_clip,
        )  # fmt: skip

        def report(incident: Incident) -> None:
            if incident.action in ("skip", "rollback"):  # perhaps known only after the step
                self.progress.recorded.drop(incident.step)
            parts["events"].fire("on_incident", self.progress, incident=incident)

        def diagnose(optimizer: Optimizer) -> dict[str, str]:
            return find_bad_parts_anywhere(parts["model"], optimizer, engine.gather_objects)

        self.guard = make_guard(
            guards, report, record=self.recorder.record, optimizer=optimizer, device=engine.device,
            mean=None if stacked is None else lambda loss: stacked(loss).mean(), rollback=rollback,
            was_updated=(lambda: engine.step(optimizer)) if engine.updates_in_clip else None,
            has_scaler=engine.scales_loss, knows_norm=engine.knows_norm,
            diagnose=diagnose,
        )  # fmt: skip
        meeting = self.progress.interrupts.meeting
        if meeting is not None:
            meeting.on_hang = self.recorder.hang
        if checkpoint is not None:
            self.resumed_from = Path(checkpoint)
            self.guard.load(training_state.load_guard(self.resumed_from))
            if engine.replica == 0:  # which had the numbers of all processes
                self.progress.recorded.load(training_state.load_recorded(self.resumed_from))
        self._follow_samples(engine, args, dataset, start)
        if self.curriculum is not None:
            parts["events"].watch(self.curriculum)
        epoch, batches = start
        self.context = LoopContext(
            count_anew=partial(self.shorten, args=args, count=count, is_own=is_own),
            engine=engine, plan=self.plan, rule=rule, guard=self.guard, first_look=first_look,
            start=RunStart(epoch=epoch, batches=batches, checkpoint=checkpoint,
                           owes_evaluation=self.pending_actions.evaluates, owes_save=self.pending_actions.saves),
            follows_metrics=schedules.follows_metrics,
            saves_on_interrupt=resolve.checkpoint(args).saves_on_interrupt,
            random_states=input_pipeline.random_states(args),
            behaviour=behaviour_of(args),
            smaller_batches=MicroBatchRetry(engine, rng) if args.auto_find_batch_size else None,
            **parts,
        )  # fmt: skip
        return self.context

    def _follow_samples(self, engine: Engine, args: Any, dataset: DatasetLike, start: tuple[int, int]) -> None:
        """Takes down the losses of single samples from now on, for the ledger or for the sources of a mixture."""
        wanted = value_of(args, "ledger")
        is_stream = is_instance_of(dataset, "trainwright.data.streaming.mixture_stream", "MixtureStream")
        is_mixture = is_stream or is_instance_of(dataset, "trainwright.data.mixture", "MixtureDataset")
        curriculum = dataset.curriculum if is_mixture and not is_stream else None
        if dataset is None or not (wanted or is_mixture):  # None: a step is only measured
            return
        from trainwright.run.sample_losses import SampleLosses

        assert self.loss_rule is not None
        self.samples = self.progress.recorded.samples = SampleLosses(
            self, self.loss_rule, engine, dataset=dataset, id_column=wanted if isinstance(wanted, str) else None,
            smoothing=args.label_smoothing_factor, keeps_ledger=bool(wanted or curriculum),
            writes=args.should_save and bool(wanted),
        )  # fmt: skip
        if self.resumed_from is not None:
            self.samples.load(self.resumed_from)
        if curriculum is not None:
            from trainwright.run.curriculum import CurriculumRun

            assert self.loader is not None
            assert self.plan is not None
            self.curriculum = CurriculumRun(
                dataset, self.loader, self.samples, engine, plan=self.plan, progress=self.progress,
                keeps_ledger=bool(wanted),
            )  # fmt: skip
            self.curriculum.begin(start, self.resumed_from)

    # -- under way -----------------------------------------------------------------------------------------------------

    @contextmanager
    def under_way(self, services: Services) -> Iterator[None]:
        """Around all of a training; an error in it is told to the writer, the uploads and the callbacks."""
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
            self.recorder.failed(error)
            services.writer.end_after_failure()
            services.uploads.abandon_after(error)
            services.callback_handler.fire("on_exception", self.progress, exception=error)
            services.memory_tracker.abandon()
            raise
        finally:
            self.guard.close()
            if self.loader is not None:
                self.loader.close()
            if self.curriculum is not None:
                services.callback_handler.unwatch(self.curriculum)
            self.is_training, self.recorder, self.progress.window = False, NullRecorder(), None

    def check_not_training(self, called: str = "train") -> None:
        """Raises NestedCallError where a callback, a hook or the body of a loop begins a run of its own trainer."""
        if self.is_training:
            raise NestedCallError(
                f"{called}() was called while this trainer trains (step {self.progress.state.global_step}), for "
                "example from a callback. End the first training with control.should_training_stop = True and call "
                f"{called}() when it has ended, or make another Trainer. A loop over steps() that was left ends with "
                "close() of its iterator."
            )

    def check_not_evaluating(self) -> None:
        """Raises NestedCallError where compute_metrics or a hook of an evaluation calls `evaluate()`."""
        if self.is_evaluating:
            raise NestedCallError(
                "evaluate() was called while this trainer evaluates, for example from compute_metrics. Compute the "
                "metrics from the predictions that it is given; evaluate another set from on_evaluate of a callback, "
                "or pass several sets as eval_dataset={'name': dataset}."
            )

    def begin_epoch(self) -> None:
        """A new epoch starts without a state that the model kept."""
        self.forward = self._fresh_forward()

    def begin_evaluation(self, model: Model, optimizer: Any) -> None:
        """Evaluation mode, of which training finds no trace when it goes on."""
        if self.is_dry:
            model_modes.eval_mode(model, None)
        elif not self.is_training:
            model_modes.eval_mode(model, optimizer)
        elif self.eval_mode_guard is None:
            self.eval_mode_guard = model_modes.EvalModeGuard(model, optimizer)

    def end_evaluation(self, model: Model, optimizer: Any) -> None:
        """Training mode again: as training left it, or of all modules where somebody else left evaluation mode on."""
        if self.eval_mode_guard is None:
            model_modes.train_mode(model, optimizer)
            return
        self.eval_mode_guard.end(model, optimizer)
        self.eval_mode_guard = None

    @contextmanager
    def evaluating(self, rule: LossRule, device: torch.device) -> Iterator[None]:
        """While it lasts, losses are of one process; recorded numbers and a state of the model are the evaluation's."""
        before = self.loss_rule, self.forward, self.is_evaluating
        self.loss_rule, self.forward, self.is_evaluating = rule.of_one_process(), self._fresh_forward(), True
        try:
            with self.progress.recording_apart(device):
                yield
        finally:
            self.loss_rule, self.forward, self.is_evaluating = before

    def _fresh_forward(self) -> Forward:
        fresh: Callable[[], Forward] | None = getattr(self.forward, "fresh", None)
        return self.forward if fresh is None else fresh()

    def weigh(
        self, output: LossOutput, rule: LossRule, batch: Batch, num_items: Any, *, engine: Engine, micro_batches: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss to differentiate, and its share of the window as it is logged until the window's items are known."""
        progress, loss = self.progress, output.loss
        if not stands_in(batch):
            self.record(output)
        share = progress.part_of_micro_batch
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

    def drain_loss(self, *, num_workers: int) -> tuple[float, int, dict[str, float]]:
        """Mean loss of a step since the last log, non-finite ones, recorded numbers; logs the wait for data."""
        progress = self.progress
        num_steps = progress.state.global_step - progress.step_last_logged
        reading = progress.drain_loss()
        if self._data_wait is not None:
            self._data_wait.tell(num_steps=num_steps, num_workers=num_workers)
        return reading

    def finish(self, folder: str, num_train_samples: float) -> tuple[float, int, float]:
        """Mean loss of all steps, their number, and the samples that they trained on; writes the ledger of the run."""
        if self.samples is not None:
            self.samples.write(Path(folder))
        assert self.plan is not None
        progress, plan = self.progress, self.plan
        num_steps = progress.state.global_step - progress.first_step
        progress.total_loss += progress.meter.drain().total
        loss = progress.total_loss / max(num_steps, 0.001)
        num_samples = (num_train_samples or plan.num_train_samples) * num_steps / max(progress.state.max_steps, 1)
        if plan.has_open_end:
            progress.state.max_steps, num_samples = progress.state.global_step, num_steps * plan.total_batch_size
        return loss, num_steps, (0 if self.loader is None else self.loader.position.num_formed) or num_samples

    # -- for checkpoints -----------------------------------------------------------------------------------------------

    def cursor(self) -> dict[str, Any] | None:
        """The position in the data, in samples; None where there is none."""
        if self.loader is None or self.plan is None:
            return None
        progress, plan = self.progress, self.plan
        cursor = self.loader.cursor(progress.epoch, progress.batches_in_epoch, batches_per_epoch=plan.batches_per_epoch)
        size = {"batch_size": self.batch_size, "micro_batches": plan.micro_batches, "chunk": self.loader.position.chunk}
        parts = {} if progress.num_parts == 1 else {"num_parts": progress.num_parts}
        return {**cursor.to_dict(), **size, **parts, "shift": plan.shift, "left_out": plan.num_left_out}

    def loader_states(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Random states of the loader, as they lie beside those of the process, and the position of its data."""
        if self.loader is None:
            return {}, None
        state = self.loader.state()
        states = {"loader_epoch_start": state.epoch_start, "loader_before_ahead": state.before_ahead}
        if state.before_given is not None:
            states["loader_before_given"] = state.before_given
        return states, state.position


# -- pickles and deep copies of a trainer -----------------------------------------------------------------------------


def state_of(trainer: Any) -> dict[str, Any]:  # any Trainer, or a subclass of the user's
    """All of a trainer but its services and its run, of which the callbacks, the record and the flags are kept."""
    from trainwright.trackers.base import TrackerCallback

    made_anew = (TimeLimits, TrackerCallback)  # tied to this process: its writer and engine, threads and clients
    progress = trainer._run.progress
    return {
        "attributes": {name: value for name, value in vars(trainer).items() if name not in ("_services", "_run")},
        "callbacks": [type(c) if isinstance(c, made_anew) else c for c in trainer.callback_handler.callbacks],
        "state": progress.state,
        "control": progress.control,
    }


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Fills a trainer without attributes with what `state_of` returned."""
    vars(trainer).update(state["attributes"])
    args = trainer.args
    trainer._services = services = Services.for_arguments(args)
    trainer._run = run = TrainingRun.idle(args, state["state"])
    run.progress.control = state["control"]
    trainer.create_accelerator_and_postprocess()
    limits = time_limits(args, trainer.model, engine=services.engine, writer=services.writer)
    callbacks = [limits if c is TimeLimits else c for c in state["callbacks"]]
    parts = trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler
    handler = CallbackHandler([c for c in callbacks if c is not None], *parts)
    handler.args = args
    services.use_callbacks(handler, run.progress.clock)
