"""Changes that a window of micro-batches makes to a run: recorded before it is read, and undone if it does not count.

A window does not count if it is repeated with smaller micro-batches, if a callback drops it, or if an error or a signal
ends it before its update. In all these cases, `WindowMark.rewind` is called. The loop's own counts are listed here and
nowhere else; each extension marks and rewinds its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainwright.loop.extension import Extension, Mark, Run
from trainwright.support.hooks import RandomStates


@dataclass(slots=True)  # not frozen: each step makes one, and that would take three times the time
class WindowMark:
    """State of a run before a window."""

    num_losses: int
    flos: float
    tokens: torch.Tensor | int
    total_flos: float  # as in the record: a log or a save within the window adds to it
    total_tokens: int
    extensions: list[tuple[Extension, Mark]]
    random_states: Any = None  # Any: each generator has its own type; None: a rewind does not restore them

    @classmethod
    def capture(cls, run: Run, *, random_states: RandomStates | None) -> WindowMark:
        """Records the state of a run; `random_states` captures the process's states, None skips them."""
        progress = run.progress
        state = progress.state
        return cls(
            num_losses=progress.meter.count,
            flos=progress.flos,
            tokens=progress.tokens,
            total_flos=state.total_flos,
            total_tokens=state.num_input_tokens_seen,
            extensions=run.extensions.marks() if run.extensions.mark else run.extensions.unmarked,
            random_states=None if random_states is None else random_states.capture(),
        )

    def rewind(self, run: Run, *, random_states: RandomStates | None) -> None:
        """Restores a run to the mark; the position in the data is not changed.

        `random_states` restores the states of the mark, if it has any.
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
    """Restores run and data to before the current window was read; does nothing between windows."""
    before: WindowMark | None = run.progress.window.start
    run.progress.window.start = None
    if before is not None:
        run.setup.loader.rewind()
        before.rewind(run, random_states=run.setup.random_states)
