"""The training loop: epochs, and the steps of an epoch with their windows. One optimizer step is in `step.py`."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trainwright._types import Batch, SampleIds, has_length
from trainwright.config.plans import OPEN_END
from trainwright.errors import DataError
from trainwright.loop.extension import Run, name_extension
from trainwright.loop.step import Step, Update, Window, after_step
from trainwright.loop.window import WindowMark, drop_window
from trainwright.state.interrupts import Interrupted
from trainwright.state.progress import DATA, OTHER
from trainwright.support.hooks import TrainHooks

logger = logging.getLogger(__name__)


@contextmanager
def saving_last_step(run: Run, hooks: TrainHooks) -> Iterator[None]:
    """Wraps all steps of a run: if a signal or an error ends it, its last finished step may be saved first."""
    try:
        yield
    except Interrupted:
        save_and_leave(run, hooks)
    except (GeneratorExit, SystemExit, KeyboardInterrupt):  # as for another run in this process, for the same signal
        if run.progress.is_interrupted and not run.progress.is_updating:
            save_at_early_end(run, hooks)
        raise
    except Exception as error:
        name_extension(error)
        if run.setup.random_states is not None:
            save_before_raising(run, hooks, error)
        raise


def epochs(run: Run, hooks: TrainHooks, *, eval_on_start: bool = False) -> Iterator[int]:
    """Yields the epochs from `run.start` to the end of the plan, or until a callback stops the run."""
    setup = run.setup
    progress = run.progress
    setup.engine.zero_grad(setup.model)
    setup.events.fire("on_train_begin", progress)
    if eval_on_start and (run.start.checkpoint is None or not setup.behaviour.resume_is_no_start_to_evaluate):
        hooks._evaluate(setup.trial, setup.ignore_keys_for_eval, skip_scheduler=True)
    if run.start.owes_evaluation:
        run_pending_evaluation(run, hooks)
    first = run.start.epoch
    last_step = max(run.plan.max_steps, 1)  # max_steps=0 trains one step, as in transformers; no epochs train none
    num_epochs = run.plan.num_epochs
    for epoch in itertools.count(first):
        if epoch >= num_epochs + progress.more_epochs:
            break
        is_done = progress.state.global_step >= last_step
        is_resumed = run.start.checkpoint is not None and epoch == first
        if is_resumed and not setup.behaviour.resume_of_finished_run_takes_no_step:
            is_done = False  # the number of steps is only checked after a step
        if is_done or progress.control.should_training_stop:
            break
        setup.events.fire("on_epoch_begin", progress)
        run.check_parameters(hooks.optimizer)
        yield epoch
        if progress.control.should_training_stop:
            break


def iterate_steps(run: Run, hooks: TrainHooks, epoch: int) -> Iterator[Step]:
    """Yields the steps of one epoch, or its remaining steps after a resume. The caller trains each step."""
    progress = run.progress
    run.setup.engine.begin_epoch(run.setup.model)
    skipped = run.start.batches if epoch == run.start.epoch else 0
    progress.begin_epoch(epoch, batches_done=skipped)
    update = Update()
    for window in windows(run, hooks, epoch, skipped):
        step = Step(run, hooks, window, epoch=epoch_after(run, window, epoch))
        for listen in run.extensions.window:
            listen(window.batches)
        yield step
        if step.result is None:
            break
        update = step.result
        progress.interrupts.passes()
        if progress.should_stop:
            break
    if progress.batches_in_epoch == 0 and not progress.should_stop:
        end_without_data(run, hooks, epoch)
    elif run.setup.loader.has_ended:
        run.end_pass(epoch)
    for after_epoch in run.extensions.after_epoch:
        after_epoch(run)
    run.setup.events.fire("on_epoch_end", progress)
    after_step(run, hooks, update, epoch=epoch)


def end_without_data(run: Run, hooks: TrainHooks, epoch: int) -> None:
    """Ends a run if its data yielded no batch in an epoch; saves its last step if the run saves any.

    Raises DataError if no step was trained at all, or `max_steps` of a stream are not done.
    """
    progress = run.progress
    plan = run.plan
    step = progress.state.global_step
    is_empty = step == 0
    if run.setup.saves_on_interrupt and not is_empty and progress.saved_step != step:
        hooks._save_checkpoint(run.setup.model, run.setup.trial)
    if plan.has_open_end:
        aim = ""
        shorter = "num_train_epochs"
    else:
        aim = f" of {plan.max_steps}"
        shorter = "max_steps"
    text = (
        f"The training data yielded no batch in epoch {epoch}; training stops at step {step}{aim}. "
        f"For an exhausted stream, use a dataset that can be iterated again, or a smaller {shorter}."
    )
    is_stream = not has_length(run.setup.loader)
    if is_stream and is_empty:
        raise DataError(f"{text} train_dataset is empty.")
    if is_stream and not plan.has_open_end:
        raise DataError(f"{text} Step {step} is {'' if progress.saved_step == step else 'not '}saved.")
    logger.warning("%s", text)
    progress.control.should_training_stop = True


def epoch_after(run: Run, window: Window, epoch: int) -> float:
    """Returns the epochs done after a window; an epoch of unknown or wrong length counts when it is over.

    If the loader fetches ahead, it knows whether another batch comes, so even an open-ended run knows in advance which
    step is its last. Otherwise `Run.end_pass` counts the epoch after its last step.
    """
    plan = run.plan
    progress = run.progress
    if plan.max_steps != OPEN_END:
        if run.setup.loader.has_ended_early and run.setup.behaviour.ended_pass_is_an_epoch:
            return epoch + 1.0
        return epoch + (progress.batches_in_epoch + window.num_read) / plan.batches_per_epoch
    if not run.setup.loader.has_ended:
        return float(epoch)
    if epoch + 1 == plan.num_epochs:
        progress.state.max_steps = progress.state.global_step + 1
    return epoch + 1.0


def iterate_batches(run: Run, hooks: TrainHooks, epoch: int) -> Iterator[Batch]:
    """Yields the batches of an epoch. At the position of a resume, saved random states are restored."""
    loader = run.setup.loader
    if run.start.checkpoint is None or epoch != run.start.epoch:
        return loader.epoch(epoch)
    if run.start.batches == 0:
        run.restore_random_states(hooks)
        return loader.epoch(epoch)
    return loader.epoch(epoch, skip_batches=run.start.batches, after_first=lambda: run.restore_random_states(hooks))


def windows(run: Run, hooks: TrainHooks, epoch: int, skipped: int) -> Iterator[Window]:
    """Groups micro-batches by optimizer step; the last window of an epoch takes the rest.

    If the samples of the epoch have changed, the rest is recounted and read again.
    """
    loader = run.setup.loader
    batches = iterate_batches(run, hooks, epoch)
    remaining = run.plan.batches_per_epoch - skipped
    while remaining > 0:
        if loader.is_stale:
            trained = run.progress.batches_in_epoch
            run.apply_recount(epoch, trained)
            trained = run.progress.batches_in_epoch
            batches = loader.again(epoch, skip_batches=trained)
            remaining = run.plan.batches_per_epoch - trained
            continue
        size = min(run.plan.micro_batches, remaining)
        samples, num_items = wait_for_data(run, hooks, batches, size)
        if not samples:  # a stream that ended, or an override that stops
            return
        num_read = len(samples)
        remaining -= num_read
        ids: Sequence[SampleIds] = loader.read_ids(samples)
        if run.setup.prepares_windows:
            ids = ()
            samples, num_items = prepared_window(run, hooks, samples)
        is_tail = num_read < size and not run.setup.behaviour.trains_incomplete_window
        yield Window(samples, num_items, num_read, ids, is_tail=is_tail)
        if num_read < size or (run.plan.max_steps == OPEN_END and loader.has_ended):
            return


def wait_for_data(
    run: Run, hooks: TrainHooks, batches: Iterator[Batch], size: int
) -> tuple[list[Batch], torch.Tensor | int | None]:
    """Returns the micro-batches of the next step. A signal ends the wait and rewinds the loader to the last step."""
    progress = run.progress
    progress.clock.mark(DATA)
    before = WindowMark.capture(run, random_states=run.setup.random_states)
    progress.window.start = before
    run.setup.loader.begin_window(before.random_states)
    try:
        progress.interrupts.open()
        window = hooks.get_batch_samples(batches, size, run.setup.engine.device)
        progress.interrupts.close()  # inside the try, since a signal just before it must rewind too
    except Interrupted:
        drop_window(run)
        raise
    except (RuntimeError, OSError, EOFError):  # from workers ended by the signal
        if not progress.is_interrupted:
            raise
        drop_window(run)
        raise Interrupted from None  # a worker's end need not appear as the cause in the traceback
    finally:
        progress.clock.mark(OTHER)
    return window


def prepared_window(run: Run, hooks: TrainHooks, batches: list[Batch]) -> tuple[list[Batch], torch.Tensor | int | None]:
    """Returns the micro-batches that the trainer makes from the batches read, with their label items.

    Signals are only recorded meanwhile: a checkpoint has the states of checkpoint items from the end of a step.
    """
    prepared = list(hooks.prepare_window(batches))
    if not prepared:
        raise DataError("prepare_window returned no micro-batch; a step needs at least one.")
    return prepared, hooks._get_num_items_in_batch(prepared, run.setup.engine.device)


def save_and_leave(run: Run, hooks: TrainHooks) -> None:
    """Saves the last finished step after a signal, then ends the process as the signal asked."""
    save_after_signal(run, hooks)
    run.progress.interrupts.leave()


def save_at_early_end(run: Run, hooks: TrainHooks) -> None:
    """Saves the last finished step of a run that is left during a step, after a signal; a failure is only logged."""
    try:
        if run.progress.step_under_way:
            drop_window(run)
        save_after_signal(run, hooks)
    except Exception as error:
        logger.warning("Step %d could not be saved: %r", run.progress.state.global_step, error)


def save_after_signal(run: Run, hooks: TrainHooks) -> None:
    """Saves the last finished step if the run does so after a signal, and logs whether it is saved."""
    progress = run.progress
    step = progress.state.global_step
    if run.setup.saves_on_interrupt and step > 0 and progress.saved_step != step:
        hooks._save_checkpoint(run.setup.model, run.setup.trial)
    logger.warning(
        "Interrupted by %s after step %d, which is %s. Resume with resume_from_checkpoint=True.",
        signal.Signals(progress.interrupts.received or 0).name,
        step,
        "saved" if progress.saved_step == step else "not saved",
    )


def save_before_raising(run: Run, hooks: TrainHooks, error: Exception) -> None:
    """Saves the last finished step after an error, if the weights are still of that step."""
    progress = run.progress
    step = progress.state.global_step
    if step > 0 and progress.saved_step != step and not progress.is_updating:
        try:
            drop_window(run)
            hooks._save_checkpoint(run.setup.model, run.setup.trial)
        except Exception as second:
            logger.warning("Step %d could not be saved before the error is raised: %r", step, second)
    what = "is saved" if progress.saved_step == step else "is not saved"
    notes = " ".join(["", *getattr(error, "__notes__", ())])
    logger.warning("Training ends with %s after step %d, which %s.%s", type(error).__name__, step, what, notes)


def run_pending_evaluation(run: Run, hooks: TrainHooks) -> None:
    """Runs the evaluation and the save that the checkpoint's run had not done when it was interrupted."""
    run.restore_random_states(hooks)  # an evaluation may draw from the states after the last step
    run.progress.control.should_evaluate = True
    run.progress.control.should_save = run.start.owes_save
    run.progress.evaluation.load(run.start.evaluated_parts, run.progress.control)
    after_step(run, hooks, Update(), epoch=run.start.epoch)
    run.progress.interrupts.passes()
