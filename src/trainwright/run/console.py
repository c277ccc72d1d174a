"""Console output of a run: its header, the journal, the time breakdown, the wait for data."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trainwright._types import Model, counted, is_instance_of, printable
from trainwright.config import rules
from trainwright.config.fields import batching_fields, get_value
from trainwright.config.plans import StepPlan
from trainwright.config.rules.stages import RunFacts
from trainwright.data.sources import list_handlers
from trainwright.engine.base import Engine
from trainwright.journal.record import FileJournal, Journal, JournalListener, NullJournal, collect_run_facts
from trainwright.loop.extension import Run
from trainwright.state import progress
from trainwright.state.trainer_state import TrainerState
from trainwright.support import model_facts
from trainwright.support.log_handler import fold_line

logger = logging.getLogger(__name__)

MUCH_WAITING = 0.2  # share of the time since the last log
ENOUGH_S = 1.0  # less is start-up: the first batch, workers starting


def log_run_header(
    run: Run,
    args: Any,
    state: TrainerState,
    engine: Engine,
    *,
    note: str,
    loss_note: str,
    changed_args: Iterable[object],
    begins_branch: bool = False,
    has_own_optimizer: bool = False,
    has_own_schedule: bool = False,
) -> None:
    """Shows the effective plan when training starts, and reports once which settings have no effect.

    `note` describes the effects of resuming with another batch size, `loss_note` a division of the loss that differs
    from transformers, `changed_args` the differences from the resumed checkpoint, as lines. `begins_branch`: the
    checkpoint is another run's. `has_own_optimizer`, `has_own_schedule`: the arguments do not name it.
    """
    from trainwright.config.summary import own_optimizer, run_summary
    from trainwright.optim.own_optimizers import muon_lines

    idle: set[str] = set()
    for message in rules.advise(args) if args.should_log else ():
        logger.warning("%s", message)
        idle |= rules.idle_in(message)
    start = run.start
    plan = run.plan
    loader = run.setup.loader
    lines = source_lines(args, loader, plan, engine)
    if logger.isEnabledFor(logging.WARNING if args.should_log else logging.INFO):  # they are then shown
        number = engine.num_replicas
        size = _batch_size_in_force(args, loader, state, num_replicas=number)
        optimizer = ""
        schedule = ""
        if has_own_optimizer:
            optimizer = own_optimizer(run.setup.optimizer, has_own_schedule=has_own_schedule)
        if has_own_schedule:
            schedule = type(run.setup.scheduler).__name__
        summary = run_summary(
            args,
            plan,
            state,
            device=engine.device,
            num_replicas=number,
            batch_size=size,
            optimizer=optimizer,
            schedule=schedule,
            idle=idle,
        )
        lines = [*summary, *lines]
    lines += muon_lines(run.setup.optimizer, run.setup.model)
    if loss_note:
        lines.append(f"loss      {loss_note}")
    if start.checkpoint is not None:
        where = f"step {state.global_step}, {counted(start.batches, 'batch')} into epoch {start.epoch + 1}"
        lines.append(f"{'branches' if begins_branch else 'resumes':<10}{start.checkpoint}: {where}")
        if note:
            lines.append(f"resume    {note}")
    logger.info("***** Running training *****")  # as in transformers: tools look for it in the logs
    show_lines(args, lines)
    show_lines(args, (f"changed   {change}" for change in changed_args), level=logging.WARNING)


def _batch_size_in_force(args: Any, loader: object, state: TrainerState, *, num_replicas: int) -> int | None:
    """Returns the samples per micro-batch of a device, if it differs from the arguments.

    A library may change `per_device_train_batch_size` after construction, which does not affect the trainer's own
    loader, or make a loader itself.
    """
    if batching_fields(args):
        return None
    devices = max(args.n_gpu, 1)
    size = (state.train_batch_size or args.train_batch_size) // devices
    if num_replicas == devices == 1:
        sizes = [getattr(part, "batch_size", None) for part in (loader, getattr(loader, "batch_sampler", None))]
        size = next((one for one in sizes if type(one) is int and one > 0), size)
    return None if size == args.per_device_train_batch_size == state.train_batch_size else size


def source_lines(args: Any, loader: object, plan: StepPlan, engine: Engine) -> list[str]:
    """Returns lines about the training data, such as its sources.

    Raises ArgumentError if an override has replaced the order that the arguments ask for.
    """
    found = (handler.describe(args, loader, plan, dispatches=engine.dispatches) for handler in list_handlers())
    return list(itertools.chain.from_iterable(found))


def check_run(args: Any, facts: RunFacts) -> None:
    """Raises one ArgumentError with all invalid settings of a run; reports once which settings have no effect."""
    rules.check_run(args, facts)
    for message in rules.cautions(args, facts) if args.should_log else ():
        logger.warning("%s", message)


def show_lines(args: Any, lines: Iterable[str], *, level: int = logging.INFO) -> None:
    """Shows lines to the user, with or without a progress bar; logs them if only errors are shown."""
    shown = args.should_log and logger.isEnabledFor(logging.WARNING)
    for line in lines:
        if shown:
            print(fold_line(printable(line)), flush=True)
        elif args.should_log or level < logging.WARNING:
            logger.log(level, "%s", line)


def begin_journal(
    keeper: JournalListener,
    run: Run,
    args: Any,
    *,
    folder: str,
    run_id: str,
    model: Model,
    **data: Any,
) -> None:
    """Begins the journal of a run with its description. Only the first process writes, where output is saved.

    A run that neither saves nor tracks has a journal only with `journal=True`.
    """
    progress = run.progress
    journal: Journal = NullJournal()
    facts: dict[str, Any] = {}
    wanted = get_value(args, "journal")
    if wanted is None:
        callbacks = getattr(run.setup.events, "callbacks", ())
        tracks = any(is_instance_of(one, "trainwright.trackers.base", "TrackerCallback") for one in callbacks)
        wanted = args.save_strategy != "no" or tracks
    if wanted and args.should_save and progress.state.is_world_process_zero:
        journal = FileJournal(folder, run_id, waits=True)
        facts = {**collect_run_facts(args, run.setup.engine.device, data), "plan": dataclasses.asdict(run.plan)}
        facts["model"] = model_facts.summary(model)
        for told in run.extensions.facts:
            facts |= told()
    keeper.begin(journal, lambda: progress.state.global_step, checkpoint=run.start.checkpoint, facts=facts)


# Phase -> (share of the wall time from which advice is useful, advice).
HINTS: dict[str, tuple[float, str]] = {
    progress.DATA: (0.1, "more dataloader_num_workers, or cheaper samples"),
    progress.HOST_TO_DEVICE: (0.1, "pin memory (dataloader_pin_memory) and copy without waiting (non_blocking)"),
    progress.LOGGING: (0.05, "log less often: logging_steps"),
    progress.EVALUATION: (0.3, "evaluate less often (eval_steps), or with a larger per_device_eval_batch_size"),
    progress.SAVING: (0.1, "save less often: save_steps"),
    progress.CALLBACKS: (0.05, "do less in each event of it"),
}


LONG_ENOUGH_S = 60.0  # shorter runs get no advice about their time
STRATEGIES = {
    progress.LOGGING: "logging_strategy",
    progress.EVALUATION: "eval_strategy",
    progress.SAVING: "save_strategy",
}


def time_breakdown(args: Any, seconds: Mapping[str, float]) -> list[str]:
    """Returns a line with the shares of wall time above 1%, and in a run of a minute or more, advice.

    `args` has the strategies: a phase with the strategy "no" (a final save, a manual evaluation) gets no advice.
    """
    total = sum(seconds.values())
    idle = {phase for phase, strategy in STRATEGIES.items() if getattr(args, strategy) == "no"}
    if total <= 0:
        return ["time      nothing was measured"]
    shown = []
    hints = []
    for phase, value in sorted(seconds.items(), key=lambda item: -item[1]):
        kind, _, name = phase.partition(".")  # callbacks.MyCallback
        name = name or kind.replace("_", " ")
        share = value / total
        above, hint = HINTS.get(kind, (1.0, ""))
        shown += [f"{name} {share:.0%}"] if share >= 0.01 else []
        is_worth_advice = total >= LONG_ENOUGH_S and share > above and kind not in idle
        hints += [f"          {name}: {hint}"] if is_worth_advice else []
    return [f"time      {total:.1f} s: {', '.join(shown)}", *hints]


class DataWait:
    """The share of a clock's time spent waiting for data, between two calls."""

    def __init__(self, measured: progress.Clock) -> None:
        self._clock = measured
        self._waited, self._total = self._read()
        self._is_said = False  # advice is given once

    def tell(self, *, num_steps: int, num_workers: int) -> float:
        """Returns and logs the share since the last call; the first large share comes with advice."""
        waited_before = self._waited
        total_before = self._total
        self._waited, self._total = self._read()
        waited = self._waited - waited_before
        total = self._total - total_before
        share = waited / total if total > 0 else 0.0
        each_ms = waited / max(num_steps, 1) * 1e3
        logger.info("data_wait %.1f %% of the time since the last log, %.1f ms a step", share * 100, each_ms)
        if share > MUCH_WAITING and total >= ENOUGH_S and num_steps > 1 and not self._is_said:
            self._is_said = True
            logger.warning(
                "Training waited for data %.0f %% of the time since the last log (%.1f s of %.1f s). Raise "
                "dataloader_num_workers, which is %d, or make the samples cheaper to read.",
                share * 100,
                waited,
                total,
                num_workers,
            )
        return share

    def _read(self) -> tuple[float, float]:
        seconds = self._clock.read()
        return seconds.get(progress.DATA, 0.0), sum(seconds.values())
