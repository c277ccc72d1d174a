"""Output about a run: its header, the journal, where the time went."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterable
from typing import Any

from trainwright._types import printable
from trainwright.config import rules
from trainwright.config.rules.stages import RunFacts
from trainwright.engine.base import Engine
from trainwright.journal import timeline
from trainwright.journal.record import FileJournal, JournalListener, NullJournal
from trainwright.loop.context import LoopContext
from trainwright.state.run_state import RunState
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)


def use_log_level(args: Any) -> None:
    """Sets the level of our messages, and of transformers' where it is loaded, to that of the arguments."""
    for name in {"trainwright", "transformers"} & sys.modules.keys():
        logging.getLogger(name).setLevel(args.get_process_log_level())


def log_run_header(
    context: LoopContext,
    args: Any,
    state: TrainerState,
    engine: Engine,
    *,
    note: str,
    loss_note: str,
    changed_args: Iterable[object],
) -> None:
    """Shows the effective plan when training starts, and says once which settings have no effect.

    `note` is what a resume in batches of another size changes, `loss_note` where the loss is divided otherwise than in
    transformers, `changed_args` what differs from the checkpoint that is resumed from, as lines.
    """
    from trainwright.config.summary import run_summary

    for message in rules.advise(args):
        logger.warning("%s", message)
    start = context.start
    lines = run_summary(args, context.plan, state, device=engine.device, num_replicas=engine.num_replicas)
    if loss_note:
        lines.append(f"loss      {loss_note}")
    if start.checkpoint is not None:
        where = f"step {state.global_step}, {start.batches} batches into epoch {start.epoch + 1}"
        lines.append(f"resumes   {start.checkpoint}: {where}")
        if note:
            lines.append(f"goes on   {note}")
    logger.info("***** Running training *****")  # as in transformers: tools look for it in the logs
    show_lines(args, lines)
    show_lines(args, (f"changed   {change}" for change in changed_args), level=logging.WARNING)


def check_run(args: Any, facts: RunFacts) -> None:
    """Raises what is wrong with the settings of a run, in one ArgumentError; shows once what it cannot make use of."""
    rules.check_run(args, facts)
    for message in rules.cautions(args, facts):
        logger.warning("%s", message)


def show_lines(args: Any, lines: Iterable[str], *, level: int = logging.INFO) -> None:
    """Lines for the person who watches; into the log where nobody does, or where only errors are shown."""
    shown = args.should_log and not args.disable_tqdm and logger.isEnabledFor(logging.WARNING)
    for line in lines:
        if shown:
            print(printable(line), flush=True)
        elif args.should_log or level < logging.WARNING:
            logger.log(level, "%s", line)


def begin_journal(
    keeper: JournalListener,
    context: LoopContext,
    args: Any,
    progress: RunState,
    *,
    folder: str,
    run_id: str,
    **datasets: Any,
) -> None:
    """Opens the journal of a run and writes down what it is. Only the first process writes, where output is saved."""
    journal = (
        FileJournal(folder, run_id) if args.should_save and progress.state.is_world_process_zero else NullJournal()
    )
    facts: dict[str, Any] = {}
    if isinstance(journal, FileJournal):
        from trainwright.journal import environment_info

        facts = {
            "arguments": environment_info.arguments(args),
            "changed": environment_info.changed_arguments(args),
            "environment": environment_info.environment(context.engine.device),
            "data": {name: environment_info.data_summary(dataset) for name, dataset in datasets.items()},
            "process": environment_info.process(),
            "plan": dataclasses.asdict(context.plan),
        }
    keeper.begin(journal, lambda: progress.state.global_step, checkpoint=context.start.checkpoint, facts=facts)


def log_time_breakdown(args: Any, keeper: JournalListener) -> None:
    """Shows where the time of a run went, as the plan was shown at its start."""
    show_lines(args, timeline.line(keeper.end()).splitlines())
