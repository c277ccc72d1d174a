"""Sanity check of the evaluation before step 1: one batch through model and metrics, for the names of the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch
from trainwright.errors import DataError, TrainwrightError

# A metric that fails like this fails on any data. Other errors may come from a batch that is too small to be judged
# (a class that is not in it, a variance of one value).
HOPELESS = (NameError, AttributeError, TypeError, ImportError, TrainwrightError)


class SilentEvents:
    """Replaces the run and its events: no callback is called, and a signal has no effect."""

    def __init__(self) -> None:
        self.interrupts = self

    def fire(self, event: str, run: object, **kwargs: object) -> None: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def passes(self) -> None: ...


def first_batches(dataloader: Iterable[Batch], number: int) -> Iterator[Batch]:
    """Yields the first `number` batches of a dataloader, read in this process: workers would read ahead."""
    indices = getattr(dataloader, "batch_sampler", None)
    dataset = getattr(dataloader, "dataset", None)
    if isinstance(dataloader, DataLoader) and indices is not None and not isinstance(dataset, IterableDataset):
        batches = [list(batch) for batch in islice(iter(indices), number)]
        dataloader = DataLoader(dataloader.dataset, batch_sampler=batches, collate_fn=dataloader.collate_fn)
    return islice(iter(dataloader), number)


class FirstBatch:
    """Iterates over the first batch of a dataloader; DataError where there is none."""

    def __init__(self, dataloader: Iterable[Batch]) -> None:
        for batch in first_batches(dataloader, 1):
            self.batch: Batch = batch
            return
        raise DataError("The evaluation set is empty: its dataloader gave no batch. Give it at least one sample.")

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.batch])


class Guarded:
    """Wraps `compute_metrics` and keeps the error that it raised, to tell it from others."""

    def __init__(self, compute_metrics: Callable[..., dict[str, Any]] | None) -> None:
        self._compute_metrics = compute_metrics
        self.error: Exception | None = None

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Any]:
        assert self._compute_metrics is not None
        try:
            return self._compute_metrics(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise

    def may_work_on_more(self, error: Exception) -> bool:
        """Returns True if an error is the metric's and may come from the small size of one batch."""
        return error is self.error and not isinstance(error, HOPELESS)
