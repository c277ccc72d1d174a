"""One optimizer step: a window of micro-batches in, one update of the weights out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trainwright._types import Batch
from trainwright.hooks import TrainHooks
from trainwright.loop.context import LoopContext
from trainwright.loop.micro_batch_retry import parts_of
from trainwright.state.run_state import FORWARD, OPTIMIZER, OTHER, RunState
from trainwright.tensor_tree import find_batch_size


@dataclass(frozen=True, slots=True)
class Window:
    """Micro-batches of one optimizer step."""

    batches: list[Batch]  # as the collator made them
    num_items: torch.Tensor | int | None  # label items of the whole window, where somebody asks for them


@dataclass(frozen=True, slots=True)
class Update:
    """Values of a step for the log: both are read back only when something is logged."""

    grad_norm: torch.Tensor | float | None = None
    learning_rate: float | None = None


def take_step(session: LoopContext, run: RunState, hooks: TrainHooks, window: Window, *, epoch: float) -> Update | None:
    """Trains on a window and updates the weights once.

    `epoch` is where the run stands when it is done. Returns None if a callback gave up on the window half-way.
    """
    hooks.current_gradient_accumulation_steps = len(window.batches)
    run.window, run.is_window_trained = window, False
    session.events.fire("on_step_begin", run)
    accumulate = accumulate_gradients if session.smaller_batches is None else accumulate_what_fits
    before = run.meter.count
    if not accumulate(session, run, hooks, window):
        session.engine.zero_grad()
        run.meter.rewind(before)
        return None
    update = update_weights(session, run, hooks)
    run.advance(epoch, num_batches=len(window.batches))
    session.guard.keep(run)
    session.events.fire("on_step_end", run)
    return update


def accumulate_gradients(session: LoopContext, run: RunState, hooks: TrainHooks, window: Window) -> bool:
    """Forward and backward for each micro-batch; False if a callback stopped it."""
    parts = parts_of(window.batches, run.num_parts, needs_shares=session.rule.aux_coefficient != 0.0)
    last = len(parts) - 1
    for i, part in enumerate(parts):
        run.part_of_micro_batch, run.share_of_window = part.of_micro_batch, part.of_window
        run.clock.mark(FORWARD)
        if last:
            session.engine.note_sync(i == last)
        with session.engine.accumulate(session.model, sync=i == last):
            loss = hooks.training_step(session.model, part.inputs, window.num_items)
        run.clock.mark(OTHER)
        run.meter.add(loss)
        run.flos += hooks.floating_point_ops(part.inputs)
        hooks._track_num_input_tokens(part.inputs)
        if i < last:
            session.events.fire("on_substep_end", run)
            if run.should_stop:
                session.engine.note_sync(True)
                return False
    return True


def accumulate_what_fits(session: LoopContext, run: RunState, hooks: TrainHooks, window: Window) -> bool:
    """Accumulates gradients like `accumulate_gradients`, and retries with smaller micro-batches while out of memory."""
    assert session.smaller_batches is not None
    while True:
        before = session.smaller_batches.prepare(run)
        try:
            return accumulate_gradients(session, run, hooks, window)
        except RuntimeError as error:
            largest = max(find_batch_size(batch) or 1 for batch in window.batches)
            session.smaller_batches.take_back(run, before, error, largest)


def update_weights(session: LoopContext, run: RunState, hooks: TrainHooks) -> Update:
    """Clips, steps the optimizer and the schedule, and clears the gradients."""
    model, events = session.model, session.events
    if run.state.global_step == run.first_step:
        session.first_look.gradients(run.meter.total)
    run.clock.mark(OPTIMIZER)
    grad_norm = hooks._clip_grad_norm(model) if session.plan.max_grad_norm > 0 else None
    grad_norm = hooks._get_grad_norm(model, grad_norm=grad_norm)
    events.fire("on_pre_optimizer_step", run)
    is_permitted = session.guard.permits(run, grad_norm)
    run.is_updating = True
    was_applied = is_permitted and session.engine.step(session.optimizer)
    events.fire("on_optimizer_step", run)
    learning_rate = hooks._get_learning_rate()  # the rate of this step, before the schedule moves on
    if was_applied and not session.scheduler_follows_metrics:
        session.scheduler.step()
    session.engine.zero_grad()
    run.clock.mark(OTHER)
    return Update(grad_norm, learning_rate)
