"""The training loop: epochs, and the steps of an epoch with their windows. One optimizer step is in `step.py`."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trainwright._types import Batch, has_length
from trainwright.errors import DataError
from trainwright.loop.context import LoopContext
from trainwright.loop.step import Step, Update, Window, after_step
from trainwright.loop.window import give_up, mark
from trainwright.state.interrupts import Interrupted
from trainwright.state.run_state import DATA, OTHER, RunState
from trainwright.support.hooks import TrainHooks

logger = logging.getLogger(__name__)


@contextmanager
def saving_last_step(session: LoopContext, run: RunState, hooks: TrainHooks) -> Iterator[None]:
    """Around all steps of a run: one that a signal or an error ends saves its last finished step first."""
    try:
        yield
    except Interrupted:
        save_and_leave(session, run, hooks)
    except (GeneratorExit, SystemExit, KeyboardInterrupt):  # as of another run in this process, for the same signal
        if run.is_interrupted and not run.is_updating:
            save_at_early_end(session, run, hooks)
        raise
    except Exception as error:
        if session.random_states is not None:
            save_before_raising(session, run, hooks, error)
        raise


def epochs(session: LoopContext, run: RunState, hooks: TrainHooks, *, eval_on_start: bool = False) -> Iterator[int]:
    """Yields the epochs from `session.start` to the end of the plan, or until a callback stops the run."""
    session.engine.zero_grad(session.model)
    session.events.fire("on_train_begin", run)
    session.guard.keep(run)
    if eval_on_start:
        hooks._evaluate(session.trial, session.ignore_keys_for_eval, skip_scheduler=True)
    if session.start.owes_evaluation:
        run_pending_evaluation(session, run, hooks)
    last_step = max(session.plan.max_steps, 1)  # max_steps=0 trains one step, as in transformers; no epochs train none
    for epoch in itertools.count(session.start.epoch):
        if epoch >= session.plan.num_epochs + run.more_epochs:
            break
        is_done = run.state.global_step >= last_step
        is_resumed = session.start.checkpoint is not None and epoch == session.start.epoch
        if is_resumed and not session.behaviour.resume_of_finished_run_takes_no_step:
            is_done = False  # the number of steps is only looked at after a step
        if is_done or run.control.should_training_stop:
            break
        session.events.fire("on_epoch_begin", run)
        yield epoch
        if run.control.should_training_stop:
            break


def steps_of_epoch(session: LoopContext, run: RunState, hooks: TrainHooks, epoch: int) -> Iterator[Step]:
    """Yields the steps of one epoch, or of the rest of one after a resume. The caller trains each step."""
    session.engine.begin_epoch(session.model)
    start = session.start
    skipped = start.batches if epoch == start.epoch else 0
    run.begin_epoch(epoch, batches_done=skipped)
    update = Update()
    for current, window in windows(session, run, hooks, epoch, skipped):
        if run.state.global_step == run.first_step:
            current.first_look.window(window.batches)
        step = Step(current, run, hooks, window, epoch=look_ahead(current, run, window, epoch))
        run.forward_states.begin_step(window.batches)
        yield step
        run.forward_states.end_step()
        if step.result is None:
            break
        update = step.result
        run.interrupts.passes()
        if run.should_stop:
            break
    if run.batches_in_epoch == 0 and not run.should_stop:
        end_without_data(session, run, hooks, epoch)
    session.events.fire("on_epoch_end", run)
    after_step(session, run, hooks, update, epoch=epoch)


def end_without_data(session: LoopContext, run: RunState, hooks: TrainHooks, epoch: int) -> None:
    """Ends a run whose data gave no batch in an epoch; its last step is saved where such a run saves.

    Raises DataError where no step was trained at all, or `max_steps` of a stream are not done.
    """
    step, plan = run.state.global_step, session.plan
    is_empty, is_stream = step == 0, not has_length(session.loader)
    if session.saves_on_interrupt and not is_empty and run.saved_step != step:
        hooks._save_checkpoint(session.model, session.trial)
    aim, shorter = ("", "num_train_epochs") if plan.has_open_end else (f" of {plan.max_steps}", "max_steps")
    text = (
        f"The training data gave no batch in epoch {epoch}; training stops at step {step}{aim}. "
        f"A stream that is exhausted needs a dataset that can be iterated again, or a smaller {shorter}."
    )
    if is_stream and (is_empty or not plan.has_open_end):
        what = (
            "train_dataset is empty."
            if is_empty
            else f"Step {step} is {'' if run.saved_step == step else 'not '}saved."
        )
        raise DataError(f"{text} {what}")
    logger.warning("%s", text)
    run.control.should_training_stop = True


def look_ahead(session: LoopContext, run: RunState, window: Window, epoch: int) -> float:
    """Returns the epochs done after a window; those of unknown length count when they are over.

    The loader knows whether another batch comes, so also such a run knows its last step before it takes it.
    """
    plan = session.plan
    if not plan.has_open_end:
        return epoch + (run.batches_in_epoch + window.num_read) / plan.batches_per_epoch
    if not session.loader.has_ended:
        return float(epoch)
    if epoch + 1 == plan.num_epochs:
        run.state.max_steps = run.state.global_step + 1
    return epoch + 1.0


def batches_of(session: LoopContext, hooks: TrainHooks, epoch: int) -> Iterator[Batch]:
    """Yields the batches of an epoch. At the position of a resume the random states are loaded, if saved."""
    start = session.start
    if start.checkpoint is None or epoch != start.epoch:
        return session.loader.epoch(epoch)
    checkpoint = start.checkpoint
    if start.batches == 0:
        hooks._load_rng_state(checkpoint)
        return session.loader.epoch(epoch)
    return session.loader.epoch(
        epoch, skip_batches=start.batches, after_first=lambda: hooks._load_rng_state(checkpoint)
    )


def windows(
    session: LoopContext, run: RunState, hooks: TrainHooks, epoch: int, skipped: int
) -> Iterator[tuple[LoopContext, Window]]:
    """Groups micro-batches by optimizer step; the last window of an epoch takes what is left.

    Where samples come into quarantine, what is left is counted and fetched anew: the context has another plan then.
    """
    batches = batches_of(session, hooks, epoch)
    remaining = session.plan.batches_per_epoch - skipped
    while remaining > 0:
        if session.loader.is_stale:
            session = replace(session, plan=session.count_anew(epoch, run.batches_in_epoch))
            batches = session.loader.again(epoch, skip_batches=run.batches_in_epoch)
            remaining = session.plan.batches_per_epoch - run.batches_in_epoch
            continue
        size = min(session.plan.micro_batches, remaining)
        samples, num_items = wait_for_data(session, run, hooks, batches, size)
        if not samples:  # a stream that ended, or an override that has had enough
            return
        remaining -= len(samples)
        num_read = len(samples)
        if session.prepares_windows:
            samples, num_items = prepared_window(session, hooks, samples)
        is_tail = num_read < size and not session.behaviour.trains_incomplete_window
        yield session, Window(samples, num_items, num_read, is_tail=is_tail)
        if num_read < size or (session.plan.has_open_end and session.loader.has_ended):
            return


def wait_for_data(
    session: LoopContext, run: RunState, hooks: TrainHooks, batches: Iterator[Batch], size: int
) -> tuple[list[Batch], torch.Tensor | int | None]:
    """Returns the micro-batches of the next step. A signal ends the wait and rewinds the loader to the last step."""
    run.clock.mark(DATA)
    run.window_start = mark(session, run, random_states=session.random_states)
    session.loader.begin_window(run.window_start.random_states)
    try:
        run.interrupts.open()
        window = hooks.get_batch_samples(batches, size, session.engine.device)
        run.interrupts.close()  # within the try: a signal just before it must rewind too
    except Interrupted:
        give_up(session, run)
        raise
    except (RuntimeError, OSError, EOFError):  # of workers that the signal has ended
        if not run.is_interrupted:
            raise
        give_up(session, run)
        raise Interrupted from None  # the traceback of the process need not name a worker's end as its cause
    finally:
        run.clock.mark(OTHER)
    return window


def prepared_window(
    session: LoopContext, hooks: TrainHooks, batches: list[Batch]
) -> tuple[list[Batch], torch.Tensor | int | None]:
    """Returns the micro-batches that the trainer makes of those read, with their label items.

    Signals are only noted meanwhile: a checkpoint has the states of checkpoint items from the end of a step.
    """
    prepared = list(hooks.prepare_window(batches))
    if not prepared:
        raise DataError("prepare_window returned no micro-batch; a step needs one at least.")
    return prepared, hooks._get_num_items_in_batch(prepared, session.engine.device)


def save_and_leave(session: LoopContext, run: RunState, hooks: TrainHooks) -> None:
    """Saves the last finished step after a signal, then ends the process as the signal asked."""
    save_after_signal(session, run, hooks)
    run.interrupts.leave()


def save_at_early_end(session: LoopContext, run: RunState, hooks: TrainHooks) -> None:
    """Saves the last finished step of a run that is left in a step, after a signal; a failure is only logged."""
    if run.step_under_way:
        give_up(session, run)
    try:
        save_after_signal(session, run, hooks)
    except Exception as error:
        logger.warning("Step %d could not be saved: %r", run.state.global_step, error)


def save_after_signal(session: LoopContext, run: RunState, hooks: TrainHooks) -> None:
    """Saves the last finished step where the run does so after a signal, and logs whether it is saved."""
    step = run.state.global_step
    if session.saves_on_interrupt and step > 0 and run.saved_step != step:
        hooks._save_checkpoint(session.model, session.trial)
    logger.warning(
        "Interrupted by %s after step %d, which is %s. Resume with resume_from_checkpoint=True.",
        signal.Signals(run.interrupts.received or 0).name, step, "saved" if run.saved_step == step else "not saved",
    )  # fmt: skip


def save_before_raising(session: LoopContext, run: RunState, hooks: TrainHooks, error: Exception) -> None:
    """Saves the last finished step after an error, if the weights are still those of that step."""
    step = run.state.global_step
    if step > 0 and run.saved_step != step and not run.is_updating:
        give_up(session, run)
        try:
            hooks._save_checkpoint(session.model, session.trial)
        except Exception as second:
            logger.warning("Step %d could not be saved before the error is raised: %r", step, second)
    what = "is saved" if run.saved_step == step else "is not saved"
    notes = " ".join(["", *getattr(error, "__notes__", ())])
    logger.warning("Training ends with %s after step %d, which %s.%s", type(error).__name__, step, what, notes)


def run_pending_evaluation(session: LoopContext, run: RunState, hooks: TrainHooks) -> None:
    """Runs the evaluation and the save that the checkpoint's run had not done when it was interrupted."""
    hooks._load_rng_state(session.start.checkpoint)  # an evaluation may draw from where the last step left them
    run.control.should_evaluate, run.control.should_save = True, session.start.owes_save
    after_step(session, run, hooks, Update(), epoch=session.start.epoch)
    run.interrupts.passes()
