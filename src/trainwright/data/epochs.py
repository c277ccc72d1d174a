"""The epoch of a map-style dataset: calls the user's `set_epoch`, in this process and in persistent workers.

A dataset that changes with the epoch has a method `set_epoch(epoch)`, counted from 0. It is called when the batches of
an epoch are opened, also in the middle of an epoch after a resume, and before workers are started, since they copy the
dataset. Persistent workers have a copy from the first epoch; later epochs reach them with the indices.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

_epoch_of_worker: int | None = None  # epoch of the last indices that this worker received


def call_set_epoch(dataset: Any, epoch: int) -> None:  # the user's own type
    """Calls `set_epoch` of a dataset that has this method."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def set_epoch_in_worker(epoch: int) -> None:
    """Calls `set_epoch` of this worker's copy of the dataset when a new epoch begins; does nothing elsewhere.

    A worker's first indices are from the epoch in which it was started, which its copy already has.
    """
    global _epoch_of_worker
    info = get_worker_info()
    if info is None:
        return
    if _epoch_of_worker is not None and _epoch_of_worker != epoch:
        call_set_epoch(info.dataset, epoch)
    _epoch_of_worker = epoch
