"""A rehearsal of the evaluation: one batch through model and metrics before step 1, so that what an evaluation yields
is known and not guessed. Who asks for it, and what must be found, is the façade's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import Batch
from trainwright.errors import DataError

# A metric that fails like this fails on any data. Other errors may come from a batch that is too small to be judged
# (a class that is not in it, a variance of one value).
HOPELESS = (NameError, AttributeError, TypeError, ImportError)


class SilentEvents:
    """Stands in for the run and its events: nobody is told, and a signal ends nothing here."""

    def __init__(self) -> None:
        self.interrupts = self

    def fire(self, event: str, run: Any, **kwargs: object) -> None: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def passes(self) -> None: ...


def first_batches(dataloader: object, number: int) -> Iterator[Batch]:
    """So many batches of a dataloader, read in this process: workers would read on behind them."""
    indices = getattr(dataloader, "batch_sampler", None)
    dataset = getattr(dataloader, "dataset", None)
    if isinstance(dataloader, DataLoader) and indices is not None and not isinstance(dataset, IterableDataset):
        batches = [list(batch) for batch in islice(iter(indices), number)]
        dataloader = DataLoader(dataloader.dataset, batch_sampler=batches, collate_fn=dataloader.collate_fn)
    return islice(iter(dataloader), number)


class FirstBatch:
    """The first batch of a dataloader."""

    def __init__(self, dataloader: object) -> None:
        for batch in first_batches(dataloader, 1):
            self.batch: Batch = batch
            return
        raise DataError("The evaluation set is empty: its dataloader gave no batch. Give it at least one sample.")

    def __iter__(self) -> Iterator[Batch]:
        return iter([self.batch])


class Guarded:
    """A `compute_metrics` that tells its own failure from any other."""

    def __init__(self, compute_metrics: Any) -> None:
        self._compute_metrics = compute_metrics
        self.error: Exception | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        try:
            return self._compute_metrics(*args, **kwargs)
        except Exception as error:
            self.error = error
            raise

    def may_work_on_more(self, error: Exception) -> bool:
        """Whether an error is the metric's own and may only come from the smallness of one batch."""
        return error is self.error and not isinstance(error, HOPELESS)
