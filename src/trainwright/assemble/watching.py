"""What is shown of a run and written down about it: the effective plan, the journal, where the time went."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import torch

from trainwright.callbacks.dispatch import CallbackHandler
from trainwright.config import rules
from trainwright.config.effective import effective_plan
from trainwright.config.plans import StepPlan
from trainwright.journal import environment_info, timeline
from trainwright.journal.listener import JournalListener
from trainwright.journal.record import FileJournal, NullJournal
from trainwright.loop.context import LoopContext, RunStart
from trainwright.state.clock import Clock
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)


def make_keeper(handler: CallbackHandler, clock: Clock) -> JournalListener:
    """What keeps the journal: it hears all that the callbacks hear. The clock times both."""
    handler.clock = clock
    keeper = JournalListener(clock)
    handler.watch(keeper)
    return keeper


def begin_journal(keeper: JournalListener, args: Any, folder: str, run_id: str, *, session: LoopContext, run: RunState,
                  datasets: dict[str, Any]) -> None:  # fmt: skip
    """Opens the journal of a run and writes down what it is. Only the first process writes, where output is saved."""
    journal = FileJournal(folder, run_id) if args.should_save and run.state.is_world_process_zero else NullJournal()
    facts: dict[str, Any] = {}
    if isinstance(journal, FileJournal):
        facts = {
            "arguments": environment_info.arguments(args),
            "changed": environment_info.changed_arguments(args),
            "environment": environment_info.environment(session.engine.device),
            "data": {name: environment_info.data_summary(dataset) for name, dataset in datasets.items()},
            "process": environment_info.process(),
            "plan": dataclasses.asdict(session.plan),
        }
    keeper.begin(journal, lambda: run.state.global_step, checkpoint=session.start.checkpoint, facts=facts)


def tell_times(args: Any, keeper: JournalListener) -> None:
    """Says where the time of a run went, as the plan was said at its start."""
    show_lines(args, timeline.line(keeper.end()).splitlines())


def announce(
    plan: StepPlan,
    args: Any,
    state: TrainerState,
    *,
    device: torch.device,
    start: RunStart,
    num_replicas: int,
    note: str = "",
    caution: str | None = None,
    changes: Iterable[object] = (),
) -> None:
    """Shows the effective plan when training starts, and says once which settings have no effect.

    `caution`: what else a person should know before the first step. `changes`: what differs from the checkpoint that is
    resumed from, as lines.
    """
    for message in [*rules.idle(args), *([] if caution is None else [caution])]:
        logger.warning("%s", message)
    lines = effective_plan(args, plan, state, device=device, num_replicas=num_replicas)
    if start.checkpoint is not None:
        where = f"step {state.global_step}, {start.batches} batches into epoch {start.epoch + 1}"
        lines.append(f"resumes   {start.checkpoint}: {where}")
        if note:
            lines.append(f"goes on   {note}")
    show_lines(args, lines)
    show_lines(args, (f"changed   {change}" for change in changes), level=logging.WARNING)


def show_lines(args: Any, lines: Iterable[str], *, level: int = logging.INFO) -> None:
    """Lines for the person who watches; into the log where nobody does, or where only errors are shown."""
    shown = args.should_log and not args.disable_tqdm and logger.isEnabledFor(logging.WARNING)
    for line in lines:
        if shown:
            print(line, flush=True)
        elif args.should_log or level < logging.WARNING:
            logger.log(level, "%s", line)
