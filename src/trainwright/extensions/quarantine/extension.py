"""Quarantine of a run: samples that its epochs exclude from the beginning, and those that are added under way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import IterableDataset

from trainwright._types import DataLoaderLike, DatasetLike, counted, has_length, is_count
from trainwright.data.loader import Loader
from trainwright.data.positions import position_of
from trainwright.data.quarantine import QUARANTINE_NAME, Sample, add_to_quarantine, read_quarantine
from trainwright.errors import DataError
from trainwright.loop.extension import Extension, Run

logger = logging.getLogger(__name__)


class Quarantine(Extension):
    """Samples that are excluded from a run.

    Args:
        folder: directory whose file names them.
        dataset: the training data.
        agree: calls a function in the main process and returns its result in all of them.
    """

    name = "quarantine"

    def __init__(
        self, folder: str, dataset: DatasetLike, agree: Callable[[Callable[[], set[Sample]]], set[Sample]]
    ) -> None:
        self._folder = folder
        self._dataset = dataset
        self._agree = agree
        self._excluded: set[Sample] = set()  # since the run began

    def before_plan(self, run: Run, dataloader: DataLoaderLike) -> None:
        """Excludes the samples that are in quarantine already. All processes call it."""
        excluded = self._agree(lambda: read_quarantine(self._folder))
        if not excluded:
            return
        position = position_of(dataloader)
        num_samples = len(self._dataset) if has_length(self._dataset) else 0
        position.exclude(excluded, num_samples)
        effect = ""
        if position.num_missing:
            effect = " Epochs are counted without them."
        elif not isinstance(self._dataset, IterableDataset):
            effect = (
                " The order is a sampler's or one of batches formed by length: an epoch keeps its number of batches."
            )
        logger.warning(
            "In quarantine: %s (%s in %s)%s.%s",
            counted(len(excluded), "sample"),
            QUARANTINE_NAME,
            self._folder,
            f", of {num_samples} in the training data" if num_samples else "",
            effect,
        )

    def exclude(self, loader: Loader, samples: Iterable[Sample]) -> None:
        """Excludes more samples from the next window on; the loader then asks for a new count of the steps."""
        excluded = read_quarantine(self._folder) | self._excluded | set(samples)
        loader.exclude(excluded, len(self._dataset) if has_length(self._dataset) else 0)
        self._excluded = excluded


def checked_samples(samples: Iterable[Any], dataset: DatasetLike, column: str | None) -> list[Sample]:
    """Returns samples to exclude, each once; DataError for one that names no sample of the dataset."""
    num_samples = len(dataset) if has_length(dataset) else 0
    is_endless = num_samples == 0 and isinstance(dataset, IterableDataset)
    found: dict[Sample, None] = {}  # each once, in this order
    for sample in samples:
        if column is not None and type(sample) in (int, str):
            found[column, sample] = None
        elif column is None and is_count(sample) and (is_endless or sample < num_samples):
            found[int(sample)] = None
        else:
            kind = f"a value of the column {column!r}" if column is not None else "the index of a sample"
            has = "" if is_endless or column is not None else f": the training dataset has {num_samples}"
            raise DataError(f"{sample!r} is not {kind}{has}.")
    return list(found)


def exclude(
    samples: Iterable[Any],
    column: str | None,
    *,
    dataset: DatasetLike,
    folder: str,
    writes: bool,
    quarantine: Quarantine | None,
    loader: Loader | None,
) -> None:
    """Adds samples to the quarantine of a directory, and of the run under way; see `Trainer.quarantine`.

    Args:
        samples: indices, places in a stream, or values of a column.
        column: by whose values rows are told apart; None for indices and places.
        dataset: the training data.
        folder: the directory.
        writes: this process writes the file.
        quarantine: of the run under way; None outside of a training.
        loader: of the run under way.
    """
    found = checked_samples(samples, dataset, column)
    if quarantine is not None and loader is not None:
        quarantine.exclude(loader, found)
    if writes:
        add_to_quarantine(folder, found)
