"""Shows what is trained when the first window is read, writes it into the journal, and leaves the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice

from trainwright._types import Batch
from trainwright.capabilities.what_is_trained.section import WhatIsTrained, read_section
from trainwright.capability import RunContext
from trainwright.config.fields import get_value
from trainwright.journal.record import live_journal
from trainwright.loop.extension import Extension, Run
from trainwright.support.hooks import is_overridden
from trainwright.support.loss_kernels import estimate_saving

logger = logging.getLogger(__name__)

MOST_BATCHES = 4  # of the first window
MUCH_BYTES = 1e9  # a saving that is worth a line


class ShowWhatIsTrained(Extension):
    """Shows the tokens and parameters that a run trains, before its first forward pass.

    Args:
        context: of the run.
    """

    name = "what_is_trained"
    order = -60  # its lines come before the findings of the first look

    def __init__(self, context: RunContext) -> None:
        self._context: RunContext | None = context
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        """Keeps the run, which it leaves after the first window."""
        self._run = run

    def window(self, batches: Sequence[Batch]) -> None:
        """Shows what the first window trains; no later window is looked at."""
        context = self._context
        run = self._run
        assert context is not None
        assert run is not None
        run.extensions.remove(self)
        state = run.progress.state
        if not state.is_world_process_zero:
            return
        try:
            found = self._read(context, batches)
        except Exception as error:  # what is only shown must not end a run
            logger.info("What is trained is not shown: %s: %s", type(error).__name__, error)
            return
        if found is None:
            return
        for line in (*found.lines(), *self._advise(context, batches)):
            context.show(line)
        if (journal := live_journal(context.folder)) is not None:
            journal.write("what_is_trained", step=state.global_step + 1, **found.to_dict())

    def _read(self, context: RunContext, batches: Sequence[Batch]) -> WhatIsTrained | None:
        first = [one for one in islice(batches, MOST_BATCHES) if hasattr(one, "keys")]
        return read_section(first, context.hooks.model, context.hooks.processing_class)

    def _advise(self, context: RunContext, batches: Sequence[Batch]) -> Iterator[str]:
        """Yields what a loss kernel would save, if that is much and the trainer does not look at logits."""
        hooks = context.hooks
        has_own_loss = hooks.compute_loss_func is not None or hooks.label_smoother is not None
        if has_own_loss or is_overridden(hooks, "compute_loss", "training_step"):
            return
        if get_value(context.args, "loss_kernel") is not None:
            return
        tokens = max(batch["input_ids"].numel() for batch in batches if hasattr(batch, "keys"))
        saving = estimate_saving(hooks.model, tokens)
        if saving is not None and saving[0] >= MUCH_BYTES and context.engine.hides_output_layer is None:
            yield (
                f"loss      loss_kernel='auto' would save about {saving[0] / 1e9:.1f} GB: the logits are {tokens:,} "
                f"tokens x {saving[1]:,} words"
            )

    def close(self) -> None:
        """Releases the run and the trainer."""
        self._context = None
        self._run = None
