"""Checkpoint items as an extension: their states are undone with a dropped window, and saved in checkpoints."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from trainwright._types import StateDict
from trainwright.capability_table import FILES
from trainwright.checkpoint import rng, training_state
from trainwright.data.prepared_dataloader import map_tensors
from trainwright.engine.base import Engine
from trainwright.loop.extension import Extension, SavedRun, Sink
from trainwright.support.hooks import Stateful

logger = logging.getLogger(__name__)


class CheckpointItems(Extension):
    """Objects of the user with a state, by name: `trainer.checkpoint_items`.

    Args:
        items: the objects; the user may add more at any time.
        engine: engine of the run.
        writes: this process writes the files of a checkpoint.
        is_rewindable: a window of this run may be repeated or dropped, so states are copied before each window.
    """

    name = "checkpoint_items"
    order = -10
    outlives_run = True

    def __init__(self, items: Mapping[str, Stateful], engine: Engine, *, writes: bool, is_rewindable: bool) -> None:
        self._items = items
        self._engine = engine
        self._writes = writes
        self._is_rewindable = is_rewindable

    def listens_to(self) -> set[str]:
        """Excludes `mark` and `rewind` if no window of the run can be undone."""
        events = super().listens_to()
        return events if self._is_rewindable else events - {"mark", "rewind"}

    def mark(self) -> dict[str, StateDict]:
        """Copies the states of all items."""
        return {name: copy.deepcopy(item.state_dict()) for name, item in self._items.items()}

    def rewind(self, mark: dict[str, StateDict]) -> None:
        """Restores the states of a mark; an item added since then keeps its own state."""
        for name, state in mark.items():
            self._items[name].load_state_dict(state)

    def save(self, folder: Path, sink: Sink) -> None:
        """Writes the states of each replica into its own file; all processes must call it."""
        if not self._items:
            return
        states = training_state.collect_item_states(self._items)
        if self._engine.num_replicas > 1:  # they are sent to the writing process
            states = map_tensors(lambda tensor: tensor.detach().cpu(), states)
        every = self._engine.gather_replica_objects(states)

        def write(copied: list[dict[str, StateDict]]) -> None:
            for rank, one in enumerate(copied):
                torch.save(one, folder / rng.file_name(rank, len(copied), FILES["checkpoint_items"]))

        if self._writes:
            sink.put(every, write)

    def load(self, checkpoint: SavedRun) -> None:
        """Restores the items; a replica without a file in the checkpoint uses that of the first replica."""
        rank = self._engine.replica
        entry = checkpoint.entry(self.name, rank=rank, num_processes=self._engine.num_replicas)
        if entry.path is not None and not entry.is_own and self._items:
            logger.warning(
                "%s has no checkpoint items for process %d; it uses the items of process 0.", checkpoint.path, rank
            )
        training_state.load_items(self._items, entry.state(), checkpoint.path)
