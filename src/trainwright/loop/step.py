"""One optimizer step: a window of micro-batches in, one update of the weights out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from trainwright._types import Batch
from trainwright.errors import ModelError
from trainwright.loop.context import LoopContext
from trainwright.loop.micro_batch_retry import parts_of
from trainwright.loop.window import WindowMark, give_up, mark, rewind
from trainwright.state.run_state import FORWARD, OPTIMIZER, OTHER, RunState
from trainwright.support.hooks import TrainHooks
from trainwright.support.loss_normalization import ITEM_SCALE


@dataclass(frozen=True, slots=True)
class Window:
    """Micro-batches of one optimizer step."""

    batches: list[Batch]  # as the collator made them
    num_items: torch.Tensor | int | None  # label items of the whole window, where somebody asks for them
    num_read: int = 0  # batches of the data that it took; `prepare_window` may have made more or fewer of them
    # what losses times their items are divided by, once it is known: items of all, by the number of processes
    divisor: torch.Tensor | None = None
    is_tail: bool = False  # the data did not fill it: its gradients are added to those of the next pass, without update


@dataclass(frozen=True, slots=True)
class Update:
    """Values of a step for the log: both are read back only when something is logged."""

    grad_norm: torch.Tensor | float | None = None
    learning_rate: float | None = None


class Step:
    """One optimizer step. Its caller trains the micro-batches, adds their losses, and calls `update`.

    Making it begins the step. `epoch` is where the run stands when the step is done.
    """

    __slots__ = (
        "_before", "_epoch", "_hooks", "_run", "_session", "_window", "add", "is_over", "is_whole", "keeps_loss",
        "loss", "model", "num_items", "number", "result",
    )  # fmt: skip

    def __init__(self, session: LoopContext, run: RunState, hooks: TrainHooks, window: Window, *, epoch: float) -> None:
        self._session, self._run, self._hooks, self._window, self._epoch = session, run, hooks, window, epoch
        self._before: WindowMark | None = None  # this run before the micro-batches, where they may come again
        self.model, self.num_items = session.model, window.num_items
        self.number = run.state.global_step + 1
        self.is_whole = self.is_over = False  # all micro-batches are trained; the weights are updated, or left alone
        self.keeps_loss = False  # `loss` is wanted: the sum of the losses of its micro-batches, on the device
        self.loss: torch.Tensor | None = None
        self.result: Update | None = None  # of the update; None also where a callback gave up on the window
        self.add = run.meter.add  # takes the loss of a micro-batch, detached
        hooks.current_gradient_accumulation_steps = len(window.batches)
        run.window, run.is_window_trained = window, False
        session.events.fire("on_step_begin", run)

    @property
    def micro_batches(self) -> Iterator[Batch]:
        """Yields the micro-batches as the collator made them, each within the contexts of its forward and backward.

        Ends before the last one where a callback stops the epoch or the run; `update` then drops the window.
        """
        session, run, hooks = self._session, self._run, self._hooks
        self.is_whole = False
        if session.smaller_batches is not None:
            self._before = mark(session, run, random_states=session.smaller_batches.random_states)
        parts = parts_of(self._window.batches, run.num_parts, needs_shares=session.rule.aux_coefficient != 0.0)
        last = len(parts) - 1
        for i, part in enumerate(parts):
            run.part_of_micro_batch, run.share_of_window = part.of_micro_batch, part.of_window
            run.clock.mark(FORWARD)
            if last:
                session.engine.note_sync(i == last)
            context = session.engine.accumulate(session.model, sync=i == last)
            with context if session.step_contexts is None else within(context, *session.step_contexts()):
                yield part.inputs
            run.clock.mark(OTHER)
            run.flos += hooks.floating_point_ops(part.inputs)
            hooks._track_num_input_tokens(part.inputs)
            if i < last:
                session.events.fire("on_substep_end", run)
                if run.should_stop:
                    session.engine.note_sync(True)
                    return
        self.is_whole = True

    def retries_smaller(self, error: RuntimeError) -> bool:
        """Returns True if an error before the update is undone: the window comes again (`auto_find_batch_size`)."""
        session, run = self._session, self._run
        retry, before = session.smaller_batches, self._before
        if retry is None or before is None or run.is_updating or run.is_window_trained:
            return False
        if (self.is_whole and session.engine.updates_in_clip) or not retry.can_cut(run, error, self._window.batches):
            return False
        rewind(session, run, before, random_states=retry.random_states)
        retry.cut(run)
        return True

    def update(self) -> None:
        """Updates the weights once, counts the step, and does what is due after it: logs, evaluation, save."""
        session, run, hooks = self._session, self._run, self._hooks
        if self.keeps_loss:
            self.loss = run.meter.of_this_step()
        if self._window.is_tail and self.is_whole:
            session.events.fire("on_substep_end", run)
            run.batches_in_epoch += self._window.num_read
        elif self.is_whole:
            self.result = update_weights(session, run, hooks)
            run.advance(self._epoch, num_batches=self._window.num_read)
            session.guard.keep(run)
            session.events.fire("on_step_end", run)
            after_step(session, run, hooks, self.result, epoch=run.epoch)
        else:
            give_up(session, run)
            run.window = None
        self.is_over = True


@contextmanager
def within(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    """Enters contexts from left to right."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def update_weights(session: LoopContext, run: RunState, hooks: TrainHooks) -> Update:
    """Clips, steps the optimizer and the schedule, and clears the gradients."""
    model, events = session.model, session.events
    if run.meter.by_items:
        divide_by_items(session, run)
    if run.state.global_step == run.first_step:
        session.first_look.gradients(run.meter.total)
    run.clock.mark(OPTIMIZER)
    grad_norm = hooks._clip_grad_norm(model) if session.plan.max_grad_norm > 0 else None
    grad_norm = hooks._get_grad_norm(model, grad_norm=grad_norm)
    events.fire("on_pre_optimizer_step", run)
    optimizer = hooks.optimizer  # read now, and the schedule too: a callback may have replaced them
    scheduler = None if session.follows_metrics(hooks.lr_scheduler) else hooks.lr_scheduler
    is_permitted = session.guard.permits(run, grad_norm, optimizer=optimizer, scheduler=scheduler)
    if not is_permitted:
        run.recorded.drop(run.step_under_way)
    run.is_updating = True
    was_applied = is_permitted and session.engine.step(optimizer)
    events.fire("on_optimizer_step", run)
    learning_rate = hooks._get_learning_rate()  # the rate of this step, before the schedule moves on
    if was_applied and scheduler is not None:
        scheduler.step()
    session.engine.zero_grad(model)
    run.clock.mark(OTHER)
    return Update(grad_norm, learning_rate)


