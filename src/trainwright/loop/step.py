"""One optimizer step: a window of micro-batches in, one update of the weights out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from trainwright._types import Batch, SampleIds
from trainwright.errors import ModelError
from trainwright.loop.extension import Decision, Run, StepFacts
from trainwright.loop.retry import MicroBatchPart, split_batches
from trainwright.loop.window import WindowMark, drop_window
from trainwright.state.progress import FORWARD, OPTIMIZER, OTHER
from trainwright.support.hooks import TrainHooks
from trainwright.support.loss_normalization import ITEM_SCALE


@dataclass(frozen=True, slots=True)
class Window:
    """Micro-batches of one optimizer step."""

    batches: list[Batch]  # as the collator made them
    num_items: torch.Tensor | int | None  # label items of the whole window; None if not counted
    num_read: int = 0  # number of data batches used; `prepare_window` may have made more or fewer of them
    # Ids of the samples of each micro-batch; empty if unknown, or if the batches are not the ones read.
    sample_ids: Sequence[SampleIds] = ()
    # Divisor of losses times their items, once known: items of all processes, divided by the number of processes.
    divisor: torch.Tensor | None = None
    is_tail: bool = False  # the data did not fill it: gradients are added to the next pass, without an update


@dataclass(frozen=True, slots=True)
class Update:
    """Values of a step for the log: both are only read back when something is logged."""

    grad_norm: torch.Tensor | float | None = None
    learning_rate: float | None = None


class Step:
    """One optimizer step. Its caller trains the micro-batches, adds their losses, and calls `update`.

    Constructing it begins the step. `epoch` is the run's epoch once the step is done.
    """

    __slots__ = (
        "_before",
        "_epoch",
        "_hooks",
        "_run",
        "_window",
        "add",
        "is_over",
        "is_whole",
        "keeps_loss",
        "loss",
        "model",
        "num_items",
        "number",
        "result",
    )

    def __init__(self, run: Run, hooks: TrainHooks, window: Window, *, epoch: float) -> None:
        self._run = run
        self._hooks = hooks
        self._window = window
        self._epoch = epoch
        self._before: WindowMark | None = None  # before the micro-batches, if they may be repeated
        progress = run.progress
        self.model = run.setup.model
        self.num_items = window.num_items
        self.number = progress.state.global_step + 1
        self.is_whole = False  # all micro-batches are trained
        self.is_over = False  # the weights are updated, or the update was refused
        self.keeps_loss = False  # keep `loss`: the sum of the losses of its micro-batches, on the device
        self.loss: torch.Tensor | None = None
        self.result: Update | None = None  # set by the update; also None if a callback dropped the window
        self.add = progress.meter.add  # adds the detached loss of a micro-batch
        hooks.current_gradient_accumulation_steps = len(window.batches)
        progress.window.current = window
        progress.window.is_trained = False
        run.setup.events.fire("on_step_begin", progress)

    @property
    def micro_batches(self) -> Iterator[Batch]:
        """Yields the micro-batches as collated, each within the contexts of its forward and backward passes.

        Ends before the last one if a callback stops the epoch or the run; `update` then drops the window.
        """
        run = self._run
        setup = run.setup
        progress = run.progress
        self.is_whole = False
        if setup.smaller_batches is not None:
            self._before = WindowMark.capture(run, random_states=setup.smaller_batches.random_states)
        if progress.window.num_parts == 1 and setup.rule.aux_coefficient == 0.0:
            parts = [MicroBatchPart(batch, number=number) for number, batch in enumerate(self._window.batches)]
        else:
            parts = split_batches(self._window.batches, progress.window.num_parts)
        last = len(parts) - 1
        for i, part in enumerate(parts):
            progress.window.part = part
            progress.window.part_of_micro_batch = part.of_micro_batch
            progress.window.share = part.of_window
            progress.clock.mark(FORWARD)
            if last:
                setup.engine.note_sync(i == last)
            context = setup.engine.accumulate(setup.model, sync=i == last)
            with context if setup.step_contexts is None else within(context, *setup.step_contexts()):
                yield part.inputs
            progress.clock.mark(OTHER)
            progress.flos += self._hooks.floating_point_ops(part.inputs)
            self._hooks._track_num_input_tokens(part.inputs)
            if i < last:
                setup.events.fire("on_substep_end", progress)
                if progress.should_stop:
                    setup.engine.note_sync(True)
                    return
        self.is_whole = True

    def retries_smaller(self, error: RuntimeError) -> bool:
        """Returns True if an error before the update is undone: the window is repeated (`auto_find_batch_size`)."""
        progress = self._run.progress
        retry = self._run.setup.smaller_batches
        before = self._before
        if retry is None or before is None or progress.is_updating or progress.window.is_trained:
            return False
        if self.is_whole and self._run.setup.engine.updates_in_clip:
            return False
        if not retry.can_cut(progress, error, self._window.batches):
            return False
        before.rewind(self._run, random_states=retry.random_states)
        retry.cut(progress)
        self._hooks._update_auto_batch_size(retry.batch_size(progress, self._window.batches))
        return True

    def update(self) -> None:
        """Updates the weights once, counts the step, and then logs, evaluates and saves if due."""
        run = self._run
        progress = run.progress
        if self.keeps_loss:
            self.loss = progress.meter.sum_step()
        if self._window.is_tail and self.is_whole:
            run.setup.events.fire("on_substep_end", progress)
            progress.batches_in_epoch += self._window.num_read
        elif self.is_whole:
            self.result = update_weights(run, self._hooks)
            progress.advance(self._epoch, num_batches=self._window.num_read)
            for after in run.extensions.after_step:
                after(run)
            run.setup.events.fire("on_step_end", progress)
            after_step(run, self._hooks, self.result, epoch=progress.epoch)
        else:
            drop_window(run)
            progress.window.current = None
        self.is_over = True


@contextmanager
def within(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    """Enters contexts from left to right."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def update_weights(run: Run, hooks: TrainHooks) -> Update:
    """Clips, steps the optimizer and the schedule, and clears the gradients."""
    setup = run.setup
    progress = run.progress
    if progress.meter.by_items:
        divide_by_items(run)
    progress.clock.mark(OPTIMIZER)
    grad_norm = hooks._clip_grad_norm(setup.model) if run.plan.max_grad_norm > 0 else None
    grad_norm = hooks._get_grad_norm(setup.model, grad_norm=grad_norm)
    setup.events.fire("on_pre_optimizer_step", progress)
    optimizer = hooks.optimizer  # read now, like the schedule: a callback may have replaced them
    scheduler = None if setup.follows_metrics(hooks.lr_scheduler) else hooks.lr_scheduler
    is_permitted = True
    if run.extensions.decide:
        is_permitted = is_update_made(run, StepFacts(run, grad_norm, optimizer, scheduler))
    if optimizer.param_groups[-1] is not progress.groups.last:  # without a call: it is asked in each step
        run.follow_groups(optimizer, hooks.lr_scheduler)
    progress.is_updating = True
    was_applied = is_permitted and setup.engine.step(optimizer)
    setup.events.fire("on_optimizer_step", progress)
    if optimizer.param_groups[-1] is not progress.groups.last:  # without a call: it is asked in each step
        run.follow_groups(optimizer, hooks.lr_scheduler)
    learning_rate = hooks._get_learning_rate()  # the rate of this step, before the schedule's step
    if was_applied and scheduler is not None:
        scheduler.step()
    setup.engine.zero_grad(setup.model)
    progress.clock.mark(OTHER)
    return Update(grad_norm, learning_rate)


