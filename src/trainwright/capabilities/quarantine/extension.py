"""Quarantine of a run: samples excluded from its start, and samples added during the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import IterableDataset

from trainwright._types import DataLoaderLike, DatasetLike, counted, has_length
from trainwright.capabilities.quarantine.entries import CURE, Found, find_samples, read_entries
from trainwright.capabilities.quarantine.file import QUARANTINE_NAME, add_to_quarantine, note_sizes, read_quarantine
from trainwright.capabilities.quarantine.sample_filter import QuarantinedSamples
from trainwright.checkpoint.checkpoint import Checkpoint
from trainwright.checkpoint.store import CheckpointStore
from trainwright.data.identity import listed
from trainwright.data.loader import Loader
from trainwright.data.positions import make_position
from trainwright.data.row_names import NamesOf, RowNames
from trainwright.data.sample_filter import Sample
from trainwright.errors import DataError
from trainwright.loop.extension import Extension, Run

logger = logging.getLogger(__name__)


class Quarantine(Extension):
    """Samples excluded from a run.

    Args:
        folder: directory with the file that names them.
        dataset: the training data.
        names: names of its samples.
        agree: calls a function in the main process and returns its result in all of them.
    """

    name = "quarantine"

    def __init__(
        self,
        folder: str,
        dataset: DatasetLike,
        names: NamesOf,
        agree: Callable[[Callable[[], Found]], Found],
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._names = names
        self._agree = agree
        self._excluded: frozenset[Sample] = frozenset()  # the file's samples, and samples excluded since the run began

    def before_plan(self, run: Run, dataloader: DataLoaderLike) -> None:
        """Excludes the samples that are already in quarantine. All processes must call it."""
        found = self._agree(self._found)
        excluded = found.samples
        self._excluded = excluded
        for note in found.notes:
            logger.warning("%s", note)
        if not excluded:
            return
        position = make_position(dataloader)
        num_samples = len(self._dataset) if has_length(self._dataset) else 0
        position.exclude(QuarantinedSamples(excluded), num_samples)
        effect = ""
        if position.num_missing:
            effect = " Epochs are counted without them."
        elif not isinstance(self._dataset, IterableDataset):
            effect = (
                " The order comes from a sampler, or batches are formed by length: an epoch keeps its number of "
                "batches."
            )
        logger.warning(
            "In quarantine: %s, %s (%s in %s)%s.%s",
            counted(len(excluded), "sample"),
            listed(found.names),
            QUARANTINE_NAME,
            self._folder,
            f", of {num_samples} in the training data" if num_samples else "",
            effect,
        )

    def _found(self) -> Found:
        """Reads the file, in the main process, and finds its samples in the data."""
        read = read_quarantine(self._folder)
        if not read.entries:
            return Found(frozenset())
        names = self._names()
        if read.sizes is None and any(isinstance(entry, int) for entry in read.entries):
            self._take_numbers(names)
        return find_samples(read, self._dataset, names)

    def _take_numbers(self, names: RowNames) -> None:
        """Warns about numbers, which hold for one state of the data, and records which data they refer to.

        Raises DataError if the newest checkpoint of the directory was written for a different number of rows.
        """
        store = CheckpointStore(self._folder)
        newest = next(iter(store.steps()[-1:]), None)
        cursor = None if newest is None else Checkpoint(store.path(newest)).cursor
        trained = None if cursor is None or cursor.get("unit") else cursor.get("num_samples")
        if trained is not None and len(names) not in (0, trained):
            raise DataError(
                f"{QUARANTINE_NAME} in {self._folder} has sample numbers. The training "
                f"data had {counted(trained, 'row')} in checkpoint-{newest}, but now has {len(names)}, so the numbers "
                f"would exclude other rows. {CURE}"
            )
        logger.warning(
            "%s in %s has sample numbers. They are only right for the data for which they were written. "
            "trainer.quarantine writes names, which stay right when the data changes.",
            QUARANTINE_NAME,
            self._folder,
        )
        note_sizes(self._folder, names.sizes)

    def exclude(self, loader: Loader, samples: Iterable[Sample]) -> None:
        """Excludes more samples from the next window on; the loader then requests a recount of the steps."""
        excluded = self._agree(self._found).samples | self._excluded | set(samples)
        num_samples = len(self._dataset) if has_length(self._dataset) else 0
        loader.exclude(QuarantinedSamples(excluded), num_samples)
        self._excluded = excluded


def exclude(
    samples: Iterable[Any],
    column: str | None,
    *,
    dataset: DatasetLike,
    names: RowNames,
    folder: str,
    writes: bool,
    quarantine: Quarantine | None,
    loader: Loader | None,
) -> None:
    """Adds samples to the quarantine of a directory, and of the current run; see `Trainer.quarantine`.

    Args:
        samples: names, indices, positions in a stream, or values of a column.
        column: column with values that identify rows; None for names, indices and positions.
        dataset: the training data.
        names: names of its samples.
        folder: the directory.
        writes: this process writes the file.
        quarantine: of the current run; None outside of training.
        loader: loader of the current run.
    """
    found = read_entries(samples, dataset, names, column=column)
    if quarantine is not None and loader is not None:
        quarantine.exclude(loader, [sample for numbers in found.values() for sample in numbers])
    if writes:
        add_to_quarantine(folder, found)