def after_step(session: LoopContext, run: RunState, hooks: TrainHooks, update: Update, *, epoch: int) -> None:
    """Calls the hook that logs, evaluates and saves after an optimizer step."""
    hooks._maybe_log_save_evaluate(
        run.meter.total,
        update.grad_norm,
        session.model,
        session.trial,
        epoch,
        session.ignore_keys_for_eval,
        run.start_time,
        learning_rate=update.learning_rate,
    )


def divide_by_items(session: LoopContext, run: RunState) -> None:
    """Divides gradients and losses of a window by its items over all processes, where each loss has said its own."""
    losses, engine = run.meter.by_items, session.engine
    if run.num_parts == 1 and len(losses) != len(run.window.batches):
        raise ModelError(
            f"{len(losses)} of the {len(run.window.batches)} micro-batches of step {run.state.global_step + 1} have a "
            "LossOutput with num_items. Return one for each micro-batch, or for none."
        )
    num_items = torch.stack([items for *_, items in losses]).sum()
    num_items = (engine.sum(num_items) if engine.num_replicas > 1 else num_items).clamp(min=torch.finfo().tiny)
    divisor = num_items / engine.num_replicas
    engine.scale_gradients(session.model, 1 / (divisor * ITEM_SCALE))
    run.meter.divide_by_items(divisor)
    run.window = replace(run.window, divisor=divisor)