def is_update_made(run: Run, facts: StepFacts) -> bool:
    """Asks the extensions about an update, and informs them if it is refused."""
    decision = run.extensions.decision(facts)
    if decision is Decision.APPLY:
        return True
    if decision is Decision.STOP:
        run.progress.control.should_training_stop = True
    run.extensions.refuse(facts.step)
    return False


def after_step(run: Run, hooks: TrainHooks, update: Update, *, epoch: int) -> None:
    """Calls the hook that logs, evaluates and saves after an optimizer step."""
    hooks._maybe_log_save_evaluate(
        run.progress.meter.total,
        update.grad_norm,
        run.setup.model,
        run.setup.trial,
        epoch,
        run.setup.ignore_keys_for_eval,
        run.progress.beginning.time,
        learning_rate=update.learning_rate,
    )


def divide_by_items(run: Run) -> None:
    """Divides gradients and losses of a window by its items over all processes, if each loss reported its own."""
    progress = run.progress
    engine = run.setup.engine
    losses = progress.meter.by_items
    if progress.window.num_parts == 1 and len(losses) != len(progress.window.current.batches):
        raise ModelError(
            f"{len(losses)} of the {len(progress.window.current.batches)} micro-batches of step "
            f"{progress.state.global_step + 1} have a LossOutput with num_items. Return one for each micro-batch, or "
            "for none."
        )
    num_items = torch.stack([items for *_, items in losses]).sum()
    if engine.num_replicas > 1:
        num_items = engine.sum(num_items)
    divisor = num_items.clamp(min=torch.finfo().tiny) / engine.num_replicas
    engine.scale_gradients(run.setup.model, 1 / (divisor * ITEM_SCALE))
    progress.meter.divide_by_items(divisor)
    progress.window.current = replace(progress.window.current, divisor=divisor)
