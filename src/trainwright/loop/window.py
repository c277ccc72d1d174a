"""What a window of micro-batches changes in a run: marked before it is trained, and put back where it does not count.

A window does not count if it is tried again in smaller micro-batches, if a callback drops it, or if an error or a
signal cuts it off before its update. All of them call `rewind`; what a window may change is listed here alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainwright._types import StateDict
from trainwright.loop.context import LoopContext
from trainwright.state.run_state import RunState
from trainwright.support.hooks import RandomStates


@dataclass(slots=True)  # not frozen: one is made in each step, and that would take three times as long
class WindowMark:
    """A run before a window."""

    num_losses: int
    num_recorded: int
    flos: float
    tokens: torch.Tensor | int
    total_flos: float  # of the record: a log or a save within the window adds to them
    total_tokens: int
    guard: object
    items: Mapping[str, StateDict]  # copied states of the user's checkpoint items, where `copies_items` says so
    random_states: Any = None  # Any: each generator has a type of its own; None: a rewind leaves them as they are


def mark(session: LoopContext, run: RunState, *, random_states: RandomStates | None) -> WindowMark:
    """Notes where a run stands before a window; `random_states` takes those of the process, None leaves them out."""
    items = session.items if copies_items(session) else {}
    return WindowMark(
        num_losses=run.meter.count,
        num_recorded=run.recorded.count,
        flos=run.flos,
        tokens=run.tokens,
        total_flos=run.state.total_flos,
        total_tokens=run.state.num_input_tokens_seen,
        guard=session.guard.mark(),
        items={name: copy.deepcopy(item.state_dict()) for name, item in items.items()},
        random_states=None if random_states is None else random_states.capture(),
    )


def rewind(session: LoopContext, run: RunState, before: WindowMark, *, random_states: RandomStates | None) -> None:
    """Puts a run back to where it stood before a window; the position of the data stays.

    `random_states` restores those of the mark, if it has some.
    """
    session.engine.zero_grad(session.model)
    if run.meter.count > before.num_losses or run.meter.by_items:  # it adds up all losses since the last log
        run.meter.rewind(before.num_losses)
    run.recorded.rewind(before.num_recorded, step=run.state.global_step + 1)
    run.flos = before.flos
    run.tokens = before.tokens
    run.state.total_flos = before.total_flos
    run.state.num_input_tokens_seen = before.total_tokens
    session.guard.rewind(before.guard)
    for name, state in before.items.items():
        session.items[name].load_state_dict(state)
    if random_states is not None and before.random_states is not None:
        random_states.restore(before.random_states)


def give_up(session: LoopContext, run: RunState) -> None:
    """Puts run and data back to where they stood before the window under way was fetched; does nothing between two."""
    before, run.window_start = run.window_start, None
    if before is not None:
        session.loader.rewind()
        rewind(session, run, before, random_states=session.random_states)


def copies_items(session: LoopContext) -> bool:
    """Returns True if a window of this run can be rewound, so that the states of checkpoint items must be copied."""
    may_be_dropped = session.plan.micro_batches > 1 or session.prepares_windows
    return bool(session.items) and (
        may_be_dropped or session.random_states is not None or session.smaller_batches is not None
    )
