"""What a window of micro-batches changes in a run: marked before it is read, and put back where it does not count.

A window does not count if it is tried again in smaller micro-batches, if a callback drops it, or if an error or a
signal cuts it off before its update. All of them call `WindowMark.rewind`. The loop's own counts are listed here, and
nowhere else; each extension marks and rewinds its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainwright.loop.extension import Extension, Mark, Run
from trainwright.support.hooks import RandomStates


@dataclass(slots=True)  # not frozen: one is made in each step, and that would take three times as long
class WindowMark:
    """A run before a window."""

    num_losses: int
    flos: float
    tokens: torch.Tensor | int
    total_flos: float  # of the record: a log or a save within the window adds to them
    total_tokens: int
    extensions: list[tuple[Extension, Mark]]
    random_states: Any = None  # Any: each generator has a type of its own; None: a rewind leaves them as they are

    @classmethod
    def of(cls, run: Run, *, random_states: RandomStates | None) -> WindowMark:
        """Notes where a run stands; `random_states` captures those of the process, None leaves them out."""
        progress = run.progress
        state = progress.state
        return cls(
            num_losses=progress.meter.count,
            flos=progress.flos,
            tokens=progress.tokens,
            total_flos=state.total_flos,
            total_tokens=state.num_input_tokens_seen,
            extensions=run.extensions.marks(),
            random_states=None if random_states is None else random_states.capture(),
        )

    def rewind(self, run: Run, *, random_states: RandomStates | None) -> None:
        """Puts a run back to where it stood; the position of the data stays.

        `random_states` restores those of the mark, if it has some.
        """
        progress = run.progress
        run.setup.engine.zero_grad(run.setup.model)
        if (
            progress.meter.count > self.num_losses or progress.meter.by_items
        ):  # it adds up all losses since the last log
            progress.meter.rewind(self.num_losses)
        progress.flos = self.flos
        progress.tokens = self.tokens
        progress.state.total_flos = self.total_flos
        progress.state.num_input_tokens_seen = self.total_tokens
        run.extensions.rewind_to(self.extensions)
        if random_states is not None and self.random_states is not None:
            random_states.restore(self.random_states)


def drop_window(run: Run) -> None:
    """Puts run and data back to where they stood before the current window was read; does nothing between two."""
    before: WindowMark | None = run.progress.window_start
    run.progress.window_start = None
    if before is not None:
        run.setup.loader.rewind()
        before.rewind(run, random_states=run.setup.random_states)
